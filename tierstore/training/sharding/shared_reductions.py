"""Adds up gradients in memory that the processes of one machine share, instead of sending them.

gloo reduces all of a message over all processes, through the kernel, and then leaves all but a part of it.
On one machine each process can read the others' gradients of its part where FSDP has put them together, and
add them up: in the order in which gloo does, so that the sums are the same, bit for bit.

That order is gloo's own affair, and stands nowhere but in its source (the ring of ``allreduce.cc``).  So the
processes try it out before they rely on it (`adds_as_gloo_does`); where it is another, they reduce as FSDP
does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import distributed

from tierstore.torch_private import fsdp_own_reduction
from tierstore.training.sharding.shared_segments import SharedSegments

_OwnReduction: Any = fsdp_own_reduction()  # the base class: settings of FSDP's replace what is one of these
_reduce_parts = getattr(
    distributed, "reduce_scatter_single", distributed.reduce_scatter_tensor
)  # new in 2.13

_MOST_SEGMENT_BYTES = 1 << 20  # of gloo's segments
_ELEMENTS_AT_ONCE = 1 << 16  # what is added up stays in the processor's cache

_TRIED_ELEMENTS = (1, 7, 1001)
_TRIED_DTYPES = (torch.float32, torch.bfloat16)


class SharedReduction(_OwnReduction):  # type: ignore[misc]  # importing it for its type takes a second
    """FSDP's way to reduce and scatter within one group of processes of one machine.

    Args:
        group: of processes; over gloo, which `adds_as_gloo_does`.
        machine: what tells this process's machine from others.
    """

    def __init__(self, group: distributed.ProcessGroup, machine: str) -> None:
        super().__init__()
        self._group = group
        self._segments = SharedSegments(group, machine)
        self._has_input = False  # FSDP asks for what is to be reduced, then for where the sum is to lie

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is reduced, of this process, or else for the part that it has of the sum."""
        nbytes = math.prod(size) * dtype.itemsize
        self._has_input = not self._has_input
        segment = self._segments.find(self._group.size() * nbytes) if self._has_input else None
        if segment is None:
            return super().allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]  # FSDP's
        return segment.lend(nbytes, self._group.rank() * nbytes).view(dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        op: Any,  # noqa: ANN401 - some of FSDP's are of no public class
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Reduce and scatter.  Returns what to wait for; ``None``: it is done."""
        self._has_input = False
        segment = self._segments.holding(input_tensor)
        if segment is None or async_op or group is not self._group or not _is_ours(op, input_tensor.dtype):
            work: distributed.Work | None = super().__call__(output_tensor, input_tensor, group, op, async_op)
            if not async_op and group is self._group:  # all are here
                self._segments.after_own_way()
            return work
        self._segments.meet()  # all have written theirs
        nbytes, part_bytes = input_tensor.nbytes, output_tensor.nbytes
        parts = [
            segment.bytes_at(each * nbytes + group.rank() * part_bytes, part_bytes).view(output_tensor.dtype)
            for each in range(group.size())
        ]
        with torch.no_grad():
            add_up(parts, output_tensor.view(-1), group.rank())
            if op == distributed.ReduceOp.AVG:
                output_tensor.div_(group.size())
        parts.clear()
        self._segments.meet()  # all have read
        segment.take_back()
        return None


def _is_ours(op: object, dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and (op == distributed.ReduceOp.SUM or op == distributed.ReduceOp.AVG)  # noqa: PLR1714 - some have no hash


class Stretch(NamedTuple):
    """Elements of a process's part that are added up in one order.

    Attributes:
        start: the first one.
        stop: behind the last one.
        order: the processes whose values are added, one after the other.
    """

    start: int
    stop: int
    order: tuple[int, ...]


def stretches(numel: int, itemsize: int, rank: int, processes: int) -> Iterator[Stretch]:
    """Yield a part in the stretches in which gloo adds it up.

    gloo cuts the message of all parts into equal segments, a multiple of the processes, at least two each and
    of a MiB at most, and passes each process's segments round the ring: those that end at a process begin
    with the one before it, and go down from there.

    Args:
        numel: elements of a part.
        itemsize: bytes of an element.
        rank: whose part it is.
        processes: how many there are.
    """
    most_bytes = max(1, _MOST_SEGMENT_BYTES // itemsize) * itemsize
    count = max(math.ceil(numel * processes * itemsize / most_bytes), 2 * processes)
    each = math.ceil(count / processes)  # of one process
    length = each * math.ceil(numel * processes / (each * processes))
    for end in range(processes):
        start, stop = max(end * length - rank * numel, 0), min((end + 1) * length - rank * numel, numel)
        if start < stop:
            yield Stretch(start, stop, tuple((end - back) % processes for back in range(1, processes + 1)))


def add_up(parts: Sequence[torch.Tensor], into: torch.Tensor, rank: int) -> None:
    """Add up the values of all processes, in the order in which gloo adds them.

    Args:
        parts: the same part of each process's values; each of shape ``[numel]``.
        into: where the sum goes; of the same shape and type.
        rank: whose part it is.
    """
    for start, stop, order in stretches(into.numel(), into.element_size(), rank, len(parts)):
        first, second, *others = (parts[each] for each in order)
        for begin in range(start, stop, _ELEMENTS_AT_ONCE):
            here = slice(begin, min(begin + _ELEMENTS_AT_ONCE, stop))
            torch.add(first[here], second[here], out=into[here])
            for other in others:
                into[here].add_(other[here])


def adds_as_gloo_does(group: distributed.ProcessGroup) -> bool:
    """Whether `add_up` makes the sums that this gloo makes, in all processes of a group; all of them ask."""
    rank, processes = group.rank(), group.size()
    numels = _TRIED_ELEMENTS if processes == 2 else (*_TRIED_ELEMENTS, 2 * _MOST_SEGMENT_BYTES // 4 + 3)
    is_same = True
    for numel, dtype in itertools.product(numels, _TRIED_DTYPES):
        mine = torch.cat([_tried(rank, part, numel, dtype) for part in range(processes)])
        theirs, ours = mine.new_empty(numel), mine.new_empty(numel)
        _reduce_parts(theirs, mine, op=distributed.ReduceOp.SUM, group=group)
        add_up([_tried(each, rank, numel, dtype) for each in range(processes)], ours, rank)
        is_same &= torch.equal(theirs, ours)
    answer = torch.tensor([is_same], dtype=torch.uint8, device="cpu")
    distributed.all_reduce(answer, distributed.ReduceOp.MIN, group=group)
    return bool(answer)


def _tried(process: int, part: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    chance = torch.Generator().manual_seed(1000 * process + part)
    return torch.randn(numel, generator=chance, device="cpu").to(dtype)
