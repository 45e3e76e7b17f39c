"""Hooks on saved tensors, of users and ours, after a forward that an interrupt has ended."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._composable.checkpoint_activation import checkpoint

from tests.training.swap_models import config, whole_layers
from tests.training.twins import (
    Optimizer,
    Trial,
    assert_same,
    batch,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    step,
)
from tierstore.training import offload, recompute, swap
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks


@every_layout
@pytest.mark.parametrize("is_around", [True, False], ids=["around", "after"])
def test_hooks_beside_a_forward_that_was_interrupted(is_around: bool, layout: str, tmp_path: Path) -> None:
    """PyTorch ends no hooks of modules then; ours go, and nobody else's."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def loop(trial: Trial) -> None:
        seen: list[int] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor.numel())
            return tensor

        hooks = functools.partial(saved_tensors_hooks, pack, lambda tensor: tensor)
        for _ in range(2):
            handle = trial.model[1].up.register_forward_hook(interrupt)  # type: ignore[index]
            with contextlib.suppress(KeyboardInterrupt), hooks() if is_around else contextlib.nullcontext():
                trial.model(batch()[0])
            handle.remove()
            seen.clear()
            with hooks():
                loss = loss_of(trial.model, *batch())
            trial.log(torch.tensor(seen))
            loss_of(trial.model, *batch())
            trial.log(torch.tensor(seen))
            loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
            step(trial)
        assert top_hooks() is None

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
@pytest.mark.parametrize("name", ["0", ""])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError])
def test_a_checkpoint_by_hooks_that_was_interrupted_keeps_nothing_for_the_next_call(
    kind: type[BaseException], name: str, layout: str, tmp_path: Path
) -> None:
    """What such a checkpoint has put in force stays until PyTorch begins the next one in its place."""

    def interrupt(*_: object) -> None:
        raise kind

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model, optimizers = build_blocks()
        checkpoint(model.get_submodule(name))
        return model, optimizers

    def loop(trial: Trial) -> None:
        for _ in range(2):
            handle = trial.model.get_submodule("0.up").register_forward_pre_hook(interrupt)
            with contextlib.suppress(kind):
                trial.model(torch.randn_like(batch()[0]))
            handle.remove()
            loss_of(trial.model, *batch()).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
        assert top_hooks() is None

    assert_same(build, loop, layout, tmp_path)


FROM_DISK = {"more": {"offload_checkpoint": "disk", "offload_disk_size": "1MB"}}
ACTIVATIONS: dict[str, dict[str, Any]] = {
    "kept": {},
    "swapped": {"swap_config": {"swap": True, **whole_layers(1)}},
    "recomputed": {"recompute_config": {"recompute": True}},
    "recomputed from elsewhere": {"recompute_config": {"recompute": True}, **FROM_DISK},
    "operators recomputed": {"recompute_config": {"select_recompute": [r"aten\..*"]}},
    "swapped and recomputed": {
        "swap_config": {"swap": True, **whole_layers(1)},
        "recompute_config": {"recompute": [1], "select_recompute": {r"aten\.tanh": [0, 2]}},
    },
    "swapped and recomputed from elsewhere": {
        "swap_config": {"swap": True, **whole_layers(1)},
        "recompute_config": {"recompute": [1, 2]},
        **FROM_DISK,
    },
}


def _document(path: Path, activations: str) -> dict[str, object]:
    sections = dict(ACTIVATIONS[activations])
    more = sections.pop("more", {})
    return {"offload_config": config_of("host", path, more), **sections}


def _layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))


def _slopes(model: nn.Module) -> list[Tensor]:
    loss = model(torch.ones(32, 64)).square().sum()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _interrupt(model: nn.Module, kind: type[BaseException]) -> None:
    """End a forward in its midst, and keep nothing of the exception."""

    def interrupt(*_: object) -> None:
        raise kind

    handle = model.get_submodule("2.0").register_forward_hook(interrupt)
    with contextlib.suppress(kind):
        model(torch.ones(32, 64))
    handle.remove()


def _nothing_is_in_force() -> bool:
    return top_hooks() is None and not torch._C._len_torch_dispatch_stack()


@pytest.mark.parametrize("activations", ACTIVATIONS)
@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, ValueError])
def test_nothing_is_in_force_after_a_forward_that_anything_has_ended(
    kind: type[BaseException], activations: str, tmp_path: Path
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    document = _document(tmp_path, activations)
    with offload(model, None, document, layers=""):
        for _ in range(2):
            _interrupt(model, kind)
            assert _nothing_is_in_force()
            with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                assert all(map(torch.equal, expected, _slopes(model)))
            _interrupt(model, kind)
            assert all(map(torch.equal, expected, _slopes(model)))
            assert _nothing_is_in_force()


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_what_an_interrupt_has_left_in_force_ends_with_the_models_next_call_while_the_exception_is_kept(
    activations: str, tmp_path: Path
) -> None:
    expected = _slopes(_layers())
    model = _layers()
    document = _document(tmp_path, activations)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with offload(model, None, document, layers=""):
        handle = model.get_submodule("2.0").register_forward_hook(interrupt)
        try:
            model(torch.ones(32, 64))
        except KeyboardInterrupt:
            handle.remove()
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                assert all(map(torch.equal, expected, _slopes(model)))
                seen.clear()
                torch.ones(3, requires_grad=True).exp()
                assert seen == [3], "what is saved outside of the model is the user's"
            assert _nothing_is_in_force()
        assert all(map(torch.equal, expected, _slopes(model)))
        assert _nothing_is_in_force()


@pytest.mark.parametrize("activations", ACTIVATIONS)
def test_nothing_is_in_force_in_a_thread_whose_forward_was_ended(activations: str, tmp_path: Path) -> None:
    expected = _slopes(_layers())
    model = _layers()
    document = _document(tmp_path, activations)
    found: list[bool] = []

    def work() -> None:
        _interrupt(model, SystemExit)
        found.append(_nothing_is_in_force())
        found.append(all(map(torch.equal, expected, _slopes(model))))

    with offload(model, None, document, layers=""):
        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert found == [True, True]
        assert all(map(torch.equal, expected, _slopes(model)))


def _swap(model: nn.Module, path: Path) -> Any:  # noqa: ANN401 - one run or another
    return swap(model, config(path, whole_layers(1)))


def _select(model: nn.Module, path: Path) -> Any:  # noqa: ANN401 - one run or another
    del path
    return recompute(model, {"select_recompute": [r"aten\.tanh"]})


class Layer(nn.Module):
    """A layer that an interrupt may end in its midst."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.is_interrupted = False

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.tanh(self.inner(x))
        if self.is_interrupted:
            raise KeyboardInterrupt
        return y * y


@pytest.mark.parametrize("is_around", [True, False], ids=["around", "after"])
@pytest.mark.parametrize("begin", [_swap, _select])
def test_hooks_beside_a_swap_or_recomputation_that_was_interrupted(
    begin: Callable[[nn.Module, Path], Any], is_around: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"layers": nn.Sequential(*(Layer() for _ in range(4)))})
    layers = model["layers"]
    third: Any = layers.get_submodule("2")
    x = torch.randn(3, 16)
    seen: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        seen.append(tensor.numel())
        return tensor

    hooks = functools.partial(saved_tensors_hooks, pack, lambda tensor: tensor)

    def slopes() -> list[Tensor]:
        return list(torch.autograd.grad(layers(x).square().sum(), list(model.parameters())))

    expected = slopes()
    with begin(model, tmp_path):
        for _ in range(2):
            third.is_interrupted = True
            with contextlib.suppress(KeyboardInterrupt), hooks() if is_around else contextlib.nullcontext():
                layers(x)
            third.is_interrupted = False
            seen.clear()
            with hooks():
                (layers(x) * 2).exp()
            assert seen, "what nobody recomputes or swaps is the user's"
            count = len(seen)
            assert all(map(torch.equal, slopes(), expected))
            assert len(seen) == count
    assert top_hooks() is None
