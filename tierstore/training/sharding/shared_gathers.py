"""Gathers shards in memory that the processes of one machine share, instead of sending them.

gloo sends the shard of each process to every other one through the kernel.  On one machine it need not:
each process writes its shard to its own place in a shared segment, they meet, and each reads the whole.
FSDP's own copies, into the message and out of it, are all that moves.

Nothing waits where FSDP would not.  What is gathered with ``async_op`` meets the others behind the program's
back, and tells nobody anything: when that has ended is not the same everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

from tierstore.torch_private import fsdp_own_gather
from tierstore.training.sharding.shared_segments import SharedSegments

_OwnGather: Any = fsdp_own_gather()  # the base class: settings of FSDP's replace what is one of these


class SharedGather(_OwnGather):  # type: ignore[misc]  # importing it for its type takes a second
    """FSDP's way to gather within one group of processes of one machine.

    Args:
        group: of processes; over gloo.
        machine: what tells this process's machine from others.
    """

    def __init__(self, group: distributed.ProcessGroup, machine: str) -> None:
        super().__init__()
        self._segments = SharedSegments(group, machine)

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is gathered, of all processes."""
        nbytes = math.prod(size) * dtype.itemsize
        segment = self._segments.find(nbytes)
        if segment is None:
            return super().allocate(size, dtype=dtype, device=device)  # type: ignore[no-any-return]  # FSDP's
        return segment.lend(nbytes).view(dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Gather.  Returns what to wait for; ``None``: it is done."""
        if self._segments.holding(output_tensor) is not None:
            part = output_tensor.view(group.size(), -1)[group.rank()]
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))
            return self._segments.meet(is_awaited=not async_op)
        work: distributed.Work | None = super().__call__(output_tensor, input_tensor, group, async_op)
        if not async_op:  # all are here
            self._segments.after_own_way()
        return work
