"""Storages of parameters: what a program sees that looks at the memory itself is what plain PyTorch shows."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import Optimizer, Trial, adam, assert_same, every_layout, with_device

WIDTH = 24


def _bytes_of_file(tensor: Tensor) -> int:
    file = io.BytesIO()
    torch.save(tensor.detach(), file)
    return file.tell()


LOOKS: dict[str, Callable[[Tensor], object]] = {
    "offset": lambda w: w.storage_offset(),
    "offset of an alias": lambda w: w.detach().storage_offset(),
    "offset of a view": lambda w: w.view(-1)[5:].storage_offset(),
    "bytes of the storage": lambda w: w.untyped_storage().nbytes(),
    "of the data": lambda w: w.data.untyped_storage().nbytes(),
    "strided from the beginning": lambda w: w.as_strided((3, 2), (2, 1), 0).sum().item(),
    "strided from a byte": lambda w: w.as_strided((3, 2), (2, 1), 4).sum().item(),
    "strided beyond the end": lambda w: w.as_strided((2 * w.numel(),), (1,), 0),
    "a tensor on the storage": lambda w: torch.empty(0).set_(w.detach().untyped_storage()).sum().item(),
    "bytes of a copy": lambda w: copy.deepcopy(w.data).untyped_storage().nbytes(),
    "bytes in a file": _bytes_of_file,
    "bytes of a gradient": lambda w: None if w.grad is None else w.grad.untyped_storage().nbytes(),
}


def _step(trial: Trial) -> None:
    trial.model(torch.ones(2, WIDTH)).square().mean().backward()
    trial.log_gradients()
    trial.optimizer.step()
    trial.optimizer.zero_grad()


def _look(name: str, tensor: Tensor) -> object:
    try:
        return LOOKS[name](tensor)
    except RuntimeError as error:
        return str(error).split(" for ")[0]  # PyTorch goes on with the shape and the address


class _Seen(torch.autograd.Function):
    """The product with a weight, which looks at the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, name: str, seen: list[object]) -> Tensor:  # noqa: ANN401
        ctx.save_for_backward(inputs, weight)
        ctx.name, ctx.seen = name, seen
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        (slope,) = slopes
        inputs, weight = ctx.saved_tensors
        if ctx.name != "bytes of a gradient":
            ctx.seen.append(_look(ctx.name, weight))
        return slope @ weight, slope.t() @ inputs, None, None


class _Looking(nn.Linear):
    """A layer that looks at its parameters in its forward, and in backward."""

    def __init__(self, name: str) -> None:
        super().__init__(WIDTH, WIDTH)
        self.name = name
        self.seen: list[object] = []

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += [_look(self.name, parameter) for parameter in (self.weight, self.bias)]
        product: Tensor = _Seen.apply(inputs, self.weight, self.name, self.seen)  # type: ignore[no-untyped-call]
        return product + self.bias


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("name", LOOKS)
def test_a_parameter_s_memory_is_its_own_to_whoever_looks(name: str, layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(_Looking(name) for _ in range(3)))
        return model, adam(model)

    def loop(trial: Trial) -> None:
        layers = [layer for layer in trial.model.children() if isinstance(layer, _Looking)]
        for _ in range(2):
            trial.model(torch.ones(2, WIDTH)).square().mean().backward()
            for parameter in trial.model.parameters():
                trial.log(
                    torch.tensor(0.0 if (seen := _look(name, parameter)) is None else hash(seen) % 10**6)
                )
            for layer in layers:
                trial.log(torch.tensor([hash(each) % 10**6 for each in layer.seen]))
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path, with_device(layout, "64KB"))


@every_layout
def test_aliases_kept_over_calls_have_the_storage_of_the_parameter(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        return model, adam(model)

    def loop(trial: Trial) -> None:
        weight, bias = list(trial.model.parameters())[:2]
        kept = weight.detach()
        alone = bias.detach()
        same: list[bool] = []

        def look(layer: nn.Module, *_: object) -> None:
            inner: Any = layer
            for alias in (kept, alone):
                same.extend(
                    alias.untyped_storage()._cdata == p.untyped_storage()._cdata
                    for p in (inner.weight, inner.bias)
                )

        first: nn.Module = next(trial.model.children())
        first.register_forward_pre_hook(look)
        for _ in range(2):
            _step(trial)
            trial.log(torch.tensor(same))

    assert_same(build, loop, layout, tmp_path, with_device(layout, "64KB"))


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_parameters_that_share_memory_show_one_storage(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        first, second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH // 2)
        second.weight = nn.Parameter(first.weight.detach()[WIDTH // 2 :])
        model = nn.Sequential(first, second)
        return model, [torch.optim.SGD(model.parameters(), lr=0.1)]

    def loop(trial: Trial) -> None:
        first, second = (layer.weight for layer in trial.model.children())
        assert isinstance(first, Tensor)
        assert isinstance(second, Tensor)
        for _ in range(2):
            trial.log(torch.tensor([w.storage_offset() for w in (first, second)]))
            trial.log(torch.tensor([w.untyped_storage().nbytes() for w in (first, second)]))
            trial.log(second.as_strided((5,), (1,), 3))
            _step(trial)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "64KB"))
