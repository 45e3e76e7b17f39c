"""What recomputed layers keep, a slice in each process: ``recompute_slice_activation``.

1. An input that is the same in all processes of a group of tensor parallelism is kept as this process's slice
   of it, and gathered from all of them when the layer runs again.
2. The groups are those over which the layer's parameters are sharded (DTensor).
3. That an input is the same is never taken for granted.  A DTensor says so (``Replicate``); for other tensors
   the processes compare checksums: one small all-reduce a group and forward, for which the device is waited
   for.  What differs is kept as a whole, and so is what is small.

The processes of a group have to run the same forwards, as tensor parallelism wants anyway.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed, nn

from tierstore.training.activations.runtime.operators import (
    is_plain,
)

SMALL_BYTES = 4096
"""Inputs below this are kept as a whole."""

Group = Any
"""A ``torch.distributed.ProcessGroup``; not every build has that."""

_BLOCK = 1 << 20  # elements of which a checksum's terms are there at once
_ODD = (0x1E3779B97F4A7C15, 0x3F58476D1CE4E5B9)  # splitmix64's, without the sign


_GATHER = ("all_gather_single", "all_gather_into_tensor")  # the second in older versions


def _gather(into: torch.Tensor, part: torch.Tensor, group: Group) -> None:
    next(getattr(distributed, name) for name in _GATHER if hasattr(distributed, name))(into, part, group)


def is_distributed() -> bool:
    """Whether processes train together."""
    return distributed.is_available() and distributed.is_initialized()


def groups_of(module: nn.Module) -> list[Group]:
    """Return the groups of several processes over which a module's parameters are sharded."""
    found: dict[str, Group] = {}
    for parameter in module.parameters() if is_distributed() else ():
        for group in _groups_where(parameter, is_sharded=True):
            found[group.group_name] = group
    return list(found.values())


def _groups_where(tensor: torch.Tensor, *, is_sharded: bool) -> Iterator[Group]:
    """Yield the groups over which a tensor is sharded, or else replicated; none if it is no DTensor."""
    from torch.distributed.tensor import DTensor  # not every build has it

    if isinstance(tensor, DTensor):
        for dim, placement in enumerate(tensor.placements):
            is_meant = placement.is_shard() if is_sharded else placement.is_replicate()
            if is_meant and tensor.device_mesh.size(dim) > 1:
                yield tensor.device_mesh.get_group(dim)


class Slice(NamedTuple):
    """How this process's part of a tensor becomes the tensor again.

    Attributes:
        group: the processes that have a part each.
        like: the tensor, or a DTensor's own part, without its bytes.
        placed: a DTensor's arguments besides.
        is_wanted: whether gradients of it are.
    """

    group: Group
    like: torch.Tensor
    placed: dict[str, Any]
    is_wanted: bool

    @property
    def part_bytes(self) -> int:
        """How long each part is."""
        return math.ceil(self.like.nbytes / int(self.group.size()))

    def part_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this process's part of a tensor's bytes, copied."""
        mine = flat[self.group.rank() * self.part_bytes :][: self.part_bytes]
        part = flat.new_zeros(self.part_bytes)
        part[: mine.numel()] = mine
        return part

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """Return the tensor, with the parts of the other processes.  Blocks as collectives do."""
        from torch.distributed.tensor import DTensor  # not every build has it

        with torch.no_grad():
            flat = part.new_empty(self.part_bytes * self.group.size())
            _gather(flat, part, self.group)
            typed = flat[: self.like.nbytes].view(self.like.dtype)
            tensor = typed.as_strided(self.like.shape, self.like.stride())
            if self.placed:
                tensor = DTensor.from_local(tensor, **self.placed, run_check=False)
        return tensor.requires_grad_(self.is_wanted)


def cut(values: Sequence[object], groups: Sequence[Group]) -> tuple[list[object], list[Slice | None]]:
    """Return a layer's arguments with parts in place of what is the same in a group, and how they were cut.

    Args:
        values: the arguments.
        groups: of tensor parallelism.
    """
    common = _common(values, groups)
    kept: list[object] = []
    slices: list[Slice | None] = []
    for place, value in enumerate(values):
        found = _slice_of(value, common.get(place))
        slices.append(None if found is None else found[0])
        kept.append(value if found is None else found[0].part_of(found[1]))
    return kept, slices


def _slice_of(value: object, group: Group | None) -> tuple[Slice, torch.Tensor] | None:
    """Return how a tensor is cut, and its bytes; ``None``: it is kept as a whole."""
    if not isinstance(value, torch.Tensor) or isinstance(value, nn.Parameter):
        return None
    local, placed = value, {}
    if group is None:
        group = next(_groups_where(value, is_sharded=False), None)
        if group is None:
            return None
        local = value.to_local().detach()  # type: ignore[attr-defined]
        placed = {
            "device_mesh": value.device_mesh,  # type: ignore[attr-defined]
            "placements": value.placements,  # type: ignore[attr-defined]
            "shape": value.shape,
            "stride": value.stride(),
        }
    flat = _bytes_of(local)
    if flat is None or flat.numel() < SMALL_BYTES:
        return None
    like = torch.empty_like(local, device="meta", requires_grad=False)
    return Slice(group, like, placed, value.requires_grad), flat


# ---------------------------------------------------------------------- what is the same


def _bytes_of(value: object) -> torch.Tensor | None:
    """Return the bytes of an ordinary tensor that has no gaps, in their order; ``None``: it is none."""
    if not isinstance(value, torch.Tensor) or not is_plain(value) or value.is_conj() or value.is_neg():
        return None
    dense = torch.empty_like(value, device="meta", requires_grad=False)  # the same strides, if without gaps
    if not value.numel() or dense.stride() != value.stride():
        return None
    flat = value.detach().as_strided((value.numel(),), (1,), value.storage_offset())
    return flat.view(torch.uint8)


def _common(values: Sequence[object], groups: Sequence[Group]) -> dict[int, Group]:
    """Return which values are the same bits in all processes of a group, by place, and in which group.

    Every process says something of every value, whatever it has there, and asks in every group.
    """
    flats = [_bytes_of(value) for value in values]
    device = next((flat.device for flat in flats if flat is not None), None)
    if device is None:
        return {}
    found: dict[int, Group] = {}
    for group in groups:
        own = torch.tensor(group.rank(), device=device)  # what differs everywhere
        sums = [
            own if flat is None else _checksum(flat, value) for flat, value in zip(flats, values, strict=True)
        ]
        said = torch.stack([sum_.to(device) for sum_ in sums])
        most = torch.stack([said, ~said])
        distributed.all_reduce(most, distributed.ReduceOp.MAX, group)
        is_same = (most[0] == ~most[1]).tolist()
        found |= {place: group for place, same in enumerate(is_same) if same}
    return found


def _checksum(flat: torch.Tensor, value: Any) -> torch.Tensor:  # noqa: ANN401 - the tensor that they are of
    """Return 64 bits that tell tensors apart, not against malice."""
    is_aligned = flat.numel() % 4 == 0 and flat.storage_offset() % 4 == 0
    words = flat.view(torch.int32) if is_aligned else flat
    shape = repr((value.shape, value.stride(), value.dtype, value.requires_grad))
    total = torch.tensor(zlib.crc32(shape.encode()), device=flat.device)
    for begin in range(0, words.numel(), _BLOCK):
        block = words[begin : begin + _BLOCK].to(torch.int64)
        weights = torch.arange(begin + 1, begin + 1 + block.numel(), device=flat.device) * _ODD[0]
        weights = (weights ^ (weights >> 29)) * _ODD[1]
        total = total + ((block + weights) * (weights ^ (weights >> 32))).sum()
    return total
