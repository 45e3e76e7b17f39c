"""Models with large buffers of every kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from tests.training.twins import WIDTH, Optimizer, adam
from tierstore.training.faults import guard

ALL = {"buffer_min_size": 0}
Make = Callable[[], Tensor]

KINDS: dict[str, Make] = {
    "float": lambda: torch.randn(WIDTH, WIDTH),
    "double": lambda: torch.randn(WIDTH, dtype=torch.float64),
    "half": lambda: torch.randn(WIDTH, WIDTH).half(),
    "bfloat16": lambda: torch.randn(WIDTH, WIDTH).bfloat16(),
    "mask": lambda: torch.rand(WIDTH, WIDTH) > 0.5,
    "index": lambda: torch.randperm(WIDTH),
    "bytes": lambda: torch.randint(0, 255, (WIDTH, WIDTH), dtype=torch.uint8),
    "complex": lambda: torch.randn(WIDTH, dtype=torch.complex64),
    "conjugated": lambda: torch.randn(WIDTH, dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 3),
    "number": lambda: torch.tensor(1.5),
    "transposed": lambda: torch.randn(WIDTH, WIDTH).t(),
    "strided": lambda: torch.randn(WIDTH, 2 * WIDTH)[:, ::2],
    "expanded": lambda: torch.randn(1, WIDTH).expand(WIDTH, WIDTH),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
}


class Holder(nn.Module):
    """Computes with a buffer of any kind, which backward needs as well."""

    def __init__(self, make: Make, *, persistent: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("held", make(), persistent=persistent)
        self.held: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Multiply with what the buffer amounts to."""
        x = cast("Tensor", self.linear(x))
        values = torch.view_as_real(self.held.resolve_conj()) if self.held.is_complex() else self.held
        if values.shape == (WIDTH, WIDTH) and values.dtype == torch.float32:
            return x + torch.tanh(x @ values)
        return x * (1 + values.to(x.dtype).sum().tanh())


def head() -> nn.Module:
    """Return what turns the last outputs into classes."""
    return nn.Linear(WIDTH, 5)


def of(*modules: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Sequence[Optimizer]]]:
    """Return what builds a model of some modules, with Adam."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(*(make() for make in modules), head())
        return model, adam(model)

    return build


def holders(*kinds: str) -> Callable[[], tuple[nn.Module, Sequence[Optimizer]]]:
    """Return what builds a model with a buffer of each kind."""
    return of(*(lambda kind=kind: Holder(KINDS[kind]) for kind in kinds))


def travels(tensor: Tensor) -> bool:
    """Say whether a tensor is the store's."""
    return guard.guarded_tensor_of(tensor) is not None


class Shared(nn.Module):
    """Two modules with one buffer, and one with another over its memory."""

    def __init__(self, *, is_view: bool = False) -> None:
        super().__init__()
        self.one, self.two, self.other = (Holder(KINDS["float"]) for _ in range(3))
        self.two.held = self.one.held
        self.other.held = self.one.held[:20] if is_view else self.one.held.detach()

    def forward(self, x: Tensor) -> Tensor:
        """Change it in one, and see it in the others."""
        self.other.held.mul_(0.5)
        x = cast("Tensor", self.two(self.one(x)))
        return cast("Tensor", self.one(self.other(x)))


class Writing(nn.Module):
    """Writes its buffer in forward, one way or another."""

    def __init__(self, write: Callable[[Tensor, Tensor], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.write = write
        self.register_buffer("average", torch.zeros(WIDTH, WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Keep something, and use it."""
        x = cast("Tensor", self.linear(x))
        self.write(self.average, x.detach().mean(0))
        return x + torch.tanh(x @ self.average.clone())


def in_place(average: Tensor, x: Tensor) -> None:
    average.mul_(0.9).add_(x)


def _numpy(average: Tensor, x: Tensor) -> None:
    array = average.numpy()
    array *= 0.9
    array += x.numpy()


def _data(average: Tensor, x: Tensor) -> None:
    average.data.lerp_(x.expand(WIDTH, WIDTH), 0.5)


def _foreach(average: Tensor, x: Tensor) -> None:
    torch._foreach_lerp_([average], [x.expand(WIDTH, WIDTH)], 0.25)


def _out(average: Tensor, x: Tensor) -> None:
    torch.add(average, x, out=average)


WRITES = {"in place": in_place, "numpy": _numpy, "data": _data, "foreach": _foreach, "out": _out}
