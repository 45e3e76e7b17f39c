"""The calls into the kernel that move or give back bytes, behind a seam.

A test passes its own `Syscalls` to make the n-th call fail or fall short; the product passes
`tierstore_backends.files.io.kernel.KERNEL`.  Knows nothing of extents, fragments or alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tierstore_backends.files.io.io_request import Direction

MOST_ENTRIES = 4096
"""The most calls in one ring; the kernel takes eight times as many, but each costs it memory."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Bytes to move, in one go, between memory and a file.

    Attributes:
        direction: which way.
        fd: the open file.
        address: which of the backend's addresses comes first, for those who cannot use a descriptor.
        vector: the memory, in the file's order.  Whoever carries the call out keeps it alive.
        offset: where the bytes begin in the file.
    """

    direction: Direction
    fd: int
    address: int
    vector: Sequence[memoryview]
    offset: int


class FileStreams(Protocol):
    """Files that are opened by name and moved through by one task at a time."""

    async def move(self, call: KernelCall) -> int:
        """Carry ``call`` out, or a first part of it; return how many bytes moved.

        Raises:
            OSError: as the kernel does.
        """
        ...

    async def close(self) -> None:
        """Close the files."""
        ...


class Ring(Protocol):
    """Calls that are under way in the kernel, all at a time.  One thread has it, but for `wake`."""

    def put(self, token: int, call: KernelCall) -> None:
        """Have ``call`` carried out from the next `submit` on.

        There are at most as many calls between this and `reap` as the ring was opened for.

        Args:
            token: tells it from all others that are under way.
            call: its memory has to stay where it is until `reap` has returned the token.
        """
        ...

    def submit(self) -> None:
        """Begin what was put.  Does not wait for any of it."""
        ...

    def reap(self) -> list[tuple[int, int]]:
        """Return (token, result) of each call that has ended: bytes moved, or a negative errno."""
        ...

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a call has ended, `wake` was called, or, perhaps, for no reason."""
        ...

    def wake(self) -> None:
        """End the present `wait`, or else the next.  From any thread."""
        ...

    def close(self) -> None:
        """Give the ring back.  Nothing is under way, and nobody wakes it any more."""
        ...


class Syscalls(Protocol):
    """What the engine asks of the kernel.  Every member raises ``OSError`` as the kernel does."""

    def read(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """Fill ``vector`` from ``offset``; return how many bytes came, 0 at the end of the file."""
        ...

    def write(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """Write ``vector`` at ``offset``; return how many bytes went."""
        ...

    def open_streams(self, path_of: Callable[[int], Path], executor: Executor) -> FileStreams:
        """Return files that are opened when they are first used, in the threads of ``executor``.

        Args:
            path_of: names the file that holds an address.
            executor: blocks on the disk in the tasks' stead.
        """
        ...

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        """Open a ring for at most ``entries`` calls at a time.

        Args:
            entries: at most `MOST_ENTRIES`.
            is_direct: whether the calls go past the page cache.

        Raises:
            OSError: the kernel refuses it.
            BackendError: the package that speaks to it is not there, or is another one.
        """
        ...

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """Give a range of the file blocks on disk; the file grows to hold it."""
        ...

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """Take a range's blocks from the file; its length stays."""
        ...

    def truncate(self, fd: int, nbytes: int) -> None:
        """Make the file ``nbytes`` long."""
        ...

    def sync(self, fd: int) -> None:
        """Return when what was written to the file would survive a power loss, and its length too."""
        ...

    def sync_folder(self, fd: int) -> None:
        """Return when the names in a directory would survive a power loss."""
        ...
