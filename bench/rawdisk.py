"""The peer of the disk tier: threads over ``preadv`` and ``pwritev``, and nothing else.

No books, no checksum, no layout: one file, ``O_DIRECT``, memory that is aligned and was touched
before.  fio and DeepSpeed's handle do the same within noise on the machines where we compared them.
"""

from __future__ import annotations

import collections
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.measure import stopwatch


class RawDisk:
    """Moves the same ``nbytes`` between memory and one file, as fast as plain threads can.

    Use from one thread, as a context manager.  ``is_direct`` says whether the file system granted
    ``O_DIRECT``.

    Args:
        nbytes: a multiple of ``block_bytes``, which is one of the page size.
        threads: how many move blocks at a time.
    """

    def __init__(self, path: Path, nbytes: int, *, threads: int, block_bytes: int) -> None:
        if nbytes % block_bytes or block_bytes % mmap.PAGESIZE:
            raise ValueError(
                f"{nbytes} bytes are not whole blocks of {block_bytes}, or those not whole pages"
            )
        self.nbytes = nbytes
        self.is_direct = True
        self._block_bytes = block_bytes
        self._memory = mmap.mmap(-1, nbytes)
        torch.frombuffer(self._memory, dtype=torch.uint8).random_()  # touches every page, hard to compress
        self._view = memoryview(self._memory)
        self._file = self._open(path)
        os.posix_fallocate(self._file, 0, nbytes)  # in one piece, if the file system can
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raw-disk")
        self._threads = threads
        self.write()  # what was only allocated has to be marked as written once, by no measured write

    def _open(self, path: Path) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        try:
            return os.open(path, flags | os.O_DIRECT, 0o600)
        except OSError:
            self.is_direct = False
            return os.open(path, flags, 0o600)

    def write(self) -> float:
        """Write all bytes; return the seconds."""
        return self._move(range(0, self.nbytes, self._block_bytes), self._write_block)

    def read(self) -> float:
        """Read all bytes; return the seconds."""
        return self._move(range(0, self.nbytes, self._block_bytes), self._read_block)

    def round_trip(self) -> dict[str, float]:
        """Write all bytes, then read them; return the seconds of each."""
        return {"write": self.write(), "read": self.read()}

    def mix(self, read_share: float) -> float:
        """Read ``read_share`` of the blocks and write the others, both at once; return the seconds."""
        total = self.nbytes // self._block_bytes
        # Evenly spread: block i is read if the running count of reads steps up there.
        reads = {i for i in range(total) if int((i + 1) * read_share) > int(i * read_share)}

        def either(offset: int) -> None:
            move = self._read_block if offset // self._block_bytes in reads else self._write_block
            move(offset)

        return self._move(range(0, self.nbytes, self._block_bytes), either)

    def _move(self, offsets: range, move: Callable[[int], None]) -> float:
        waiting = collections.deque(offsets)
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    if not waiting:
                        return
                    offset = waiting.popleft()
                move(offset)

        def everything() -> None:
            for worker in [self._pool.submit(work) for _ in range(self._threads)]:
                worker.result()

        return stopwatch(everything)

    def _write_block(self, offset: int) -> None:
        moved = os.pwritev(self._file, [self._view[offset : offset + self._block_bytes]], offset)
        self._check(moved, "write")

    def _read_block(self, offset: int) -> None:
        moved = os.preadv(self._file, [self._view[offset : offset + self._block_bytes]], offset)
        self._check(moved, "read")

    def _check(self, moved: int, verb: str) -> None:
        if moved != self._block_bytes:
            raise OSError(f"a {verb} of {self._block_bytes} bytes moved {moved}")

    def __enter__(self) -> RawDisk:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the threads and close the file, which stays."""
        self._pool.shutdown()
        os.close(self._file)
        self._view.release()
