"""The rows of a batch as one compact tensor, and their gradient back as the table's: both on its device.

A lookup runs PyTorch's own kernels on the distinct rows of a batch, by their places.  Distinct ids ascend, so
places compare as ids do, and what the kernels give is what they give of the whole table, bit for bit.
"""

from __future__ import annotations

from typing import Any, Protocol, cast

import torch
from torch.autograd.function import once_differentiable

from tierstore.errors import UsageError
from tierstore.modes import Unseen
from tierstore.nn.ids import DistinctIds
from tierstore.nn.repeats import KnownRepeats, Repeats
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import RowStore


class _Context(Protocol):
    """What PyTorch gives a function to keep things in."""

    ids: torch.Tensor
    weight: TableWeight
    shape: torch.Size
    is_sparse: bool
    has_strangers: bool
    is_synced: bool
    repeats: Repeats | None
    needs_input_grad: tuple[bool, ...]


def on_device_of(store: RowStore, numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers of a batch, int64 in host memory and at least 0, where the table is computed with."""
    with store.lock, Unseen():
        return numbers if store.device is None else store.bring_numbers(numbers)


def gather(
    weight: TableWeight, distinct: DistinctIds, is_sparse: bool, *, is_saved: bool = True
) -> torch.Tensor:
    """Return the rows of a batch, in the graph of autograd.

    Args:
        weight: the table's.
        distinct: the batch's ids.
        is_sparse: whether the table's gradient is sparse, or dense.
        is_saved: whether backward needs what is returned; if not, a step changes it.

    Returns:
        ``[n, width]`` for n distinct ids; with one more row, of zeros, for ids out of range, or if there are
        none at all.
    """
    return cast("torch.Tensor", _Gather.apply(weight, distinct, is_sparse, is_saved))  # type: ignore[no-untyped-call]


class _Gather(torch.autograd.Function):
    """Rows of a table, by distinct ids."""

    @staticmethod
    def forward(
        ctx: _Context, weight: TableWeight, distinct: DistinctIds, is_sparse: bool, is_saved: bool
    ) -> torch.Tensor:
        """Read the rows."""
        access, more = weight.rows_for("is looked up"), int(distinct.has_strangers or not len(distinct.ids))
        ctx.shape, ctx.is_sparse, ctx.has_strangers = weight.shape, is_sparse, distinct.has_strangers
        ctx.weight, ctx.is_synced = weight, access.is_synced()
        keeps = ctx.needs_input_grad[0] and not is_saved
        rows, ctx.ids = access.look_up(distinct.ids, more, keeps=keeps)
        ctx.repeats = distinct.repeats if ctx.ids is distinct.ids else None
        return rows

    @staticmethod
    @once_differentiable
    def backward(ctx: _Context, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Say of which rows of the table the gradient is, in the order in which the batch names them."""
        ctx.weight.access.begin_backward(is_synced=ctx.is_synced)
        ids = ctx.ids
        _require_on_device_of(ctx.weight, ids.device)
        there = ctx.weight.grad
        if there is not None and there.shape != ctx.shape:
            raise UsageError(
                f"the {ctx.weight.description} has grown between a forward and its backward: a gradient of "
                f"{ctx.shape[0]} rows cannot be added to one of {there.shape[0]}. Go backward before "
                "the table grows, or set weight.grad to None after it has."
            )
        if gradient.layout is torch.strided:
            index, values = ids, gradient[: len(ids)]
        else:
            index, values = gradient._indices()[0], gradient._values()  # noqa: SLF001 - repeats stay
            if ctx.has_strangers:
                is_ours = index < len(ids)
                index, values = index[is_ours], values[is_ours]
            index = ids.index_select(0, index)
            if ctx.repeats is not None:
                ctx.weight.known_repeats = KnownRepeats(index.clone(), ctx.repeats)
        if not ctx.is_sparse:
            return values.new_zeros(ctx.shape).index_copy_(0, index, values), None, None, None
        # Ids were checked to be in range before they were looked up.
        found = torch.sparse_coo_tensor(
            index[None], values, ctx.shape, device=values.device, check_invariants=False
        )
        return found, None, None, None


def _require_on_device_of(weight: TableWeight, device: torch.device) -> None:
    """Raise unless a gradient of a lookup that was made on a device can be the table's."""
    if device != weight.device:
        weight.rows_for("gets a gradient")
        raise UsageError(
            f"the {weight.description} was looked up on {device} and is on {weight.device} now: a run that "
            "keeps rows on a device was opened or closed between a forward and its backward. Go backward "
            "before, or look the rows up again."
        )


def clipped(rows: torch.Tensor, max_norm: float) -> torch.Tensor:
    """Return rows whose norms are at most ``max_norm``: longer ones are scaled, others keep their bits."""
    norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    scales: torch.Tensor = max_norm / norms.clamp(min=max_norm)
    return rows * scales
