"""Memory that the processes of one machine share, lent to what they send each other.

1. All of them have a segment mapped.  It is a file without a name, of memory: it goes with the last process
   that has mapped it, whatever ends them.
2. A segment is lent again when nobody in any process refers to it.  Each says at a meeting which of them it
   does not refer to, so that all choose the same one without a question: they communicate in the same order,
   as collectives ask for.
3. A segment is made where all have met anyway, for what comes then: to ask for one is to ask nobody.
4. Where processes cannot share, no segment is made: they are on several machines, there is no room, or more
   are in use at once than there are.  All of them see that it is so.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import distributed

_gather_small = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)  # new in 2.13

MOST_SEGMENTS = 4
"""What may be in use at once: in forward FSDP keeps the message before, and has the next one begin."""

_TOKEN_BYTES = 16


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

    def lend(self, nbytes: int, start: int = 0) -> torch.Tensor:
        """Return bytes of it; it is lent as long as any tensor has them."""
        memory = np.frombuffer(self._memory, np.uint8, nbytes, start)
        self._lent, self.is_nobodys = weakref.ref(memory), False
        return torch.from_numpy(memory)

    def take_back(self) -> None:
        """Have it be nobody's, as all do at once, whoever still refers to it: nobody looks at it any more."""
        self._lent, self.is_nobodys = None, True

    def bytes_at(self, start: int, nbytes: int) -> torch.Tensor:
        """Return bytes of it that no process writes; to be let go of before others are met again."""
        return torch.from_numpy(np.frombuffer(self._memory, np.uint8, nbytes, start))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is what was lent."""
        memory = None if self._lent is None else self._lent()
        return memory is not None and tensor.untyped_storage().data_ptr() == memory.ctypes.data


class SharedSegments:
    """The segments of one group of processes, for messages of one kind.

    Args:
        group: of processes; over gloo.
        machine: what tells this process's machine from others.
    """

    def __init__(self, group: distributed.ProcessGroup, machine: str) -> None:
        self._machine = machine
        self._group = group
        self._segments: list[Segment] = []
        self._can_share = True
        self._lacking_bytes = 0  # of a segment that would have been found, if there had been one

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._segments)

    def find(self, nbytes: int) -> Segment | None:
        """Return the smallest segment that has so many bytes and is nobody's.  All ask for the same."""
        fitting = [each for each in self._segments if each.is_nobodys and each.nbytes >= nbytes > 0]
        self._lacking_bytes = 0 if fitting else nbytes
        return min(fitting, key=lambda each: each.nbytes, default=None)

    def holding(self, tensor: torch.Tensor) -> Segment | None:
        """Return the segment that a tensor was lent from; ``None``: its memory is no segment's."""
        return next((each for each in self._segments if each.holds(tensor)), None)

    def meet(self, *, is_awaited: bool = True) -> distributed.Work | None:
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

    def after_own_way(self) -> None:
        """See what is free now, and make what was lacking: all have just waited for each other."""
        if self._segments:
            self.meet()  # else nobody would ever know that one is free
        if self._lacking_bytes and self._can_share:
            self._add(self._lacking_bytes)

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
    file = os.memfd_create("tierstore messages", os.MFD_CLOEXEC)
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
