"""Where an emulated device's memory comes from: recycled, because fresh host memory is slow.

The first touch of fresh memory costs this far more than a copy does, and a real device pays nothing
of the kind.  So memory that is freed keeps its pages, and is given out again for any size.

1. Address space is cheap and pages are not: what is given out and the pages that are kept never exceed the
   capacity together (`Arena.trim`); free addresses without pages are not counted.
2. A piece goes where most of it has pages; of such places, where least is left beside it.
3. A piece is given out with a *new* storage, whose death says that nobody refers to it.  Only then are its
   pages kept.
"""

from __future__ import annotations

import collections
import contextlib
import mmap
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

RECYCLED_FROM_BYTES = 65536  # below this the C library recycles well enough
_REGION_BYTES = 256 << 20  # of address space


class ArenaBlock:
    """A piece that was given out.

    Args:
        memory: its bytes; whoever has a tensor of them refers to it.
        nbytes: what it takes of the arena.
    """

    __slots__ = ("_memory", "nbytes")

    def __init__(self, memory: np.ndarray, nbytes: int) -> None:
        self._memory: np.ndarray | None = memory
        self.nbytes = nbytes

    def let_go(self) -> None:
        """Refer to it no more."""
        self._memory = None


@dataclass
class _Free:
    """Free addresses of a region, all with pages or all without."""

    start: int
    stop: int
    has_pages: bool

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def bytes_with_pages(self, start: int, stop: int) -> int:
        return max(min(self.stop, stop) - max(self.start, start), 0) if self.has_pages else 0


@dataclass
class _Region:
    """Address space, and what of it is free, in the order of addresses."""

    memory: mmap.mmap
    free: list[_Free] = field(default_factory=list)

    def places(self, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield where so many bytes fit: how many have no pages, what would be left, and where it begins."""
        for stretch in self._stretches():
            length = stretch[-1].stop - stretch[0].start
            if length < nbytes:
                continue
            begins = {each.start for each in stretch} | {each.stop - nbytes for each in stretch}
            for start in begins:
                if stretch[0].start <= start and start + nbytes <= stretch[-1].stop:
                    paged = sum(each.bytes_with_pages(start, start + nbytes) for each in stretch)
                    yield nbytes - paged, length - nbytes, start

    def cut(self, start: int, stop: int) -> int:
        """Have addresses be free no more; return how many had pages."""
        paged = sum(each.bytes_with_pages(start, stop) for each in self.free)
        self.free = [
            _Free(a, b, each.has_pages)
            for each in self.free
            for a, b in ((each.start, min(each.stop, start)), (max(each.start, stop), each.stop))
            if a < b
        ]
        return paged

    def add(self, free: _Free) -> None:
        """Have addresses be free."""
        found = sorted([*self.free, free], key=lambda each: each.start)
        self.free = found[:1]
        for each in found[1:]:
            last = self.free[-1]
            if last.stop == each.start and last.has_pages == each.has_pages:
                self.free[-1] = _Free(last.start, each.stop, each.has_pages)
            else:
                self.free.append(each)

    def _stretches(self) -> Iterator[list[_Free]]:
        stretch: list[_Free] = []
        for each in self.free:
            if stretch and stretch[-1].stop != each.start:
                yield stretch
                stretch = []
            stretch.append(each)
        if stretch:
            yield stretch


class Arena:
    """Gives out host memory and takes it back.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._regions: list[_Region] = []  # guarded by _lock, as is the next
        self._kept_bytes = 0
        self._let_go: collections.deque[tuple[_Region, int, int]] = collections.deque()  # by any thread

    @property
    def kept_bytes(self) -> int:
        """The pages that are kept for the next use."""
        with self._lock:
            self._take_in()
            return self._kept_bytes

    def take(self, nbytes: int) -> tuple[torch.Tensor, ArenaBlock | None]:
        """Return memory with a new storage, and the piece to `give` back, if it is one.

        Raises:
            OSError: the system has no such room.
        """
        if nbytes < RECYCLED_FROM_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), None
        taken = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            self._take_in()
            places = [(*place, each) for each in self._regions for place in each.places(taken)]
            if not places:
                region = _new_region(max(taken, _REGION_BYTES))
                self._regions.append(region)
                places = [(*place, region) for place in region.places(taken)]
            _, _, start, region = min(places, key=lambda each: each[:3])
            self._kept_bytes -= region.cut(start, start + taken)
        memory = np.frombuffer(region.memory, np.uint8, nbytes, start)
        weakref.finalize(memory, self._let_go.append, (region, start, start + taken)).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8), ArenaBlock(memory, taken)

    def give(self, piece: ArenaBlock) -> None:
        """Take a piece back: its pages are kept when nobody refers to its storage any more."""
        piece.let_go()

    def trim(self, kept_bytes: int) -> None:
        """Keep at most so many bytes of pages; the smallest pieces go first."""
        with self._lock:
            self._take_in()
            while (over := self._kept_bytes - max(kept_bytes, 0)) > 0:
                region, free = min(
                    ((region, free) for region in self._regions for free in region.free if free.has_pages),
                    key=lambda each: each[1].nbytes,
                )
                stop = min(free.stop, free.start - (-over // mmap.PAGESIZE) * mmap.PAGESIZE)
                region.memory.madvise(mmap.MADV_DONTNEED, free.start, stop - free.start)
                self._kept_bytes -= region.cut(free.start, stop)
                region.add(_Free(free.start, stop, has_pages=False))

    def _take_in(self) -> None:
        """Free what nobody refers to any more."""
        while self._let_go:
            region, start, stop = self._let_go.popleft()
            region.add(_Free(start, stop, has_pages=True))
            self._kept_bytes += stop - start


def _new_region(nbytes: int) -> _Region:
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
        memory.madvise(mmap.MADV_HUGEPAGE)
    return _Region(memory, [_Free(0, nbytes, has_pages=False)])
