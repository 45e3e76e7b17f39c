"""When gradients go and come: passes inside passes, interrupted ones, threads, graphs and steps in hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.twins import (
    WIDTH,
    Block,
    Loop,
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    with_device,
)
from tierstore.training import offload
from tierstore.training.autograd.gradient import native_gradient

MICRO_BATCHES = 3
Hook = Callable[[Tensor], None]


def _accumulate(trial: Trial, count: int = MICRO_BATCHES) -> None:
    for _ in range(count):
        loss_of(trial.model, *batch()).backward()
        trial.log_gradients()


def _finish(trial: Trial) -> None:
    trial.optimizer.step()
    trial.optimizer.zero_grad()


def _hooked(make: Callable[[Trial], Hook], between: Callable[[Trial], None] = lambda _: None) -> Loop:
    """Return a loop with one hook on all parameters, and something between micro-batches."""

    def loop(trial: Trial) -> None:
        hook = make(trial)
        for parameter in trial.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(2):
            for _ in range(MICRO_BATCHES):
                _accumulate(trial, 1)
                between(trial)
            _finish(trial)

    return loop


def _check(loop: Loop, layout: str, tmp_path: Path, build: object = build_blocks) -> None:
    assert_same(build, loop, layout, tmp_path, {**with_device(layout, "256KB"), "offload_grad": "cpu"})  # type: ignore[arg-type]


# ---------------------------------------------------------------------- passes inside passes


@every_layout
def test_a_hook_runs_a_backward_pass_that_adds_to_the_same_gradient(layout: str, tmp_path: Path) -> None:
    def make(trial: Trial) -> Hook:
        inside: list[Tensor] = []

        def hook(parameter: Tensor) -> None:
            if inside or parameter.dim() > 1:
                return
            inside.append(parameter)
            with torch.enable_grad():
                (parameter.sin() * 3).sum().backward()
            trial.log(parameter.grad)
            inside.clear()

        return hook

    _check(_hooked(make), layout, tmp_path)


@every_layout
def test_a_hook_runs_the_model_and_another_backward_pass(layout: str, tmp_path: Path) -> None:
    def make(trial: Trial) -> Hook:
        inside: list[Tensor] = []
        last = next(trial.model[-1].parameters())  # type: ignore[index]

        def hook(parameter: Tensor) -> None:
            if inside or parameter is not last:
                return
            inside.append(parameter)
            with torch.enable_grad():
                loss_of(trial.model, torch.ones(3, WIDTH), torch.zeros(3, dtype=torch.int64)).backward()
            trial.log(parameter.grad)
            inside.clear()

        return hook

    _check(_hooked(make), layout, tmp_path)


class Recomputing(nn.Module):
    """Blocks that are computed again, inside backward passes of their own or not."""

    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)
        self._is_reentrant = is_reentrant

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, WIDTH)`` to logits."""
        x = x.requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self._is_reentrant)
        logits: Tensor = self.head(x)
        return logits


@every_layout
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_with_hooks(layout: str, is_reentrant: bool, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Recomputing(is_reentrant=is_reentrant)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    _check(_hooked(lambda trial: lambda parameter: trial.log(parameter.grad)), layout, tmp_path, build)


# ---------------------------------------------------------------------- what hooks keep


def _in_the_second_pass(trial: Trial, act: Callable[[nn.Parameter], None]) -> Hook:
    """Return a hook that acts when gradients have waited once."""
    calls: dict[nn.Parameter, int] = dict.fromkeys(trial.model.parameters(), 0)

    def hook(parameter: nn.Parameter) -> None:
        calls[parameter] += 1
        if calls[parameter] % MICRO_BATCHES == 2:
            act(parameter)

    return hook  # type: ignore[return-value]


@every_layout
def test_a_graph_that_saved_a_gradient_in_a_hook_has_its_values(layout: str, tmp_path: Path) -> None:
    losses: list[Tensor] = []
    factor = torch.ones((), requires_grad=True)

    def save(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if parameter.dim() == 1:
            with torch.enable_grad():
                losses.append((parameter.grad * factor).sum())

    def between(trial: Trial) -> None:
        for loss in losses:
            trial.log(torch.autograd.grad(loss, factor)[0])
        losses.clear()

    _check(_hooked(lambda trial: _in_the_second_pass(trial, save), between), layout, tmp_path)


@every_layout
def test_an_array_of_a_gradient_that_waited_is_the_gradient(layout: str, tmp_path: Path) -> None:
    arrays: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []

    def take(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        if len(arrays) < 3:
            arrays.append(parameter.grad.numpy())

    def between(trial: Trial) -> None:
        trial.log(loss_of(trial.model, *batch()))  # brings everything, and pushes everything out
        for array in arrays:
            trial.log(torch.tensor(array))
            np.multiply(array, 2, out=array)

    def loop(trial: Trial) -> None:
        _hooked(lambda trial: _in_the_second_pass(trial, take), between)(trial)
        arrays.clear()

    _check(loop, layout, tmp_path)


# ---------------------------------------------------------------------- other passes


@every_layout
def test_gradients_are_asked_for_amid_accumulation(layout: str, tmp_path: Path) -> None:
    def between(trial: Trial) -> None:
        loss = loss_of(trial.model, *batch())
        for gradient in torch.autograd.grad(loss, list(trial.model.parameters())):
            trial.log(gradient)

    _check(_hooked(lambda trial: lambda parameter: trial.log(parameter.grad), between), layout, tmp_path)


@every_layout
def test_gradients_zeroed_in_place_between_passes(layout: str, tmp_path: Path) -> None:
    def between(trial: Trial) -> None:
        trial.optimizer.zero_grad(set_to_none=False)
        trial.log_gradients()

    _check(_hooked(lambda trial: lambda parameter: trial.log(parameter.grad), between), layout, tmp_path)


@every_layout
def test_a_hook_that_raises_leaves_what_plain_pytorch_leaves(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        calls = [0]

        def hook(_: Tensor) -> None:
            calls[0] += 1
            if calls[0] in (3, 20, 30):
                raise ZeroDivisionError

        for parameter in trial.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(3):
            for _ in range(2):
                loss = loss_of(trial.model, *batch())
                try:
                    loss.backward()
                except ZeroDivisionError:
                    trial.log(None)
                trial.log_gradients()
            _finish(trial)

    _check(loop, layout, tmp_path)


def test_gradients_of_a_pass_that_was_interrupted_leave_with_the_next_use(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()

    def stop(_: Tensor) -> None:
        raise ZeroDivisionError

    config = config_of("disk", tmp_path, {"offload_grad": "disk"})
    with offload(model, optimizer, config):
        loss_of(model, *batch()).backward()
        handle = model[0].norm.weight.register_post_accumulate_grad_hook(stop)  # type: ignore[index]
        with pytest.raises(ZeroDivisionError):
            loss_of(model, *batch()).backward()
        handle.remove()
        lent = [parameter for parameter in model.parameters() if native_gradient(parameter) is not None]
        assert lent, "it was interrupted while autograd had them"
        model(torch.ones(2, WIDTH))
        assert not [parameter for parameter in model.parameters() if native_gradient(parameter) is not None]
        assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["host", "disk"])
def test_two_threads_add_to_the_same_gradients(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            losses = [
                loss_of(trial.model, *batch()) for _ in range(2)
            ]  # the order of two addends is no matter
            threads = [threading.Thread(target=loss.backward) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            trial.log_gradients()
            _finish(trial)

    assert_same(build_blocks, loop, layout, tmp_path, {"offload_grad": "cpu"})


# ---------------------------------------------------------------------- steps in hooks


@pytest.mark.parametrize("layout", ["host", "disk"])
@pytest.mark.parametrize("passes", [1, 2])
def test_an_optimizer_steps_in_a_hook(layout: str, passes: int, tmp_path: Path) -> None:
    owners: list[dict[Tensor, Optimizer]] = []

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        owners.append(
            {parameter: torch.optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()}
        )
        return model, list(owners[-1].values())

    def loop(trial: Trial) -> None:
        calls: dict[Tensor, int] = dict.fromkeys(trial.model.parameters(), 0)

        def hook(parameter: Tensor) -> None:
            calls[parameter] += 1
            trial.log(parameter.grad)
            if calls[parameter] % passes == 0:
                owners[-1][parameter].step()
                owners[-1][parameter].zero_grad()
                assert parameter.grad is None

        for parameter in trial.model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)
        for _ in range(3 * passes):
            loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "256KB"))


def test_a_gradient_that_is_stepped_in_a_hook_never_comes_to_the_store(tmp_path: Path) -> None:
    model = blocks()
    optimizers = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        optimizers[parameter].step()  # type: ignore[index]
        optimizers[parameter].zero_grad()  # type: ignore[index]

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    with offload(
        model, list(optimizers.values()), config_of("disk", tmp_path, {"offload_grad": "disk"})
    ) as run:
        loss_of(model, *batch()).backward()
        assert not [key for key in run.store if key.startswith("grad/")]
