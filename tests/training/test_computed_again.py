"""What ``torch.utils.checkpoint`` computes again is used as in plain PyTorch, also if it is another then."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as checkpoint_by_hooks
from torch.utils.checkpoint import checkpoint

from tests.training.leases import leased_bytes
from tests.training.twins import Trial, assert_same, config_of, every_layout, with_device
from tierstore.training import offload

WIDTH = 64
LAYERS = 8


class Alternating(nn.Module):
    """Is another layer each time that it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        made: Tensor = torch.tanh(self.one(x) if self.calls % 2 else self.other(x))
        return made


class Shrinking(nn.Linear):
    """Writes to its own weight before it uses it, and says nothing to the version counter."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.mul_(0.9)
        return torch.tanh(super().forward(x))


class ShrinkingInSight(Shrinking):
    """Writes in place, as the version counter tells."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.9)
        return torch.tanh(nn.Linear.forward(self, x))


class Offset(nn.Module):
    """Saves nothing but parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Parameter(torch.rand(2, WIDTH)), nn.Parameter(torch.rand(2, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.one * self.other


KINDS: dict[str, Callable[[], nn.Module]] = {
    "alternating": Alternating,
    "writing unseen": Shrinking,
    "writing in sight": ShrinkingInSight,
    "only parameters saved": Offset,
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
}


def _build(kind: str) -> Callable[[], tuple[nn.Module, list[torch.optim.Optimizer]]]:
    def build() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model = nn.Sequential(*(KINDS[kind]() for _ in range(LAYERS)))
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    return build


def _of_all(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def _of_all_reentrant(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True)  # type: ignore[no-any-return]


def _of_each(model: nn.Module, x: Tensor) -> Tensor:
    for layer in model:  # type: ignore[attr-defined]
        x = checkpoint(layer, x, use_reentrant=False)
    return x


def _nested(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(_of_each, model, x, use_reentrant=False)  # type: ignore[no-any-return]


def _to_the_end(model: nn.Module, x: Tensor) -> Tensor:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        return _of_all(model, x)


def _begun_by_hooks(model: nn.Module, x: Tensor) -> Tensor:
    """Begin each layer's checkpoint in a hook of its own: what it saves goes past hooks that began before."""
    for layer in model:  # type: ignore[attr-defined]
        if not hasattr(layer, "is_checkpointed"):
            layer.is_checkpointed = True
            checkpoint_by_hooks(layer)
    return model(x)  # type: ignore[no-any-return]


WAYS = {
    each.__name__.strip("_"): each
    for each in (_of_all, _of_all_reentrant, _of_each, _nested, _to_the_end, _begun_by_hooks)
}


@every_layout
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_again_is_what_backward_uses(
    kind: str, way: str, layout: str, tmp_path: Path
) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            x = torch.randn(2, WIDTH, requires_grad=True)
            WAYS[way](trial.model, x).square().mean().backward()
            trial.log(x.grad)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(_build(kind), loop, layout, tmp_path, with_device(layout, "256KB"))


@every_layout
def test_a_graph_of_the_gradients_goes_through_what_is_computed_again(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        x = torch.randn(2, WIDTH, requires_grad=True)
        loss = _of_all(trial.model, x).square().sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        trial.log(slope)
        slope.square().sum().backward()
        trial.log_gradients()

    assert_same(_build("alternating"), loop, layout, tmp_path, with_device(layout, "512KB"))


@every_layout
def test_hooks_are_called_as_often_when_it_is_computed_again(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        calls: list[str] = []
        for name, module in trial.model.named_modules():
            module.register_forward_hook(lambda *_, name=name: calls.append(name))
        _of_all(trial.model, torch.randn(2, WIDTH, requires_grad=True)).square().mean().backward()
        trial.log(torch.tensor([int(name or -1) for name in calls if "." not in name]))

    assert_same(_build("only parameters saved"), loop, layout, tmp_path, with_device(layout, "256KB"))


def test_what_is_computed_again_keeps_no_bundle(tmp_path: Path) -> None:
    model, _ = _build("linear")()
    most = 0
    with offload(model, None, config_of("disk", tmp_path)) as active:

        def look(*_: object) -> None:
            nonlocal most
            most = max(most, leased_bytes(active))

        loss = _of_all(model, torch.randn(2, WIDTH, requires_grad=True)).square().mean()
        model[-1].register_forward_pre_hook(look)  # type: ignore[index]
        loss.backward()
    assert 0 < most <= 2 * (WIDTH + 1) * WIDTH * 4
