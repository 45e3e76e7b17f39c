"""Gathers shards in memory that the processes of one machine share, instead of sending them.

gloo sends the shard of each process to every other one through the kernel.  On one machine it need not:

1. Each process writes its shard to its own place in a segment that all of them have mapped, they meet, and
   each reads the whole.  FSDP's own copies, into the message and out of it, are all that moves.
2. A segment is lent again when nobody in any process refers to it.  Each says at a meeting which of them it
   does not refer to, so that all choose the same one without a question: they gather in the same order, as
   for any collective.
3. Nothing waits where FSDP would not.  What is gathered with ``async_op`` meets the others behind the
   program's back, and tells nobody anything: when that has ended is not the same everywhere.  Segments are
   made behind a gather that has waited for all, for those to come.
4. Where processes cannot share, everything goes FSDP's own way: they are on several machines, there is no
   room, or more gathers are under way at once than there are segments.  All of them see that it is so.
5. A segment is a file without a name, of memory: it goes with the last process that has mapped it, whatever
   ends them.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import secrets
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import distributed, nn

from tierstore.planning.homes import CPU
from tierstore.torch_private import fsdp_own_gather
from tierstore.training.sharding.found import param_groups_of, sharded_modules

_OwnGather: Any = fsdp_own_gather()  # the base class: settings of FSDP's replace what is one of these
_gather_small = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # new in 2.13

MOST_SEGMENTS = 4
"""Gathers that may be under way at once: in forward FSDP keeps the one before, and has the next one begin."""

_TOKEN_BYTES = 16


class AllGather(Protocol):
    """How FSDP gathers: ``AllGather`` of FSDP's, which has no public name."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for what is gathered, of all processes."""
        ...

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """Gather.  Returns what to wait for; ``None``: it is done."""
        ...


class Segment:
    """Memory that all processes of a group have mapped.

    Args:
        file: an open descriptor of it; it may be closed afterwards.
        nbytes: of it.

    Attributes:
        nbytes: of it.
        is_nobodys: whether all processes have said, when they met last, that nothing of theirs refers to it.
    """

    def __init__(self, file: int, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_nobodys = True
        self._memory = mmap.mmap(file, nbytes)
        self._lent: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether nothing in this process refers to it."""
        return self._lent is None or self._lent() is None

    def lend(self, nbytes: int) -> torch.Tensor:
        """Return its first bytes; it is lent as long as any tensor has them."""
        memory = np.frombuffer(self._memory, np.uint8, nbytes)
        self._lent, self.is_nobodys = weakref.ref(memory), False
        return torch.from_numpy(memory)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is what was lent."""
        memory = None if self._lent is None else self._lent()
        return memory is not None and tensor.untyped_storage().data_ptr() == memory.ctypes.data


class SharedGather(_OwnGather):  # type: ignore[misc]  # importing it for its type takes a second
    """FSDP's way to gather within one group of processes of one machine.

    Args:
        group: of processes; over gloo.
        own: FSDP's own way.
        machine: what tells this process's machine from others.

    Attributes:
        own: see above.
    """

    def __init__(self, group: distributed.ProcessGroup, own: AllGather, machine: str) -> None:
        self.own = own
        self._machine = machine
        self._group = group
        self._segments: list[Segment] = []
        self._can_share = True
        self._lacking_bytes = 0  # of a segment that would have been lent, if there had been one

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """See `AllGather.allocate`."""
        nbytes = math.prod(size) * dtype.itemsize
        fitting = [each for each in self._segments if each.is_nobodys and each.nbytes >= nbytes > 0]
        self._lacking_bytes = 0 if fitting else nbytes
        if not fitting:
            return self.own.allocate(size, dtype=dtype, device=device)
        return min(fitting, key=lambda each: each.nbytes).lend(nbytes).view(dtype).view(*size)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: distributed.ProcessGroup,
        async_op: bool = False,
    ) -> distributed.Work | None:
        """See `AllGather.__call__`."""
        if any(each.holds(output_tensor) for each in self._segments):
            part = output_tensor.view(group.size(), -1)[group.rank()]
            if part.data_ptr() != input_tensor.data_ptr():
                part.copy_(input_tensor.view(-1))
            return self._meet(is_awaited=not async_op)
        work = self.own(output_tensor, input_tensor, group, async_op)
        if not async_op:  # all are here
            if self._segments:
                self._meet()  # else nobody would ever know that one is free
            if self._lacking_bytes and self._can_share:
                self._add(self._lacking_bytes)
        return work

    def _meet(self, *, is_awaited: bool = True) -> distributed.Work | None:
        """Let all others come, and say which segments nothing here refers to.

        Args:
            is_awaited: whether to wait for them; else what is returned has to be waited for, and what they
                say is not listened to.
        """
        mine = torch.tensor([each.is_free for each in self._segments], dtype=torch.uint8, device="cpu")
        told = mine.new_empty(self._group.size() * len(mine))
        work: distributed.Work | None = _gather_small(told, mine, group=self._group, async_op=not is_awaited)
        if is_awaited:
            said = told.view(self._group.size(), -1).all(dim=0).tolist()
            for segment, is_nobodys in zip(self._segments, said, strict=True):
                segment.is_nobodys = bool(is_nobodys)
        return work

    # --- new segments -------------------------------------------------------------------------

    def _add(self, nbytes: int) -> None:
        """Have another segment, in place of those that are nobody's, as they are too small."""
        self._segments = [each for each in self._segments if not each.is_nobodys or each.nbytes >= nbytes]
        if len(self._segments) == MOST_SEGMENTS:
            return
        segment = self._mapped_by_all(nbytes)
        self._can_share = segment is not None
        self._segments = [] if segment is None else [*self._segments, segment]

    def _mapped_by_all(self, nbytes: int) -> Segment | None:
        """Return a new segment; ``None``: not all can map it."""
        is_first = self._group.rank() == 0
        with contextlib.ExitStack() as files:
            offer: Offer | None = None
            segment: Segment | None = None
            with contextlib.suppress(OSError, AttributeError):  # there is no such memory on every system
                if is_first:
                    segment, offer = _offered(nbytes, files)
            told: list[tuple[str, Offer | None]] = self._all_of((self._machine, offer))
            offer = told[0][1]
            if offer is not None and not is_first and {machine for machine, _ in told} == {self._machine}:
                with contextlib.suppress(OSError):
                    segment = _taken_up(offer, nbytes)
            return segment if all(self._all_of(segment is not None)) else None

    def _all_of(self, mine: Any) -> list[Any]:  # noqa: ANN401 - whatever it is
        found: list[Any] = [None] * self._group.size()
        distributed.all_gather_object(found, mine, group=self._group)
        return found


class Offer(NamedTuple):
    """Where others find a segment, as long as its file is open.

    Attributes:
        process: that has it open.
        file: its descriptor there.
        token: that it begins with: another file may be meant by that name elsewhere.
    """

    process: int
    file: int
    token: bytes


def _offered(nbytes: int, files: contextlib.ExitStack) -> tuple[Segment, Offer]:
    """Return a new segment, for all of whose bytes there is memory, and where others find it.

    Raises:
        OSError: there is no memory.
        AttributeError: the system has no files without a name.
    """
    file = os.memfd_create("tierstore gathers", os.MFD_CLOEXEC)
    files.callback(os.close, file)
    token = secrets.token_bytes(_TOKEN_BYTES)
    os.posix_fallocate(file, 0, max(nbytes, _TOKEN_BYTES))
    os.pwrite(file, token, 0)
    return Segment(file, nbytes), Offer(os.getpid(), file, token)


def _taken_up(offer: Offer, nbytes: int) -> Segment | None:
    """Map the segment that another process offers; ``None``: it is something else.

    Raises:
        OSError: it cannot be opened or mapped.
    """
    file = os.open(f"/proc/{offer.process}/fd/{offer.file}", os.O_RDWR | os.O_CLOEXEC)
    try:
        return Segment(file, nbytes) if os.pread(file, _TOKEN_BYTES, 0) == offer.token else None
    finally:
        os.close(file)


# ---------------------------------------------------------------------- of a model


class SharedGathers:
    """Lets FSDP gather a model's shards in shared memory, where the CPU computes; to be removed in the end.

    Modules for which somebody has set another way to gather keep that; and those that are sharded otherwise
    after forward (``reshard_after_forward=2``), as they gather in other groups then.

    Args:
        model: that ``fully_shard`` was applied to.
        machine: what tells this process's machine from others.
    """

    def __init__(self, model: nn.Module, machine: str) -> None:
        self._machine = machine
        self._ways: dict[distributed.ProcessGroup, SharedGather] = {}
        self._modules: list[tuple[Any, Any]] = []
        for _, module in sharded_modules(model):
            groups = param_groups_of(module._get_fsdp_state())  # noqa: SLF001 - FSDP has no function for it
            if len(groups) == 1 and (way := self._way_of(groups[0])) is not None:
                self._modules.append((module, groups[0]))
                module.set_custom_all_gather(way)

    def _way_of(self, params: Any) -> SharedGather | None:  # noqa: ANN401 - ``FSDPParamGroup``
        own, mesh = params._all_gather_comm, params.mesh_info  # noqa: SLF001 - FSDP only sets it
        group = getattr(mesh, "shard_process_group", None)
        after = params.post_forward_mesh_info
        if (
            type(own) is not _OwnGather  # somebody's, or ours for another module of the group
            or params.device.type != CPU
            or group is None
            or group.size() == 1
            or (after is not None and after != mesh)
            or "cpu:gloo" not in distributed.get_backend_config(group)
        ):
            return None
        return self._ways.setdefault(group, SharedGather(group, own, self._machine))

    def remove(self) -> None:
        """Let FSDP gather its own way again.  Idempotent."""
        for module, params in self._modules:
            way = params._all_gather_comm  # noqa: SLF001 - FSDP only sets it
            if isinstance(way, SharedGather):  # else somebody has set another one since
                module.set_custom_all_gather(way.own)
        self._modules.clear()
        self._ways.clear()
