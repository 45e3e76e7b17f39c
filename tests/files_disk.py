"""What the tests of scratch files share: a kernel that follows a script, and buffers to move."""

from __future__ import annotations

import contextlib
import resource
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tierstore.errors import BackendError
from tierstore.spi import Buffer, Completion
from tierstore.units import KIB, MIB
from tierstore_backends.files.backend import FilesBackend
from tierstore_backends.files.durable import DurableFiles
from tierstore_backends.files.io.io_request import FileSlot
from tierstore_backends.files.io.kernel import KERNEL
from tierstore_backends.files.io.syscalls import FileStreams, KernelCall, Ring, Syscalls
from tierstore_backends.files.options import parse_options

_RANDOM = torch.randint(
    0, 256, (8 * MIB,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
)  # different seeds of ``buffer`` are different windows


def _ring_fault() -> str | None:
    try:
        KERNEL.open_ring(1, is_direct=False).close()
    except (OSError, BackendError) as error:
        return f"no io_uring here: {error}"
    return None


_fault = _ring_fault()
needs_ring = pytest.mark.skipif(_fault is not None, reason=_fault or "")
IN_BACKGROUND = ["threads", pytest.param("io_uring", marks=needs_ring), "aiofiles"]
EVERY_ENGINE = [*IN_BACKGROUND, "plain"]

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

    def open_streams(self, path_of: Callable[[int], Path], executor: Executor) -> FileStreams:
        """See `Syscalls`."""
        return ScriptedStreams(self, KERNEL.open_streams(path_of, executor))

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        """See `Syscalls`."""
        return ScriptedRing(self, KERNEL.open_ring(entries, is_direct=is_direct))

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self.note("allocate", offset, nbytes)
        KERNEL.allocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self.note("punch", offset, nbytes)
        KERNEL.punch(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self.note("truncate", 0, nbytes)
        KERNEL.truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """See `Syscalls`."""
        self.note("sync", 0, 0)
        KERNEL.sync(fd)

    def sync_folder(self, fd: int) -> None:
        """See `Syscalls`."""
        self.note("sync folder", 0, 0)
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
        with self.counted():
            most = self.note(kind, offset, nbytes)
            if most is None or most >= nbytes:
                return call(fd, vector, offset)
            if whole := first(vector, most - most % PAGE):
                call(fd, whole, offset)  # a disk moves aligned bytes; the rest did not get there
            return most

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Count a call as active."""
        with self._lock:
            self.active += 1
            self.most_active = max(self.most_active, self.active)
        try:
            yield
        finally:
            with self._lock:
                self.active -= 1

    def note(self, kind: str, offset: int, nbytes: int) -> int | None:
        """Remember a call; do what the script says; return how many bytes may move at most."""
        with self._lock:
            self.calls.append((kind, offset, nbytes))
            twist = self.twist
        return twist(kind, offset, nbytes) if twist is not None else None


class OnDrive:
    """A scripted kernel for the files in one folder, and another, the real one, for all others."""

    def __init__(self, folder: Path, kernel: ScriptedKernel, others: Syscalls = KERNEL) -> None:
        self._folder = folder
        self._kernel = kernel
        self._others = others

    def read(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """See `Syscalls`."""
        return self._of(fd).read(fd, vector, offset)

    def write(self, fd: int, vector: Sequence[memoryview], offset: int) -> int:
        """See `Syscalls`."""
        return self._of(fd).write(fd, vector, offset)

    def open_streams(self, path_of: Callable[[int], Path], executor: Executor) -> FileStreams:
        """See `Syscalls`."""
        return KERNEL.open_streams(path_of, executor)

    def open_ring(self, entries: int, *, is_direct: bool) -> Ring:
        """See `Syscalls`."""
        return KERNEL.open_ring(entries, is_direct=is_direct)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._of(fd).allocate(fd, offset, nbytes)

    def punch(self, fd: int, offset: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._of(fd).punch(fd, offset, nbytes)

    def truncate(self, fd: int, nbytes: int) -> None:
        """See `Syscalls`."""
        self._of(fd).truncate(fd, nbytes)

    def sync(self, fd: int) -> None:
        """See `Syscalls`."""
        self._of(fd).sync(fd)

    def sync_folder(self, fd: int) -> None:
        """See `Syscalls`."""
        self._of(fd).sync_folder(fd)

    def _of(self, fd: int) -> Syscalls:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return self._kernel if self._folder in (path, path.parent) else self._others


class ScriptedRing:
    """A real ring; the kernel's script decides what goes wrong.

    A call that is to fail moves nothing, and one that is to fall short moves its first pages only: what
    the engine does not ask for again is not there.
    """

    def __init__(self, kernel: ScriptedKernel, ring: Ring) -> None:
        self._kernel = kernel
        self._ring = ring
        self._known: list[tuple[int, int]] = []  # ended without the kernel
        self._short: dict[int, int] = {}  # what is told, by token

    def put(self, token: int, call: KernelCall) -> None:
        """See `Ring`."""
        nbytes = sum(len(view) for view in call.vector)
        try:
            most = self._kernel.note(call.direction.name.lower(), call.offset, nbytes)
        except OSError as error:
            self._end(token, -(error.errno or 0))
            return
        if most is None or most >= nbytes:
            self._ring.put(token, call)
        elif whole := first(call.vector, most - most % PAGE):
            self._short[token] = most
            self._ring.put(token, replace(call, vector=whole))
        else:
            self._end(token, most)

    def submit(self) -> None:
        """See `Ring`."""
        self._ring.submit()

    def reap(self) -> list[tuple[int, int]]:
        """See `Ring`."""
        known, self._known = self._known, []
        return known + [(token, self._short.pop(token, result)) for token, result in self._ring.reap()]

    def wait(self, timeout_s: float | None) -> None:
        """See `Ring`."""
        self._ring.wait(timeout_s)

    def wake(self) -> None:
        """See `Ring`."""
        self._ring.wake()

    def close(self) -> None:
        """See `Ring`."""
        self._ring.close()

    def _end(self, token: int, result: int) -> None:
        self._known.append((token, result))
        self._ring.wake()


class ScriptedStreams:
    """Real files behind aiofiles; the kernel's script decides what goes wrong."""

    def __init__(self, kernel: ScriptedKernel, streams: FileStreams) -> None:
        self._kernel = kernel
        self._streams = streams

    async def move(self, call: KernelCall) -> int:
        """See `FileStreams`."""
        nbytes = sum(len(view) for view in call.vector)
        with self._kernel.counted():
            most = self._kernel.note(call.direction.name.lower(), call.offset, nbytes)
            if most is None or most >= nbytes:
                return await self._streams.move(call)
            if whole := first(call.vector, most - most % PAGE):
                await self._streams.move(replace(call, vector=whole))
            return most

    async def close(self) -> None:
        """See `FileStreams`."""
        await self._streams.close()


def first(vector: Sequence[memoryview], nbytes: int) -> list[memoryview]:
    """Return the first ``nbytes`` of ``vector``."""
    first: list[memoryview] = []
    for view in vector:
        if nbytes > 0:
            first.append(view[:nbytes])
        nbytes -= len(view)
    return first


class PowerKernel(ScriptedKernel):
    """The real kernel, over disks that forget at a power loss what was not synced.

    ``folder`` is the directory, or has those of a store with several in it.

    Of a file what its last sync found there stays; of a directory the names that its last sync found.
    (SQLite's files are copied as they are: whether SQLite syncs them is SQLite's affair.)
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self._synced = {self._name(path): path.read_bytes() for path in folder.rglob("tierstore-*.bin")}
        self._names = set(self._synced)

    def sync(self, fd: int) -> None:
        """See `Syscalls`."""
        super().sync(fd)
        path = Path(f"/proc/self/fd/{fd}").readlink()
        self._synced[self._name(path)] = path.read_bytes()

    def sync_folder(self, fd: int) -> None:
        """See `Syscalls`."""
        super().sync_folder(fd)
        synced = Path(f"/proc/self/fd/{fd}").readlink()
        elsewhere = {name for name in self._names if (self.folder / name).parent != synced}
        self._names = elsewhere | {self._name(path) for path in synced.iterdir()}

    def lose_power(self, into: Path) -> PowerKernel:
        """Make ``into`` what the folder would be after a power loss; return the kernel for it."""
        into.mkdir()
        for path in sorted(self.folder.rglob("*")):
            name = self._name(path)
            if path.is_dir():
                (into / name).mkdir()
            elif path.suffix != ".bin":
                shutil.copy(path, into / name)
            elif name in self._names:
                (into / name).write_bytes(self._synced.get(name, b""))
        return PowerKernel(into)

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.folder))


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
    path: object,
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


@contextlib.contextmanager
def no_file_grows(most_bytes: int = 0) -> Iterator[None]:
    """Let the kernel refuse every write beyond ``most_bytes`` of any file, in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def disk_taken(path: Path) -> int:
    """Return what the scratch files in ``path`` take on disk, less a block for each.

    A file of many fragments may have one for its index (ext4), which is not the capacity's matter.
    """
    files = [file.stat() for file in path.glob("tierstore-scratch-*.bin")]
    return sum(max(0, file.st_blocks * 512 - PAGE) for file in files)


def outcome(completion: Completion) -> BaseException | None:
    """Wait for the end of ``completion``; return its error."""
    assert completion.wait(TIMEOUT_S), "never completed"
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


def written(files: FilesBackend, count: int, nbytes: int) -> list[FileSlot]:
    """Reserve and write ``count`` slots; slot ``i`` has the bytes of ``buffer(nbytes, i)``."""
    slots = [files.reserve(nbytes) for _ in range(count)]
    finish(*(files.write(slot, buffer(nbytes, i)) for i, slot in enumerate(slots)))
    return slots
