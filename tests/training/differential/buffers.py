"""Parts with buffers: of every kind, written, replaced and read in every way."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn

WIDTH = 16


class Table(nn.Module):
    """Has one buffer, of any shape, strides and dtype, and computes with it.

    Args:
        values: of the buffer.
        persistent: whether a state dict holds it.
    """

    def __init__(self, values: Tensor, *, persistent: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("table", values, persistent=persistent)
        self.table: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Use it, so that backward needs it as well."""
        return used(self.table, x) * self.scale


def used(table: Tensor, x: Tensor) -> Tensor:
    """Return what a table makes of ``(batch, WIDTH)``."""
    if table.dtype == torch.bool:
        return x.masked_fill(~table, 0.5)
    if table.dtype == torch.int64:
        return x[:, table]
    if table.is_complex():
        table = torch.view_as_real(table).sum(-1)
    table = table.to(x.dtype)
    return torch.tanh(x @ table) if table.shape == (WIDTH, WIDTH) else x + table.sum() * 0.1


class Average(nn.Module):
    """Writes its buffer in forward, one way or another, and uses it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))
        self.average: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Keep a mean of all inputs."""
        AVERAGES[self.how](self, x.detach().mean(0))
        return cast("Tensor", self.linear(x - self.average.clone()))


def _in_place(module: Average, x: Tensor) -> None:
    module.average.lerp_(x, 0.5)


def _data(module: Average, x: Tensor) -> None:
    module.average.data.lerp_(x, 0.5)


def _numpy(module: Average, x: Tensor) -> None:
    array = module.average.numpy()
    array += x.numpy(force=True)


def _foreach(module: Average, x: Tensor) -> None:
    torch._foreach_add_([module.average], [x])


def _out(module: Average, x: Tensor) -> None:
    torch.add(module.average, x, out=module.average)


def _assigned(module: Average, x: Tensor) -> None:
    module.average = module.average * 0.5 + x


def _in_the_dict(module: Average, x: Tensor) -> None:
    module._buffers["average"] = module.average * 0.5 + x


def _pointed(module: Average, x: Tensor) -> None:
    module.average.data = module.average * 0.5 + x


AVERAGES: dict[str, Callable[[Average, Tensor], None]] = {
    "in place": _in_place,
    "data": _data,
    "numpy": _numpy,
    "foreach": _foreach,
    "out": _out,
    "assigned": _assigned,
    "in the dict": _in_the_dict,
    "pointed": _pointed,
}


class Outside(nn.Module):
    """Uses its child's buffers, also as indices, and never calls the child."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Table(torch.rand(WIDTH) > 0.5), Table(torch.randperm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Index with them."""
        y = x[:, self.other.table]
        made: Tensor = y + y[:, self.one.table].sum() * 0.1
        return torch.where(self.one.table, made, -made) * self.one.scale


PARTS: dict[str, str] = {
    "table": "Table(torch.<a:rand(W, W)|rand(W).half()|rand(W).byte()|randperm(W)><b:|, persistent=False>)",
    "table mask": "Table(torch.rand(W).round().bool()<b:|, persistent=False>)",
    "table layout": "Table(torch.randn(W, W)<a:.t()|.view(1, W, W)|[:, ::2]|[:1].expand(W, W)|[:0]>)",
    "table complex": "Table(torch.randn(W, dtype=torch.complex64)<a:|.conj()>)",
    "tables outside": "Outside()",
    **{f"writing buffer {how}": f"Average({how!r})" for how in AVERAGES},
}

KNOTS: dict[str, str] = {
    "buffer shared": "share_buffer(m, <a>, lambda b: b)",
    "buffer memory shared": "share_buffer(m, <a>, lambda b: b<a:.detach()|[:1]>)",
    "buffer kept": "t.keep['buffer kept'] = [b.detach() for b in list(m.buffers())[:1]]",
}


def share_buffer(model: nn.Module, number: int, alias: Callable[[Tensor], Tensor]) -> None:
    """Let a module without that name have another one's buffer, or an alias of it."""
    places = [(module, name) for module in model.modules() for name in module._buffers]
    if places:
        owner, name = places[number % len(places)]
        buffer = owner._buffers[name]
        if buffer is not None and buffer.dim():
            model.register_buffer("shared", alias(buffer))
