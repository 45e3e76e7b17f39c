"""What the tests of scratch files share: a kernel that follows a script, and buffers to move."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from tierstore.spi import Buffer, Completion
from tierstore.units import KIB, MIB
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.durable import DurableFiles
from tierstore_backends.files.options import parse_options
from tierstore_backends.files.syscalls import KERNEL, Syscalls

_RANDOM = torch.randint(
    0, 256, (8 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)  # different seeds of ``buffer`` are different windows

TIMEOUT_S = 30.0
PAGE = 4096

Twist = Callable[[str, int, int], int | None]
"""Told of (kind, offset, bytes) before a call; raises, or returns how many bytes may move at most."""


class ScriptedKernel:
    """The real kernel; ``twist`` decides what goes wrong.  Counts and remembers calls."""

    def __init__(self, twist: Twist | None = None) -> None:
        self.twist = twist
        self.calls: list[tuple[str, int, int]] = []
        self.active = 0
        self.most_active = 0
        self._lock = threading.Lock()

    def read(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """See `Syscalls`."""
        return self._move(KERNEL.read, "read", fd, vector, offset)

    def write(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """See `Syscalls`."""
        return self._move(KERNEL.write, "write", fd, vector, offset)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._note("allocate", offset, nbytes)
        KERNEL.allocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._note("punch", offset, nbytes)
        KERNEL.punch(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._note("truncate", 0, nbytes)
        KERNEL.truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """See `Syscalls`."""
        self._note("sync", 0, 0)
        KERNEL.sync(fd)

    def sync_folder(self, fd: int) -> None:
        """See `Syscalls`."""
        self._note("sync folder", 0, 0)
        KERNEL.sync_folder(fd)

    def of_kind(self, kind: str) -> list[tuple[int, int]]:
        """Return (offset, bytes) of every call of ``kind``."""
        with self._lock:
            return [(offset, nbytes) for each, offset, nbytes in self.calls if each == kind]

    def forget(self) -> None:
        """Forget the calls so far."""
        with self._lock:
            self.calls.clear()
            self.most_active = 0

    def _move(
        self,
        call: Callable[[int, Sequence[memoryview], int], int],
        kind: str,
        fd: int,
        vector: Sequence[memoryview],
        offset: int,
    ) -> int:
        nbytes = sum(len(view) for view in vector)
        with self._lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            most = self._note(kind, offset, nbytes)
            if most is None or most >= nbytes:
                return call(fd, vector, offset)
            if whole := _first(vector, most - most % PAGE):
                call(fd, whole, offset)  # a disk moves aligned bytes; the rest did not get there
            return most
        finally:
            with self._lock:
                self.active -= 1

    def _note(self, kind: str, offset: int, nbytes: int) -> int | None:
        with self._lock:
            self.calls.append((kind, offset, nbytes))
            twist = self.twist
        return twist(kind, offset, nbytes) if twist is not None else None


def _first(vector: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first ``nbytes`` of ``vector``."""
    first: list[memoryview] = []
    for view in vector:
        if nbytes > 0:
            first.append(view[:nbytes])
        nbytes -= len(view)
    return first


class Nth:
    """A twist that does ``what`` at the n-th call of ``kinds``, counted from 1, and nothing else."""

    def __init__(self, n: int, what: Callable[[int], int | None], *kinds: str) -> None:
        self._n = n
        self._what = what
        self._kinds = kinds
        self._lock = threading.Lock()
        self._count = 0

    def __call__(self, kind: str, offset: int, nbytes: int) -> int | None:
        del offset
        if self._kinds and kind not in self._kinds:
            return None
        with self._lock:
            self._count += 1
            is_due = self._count == self._n
        return self._what(nbytes) if is_due else None

    @property
    def has_struck(self) -> bool:
        """Whether the n-th call was made."""
        return self._count >= self._n


class Gate:
    """A twist that lets nothing of ``kinds`` through until it is opened."""

    def __init__(self, *kinds: str) -> None:
        self._kinds = kinds
        self._is_open = threading.Event()
        self.is_reached = threading.Event()

    def __call__(self, kind: str, offset: int, nbytes: int) -> int | None:
        del offset, nbytes
        if kind in self._kinds:
            self.is_reached.set()
            assert self._is_open.wait(TIMEOUT_S)
        return None

    def wait_for_caller(self) -> None:
        """Return when somebody stands at the gate."""
        assert self.is_reached.wait(TIMEOUT_S)

    def open(self) -> None:
        """Let everybody through."""
        self._is_open.set()


def failing(code: int) -> Callable[[int], int | None]:
    """Return what a call does that fails with ``code``."""

    def fail(nbytes: int) -> int | None:
        raise OSError(code, f"scripted after {nbytes} bytes")

    return fail


def open_files(
    path: Path,
    capacity_bytes: int = 8 * MIB,
    *,
    syscalls: Syscalls = KERNEL,
    segment_bytes: int = 64 * MIB,
    stride_bytes: int = 64 * KIB,
    quiet_s: float = 3600.0,
    **options: object,
) -> FilesBackend:
    """Open scratch files whose geometry fits a test."""
    return FilesBackend(
        capacity_bytes,
        parse_options({"path": path, **options}),
        syscalls=syscalls,
        segment_bytes=segment_bytes,
        stride_bytes=stride_bytes,
        quiet_s=quiet_s,
    )


def open_durable(
    path: Path,
    capacity_bytes: int = 8 * MIB,
    *,
    syscalls: Syscalls = KERNEL,
    segment_bytes: int = 64 * MIB,
    stride_bytes: int = 64 * KIB,
    quiet_s: float = 3600.0,
    options: Mapping[str, object] | None = None,
) -> DurableFiles:
    """Open durable files whose geometry fits a test."""
    return DurableFiles(
        capacity_bytes,
        parse_options({"path": path, "durable": True, **(options or {})}),
        syscalls=syscalls,
        segment_bytes=segment_bytes,
        stride_bytes=stride_bytes,
        quiet_s=quiet_s,
    )


def disk_taken(path: Path) -> int:
    """Return what the scratch files in ``path`` take on disk, less a block for each.

    A file of many fragments may have one for its index (ext4), which is not the capacity's matter.
    """
    files = [file.stat() for file in path.glob("tierstore-scratch-*.bin")]
    return sum(max(0, file.st_blocks * 512 - PAGE) for file in files)


def outcome(completion: Completion) -> BaseException | None:
    """Wait for the end of ``completion``; return its error."""
    ended = threading.Event()
    completion.add_done_callback(lambda _: ended.set())
    assert ended.wait(TIMEOUT_S), "never completed"
    return completion.error


def finish(*completions: Completion) -> None:
    """Wait for all; raise the first error."""
    for error in [outcome(completion) for completion in completions]:
        if error is not None:
            raise error


def buffer(nbytes: int, seed: int = 0, *, misalignment: int = 0) -> Buffer:
    """Return random bytes that begin ``misalignment`` bytes after the start of a page."""
    whole = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE + misalignment
    begin = seed * 7919 % (len(_RANDOM) - nbytes)
    whole[start : start + nbytes] = _RANDOM[begin : begin + nbytes]
    return whole[start : start + nbytes]


def blank(nbytes: int, *, misalignment: int = 0) -> Buffer:
    """Return room to read into, filled with a byte that stands for nothing."""
    whole = torch.empty(nbytes + 2 * PAGE, dtype=torch.uint8)
    start = -whole.data_ptr() % PAGE + misalignment
    return whole[start : start + nbytes].fill_(0xEE)
