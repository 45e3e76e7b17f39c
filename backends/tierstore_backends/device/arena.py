"""Where an emulated device's memory comes from: recycled, because fresh host memory is slow.

The first touch of fresh memory costs this far more than a copy does, and a real device pays nothing
of the kind.  So large pieces are kept when they are freed and given out again for the same size.

1. What is given out and what is kept never exceed the capacity together.
2. A piece is given out with a *new* storage, whose death says that nobody refers to it.
3. A piece is kept only if nobody refers to its storage any more.
"""

from __future__ import annotations

import contextlib
import mmap
import sys
import threading

import torch

RECYCLED_FROM_BYTES = 65536  # below this the C library recycles well enough


class ArenaBlock:
    """Host memory that may be given out again.

    Args:
        nbytes: its length.

    Raises:
        OSError: the system has no such room.
    """

    __slots__ = ("_map", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._map.madvise(mmap.MADV_HUGEPAGE)

    @property
    def references(self) -> int:
        """How many storages refer to the memory, plus a constant."""
        return sys.getrefcount(self._map)

    def memory(self) -> torch.Tensor:
        """Return the memory with a new storage."""
        return torch.frombuffer(self._map, dtype=torch.uint8)


_UNUSED = ArenaBlock(1).references


class Arena:
    """Gives out host memory and takes it back.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, list[ArenaBlock]] = {}  # by size; guarded by _lock, as is the next
        self._kept_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """What is kept for the next use."""
        return self._kept_bytes

    def take(self, nbytes: int) -> tuple[torch.Tensor, ArenaBlock | None]:
        """Return memory with a new storage, and the piece to `give` back, if it is one.

        Raises:
            OSError: the system has no such room.
        """
        if nbytes < RECYCLED_FROM_BYTES:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu"), None
        with self._lock:
            piece = self._pop(nbytes) if nbytes in self._kept else None
        piece = piece or ArenaBlock(nbytes)
        return piece.memory(), piece

    def give(self, piece: ArenaBlock) -> None:
        """Keep a piece that was given out, unless somebody still refers to its storage."""
        if piece.references != _UNUSED:
            return
        with self._lock:
            self._kept.setdefault(piece.nbytes, []).append(piece)
            self._kept_bytes += piece.nbytes

    def trim(self, kept_bytes: int) -> None:
        """Keep at most ``kept_bytes``."""
        with self._lock:
            while self._kept_bytes > max(kept_bytes, 0):
                self._pop(next(iter(self._kept)))

    def _pop(self, nbytes: int) -> ArenaBlock:
        pieces = self._kept[nbytes]
        piece = pieces.pop()
        if not pieces:
            del self._kept[nbytes]
        self._kept_bytes -= nbytes
        return piece
