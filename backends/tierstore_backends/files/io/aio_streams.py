"""Files through aiofiles: any file system, no direct I/O, no calls that only some systems have.

A stream has a position, so each task has its own.  Files are found by name, as the descriptors of the
segments share theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from pathlib import Path

import aiofiles
from aiofiles.threadpool.binary import AsyncFileIO

from tierstore_backends.files.io.io_request import Direction
from tierstore_backends.files.io.syscalls import KernelCall


class AioStreams:
    """One task's files.  See `tierstore_backends.files.io.syscalls.FileStreams`.

    Args:
        path_of: names the file that holds an address.
        executor: blocks on the disk in the task's stead.
    """

    def __init__(self, path_of: Callable[[int], Path], executor: Executor) -> None:
        self._path_of = path_of
        self._executor = executor
        self._open: dict[Path, AsyncFileIO] = {}

    async def move(self, call: KernelCall) -> int:
        """See `FileStreams`."""
        file = await self._file(self._path_of(call.address))
        await file.seek(call.offset)
        moved = 0
        for view in call.vector:
            step = file.write if call.direction is Direction.WRITE else file.readinto
            count = await step(view) or 0
            moved += count
            if count < len(view):
                break
        return moved

    async def close(self) -> None:
        """See `FileStreams`."""
        while self._open:
            _, file = self._open.popitem()
            await file.close()

    async def _file(self, path: Path) -> AsyncFileIO:
        file = self._open.get(path)
        if file is None:
            # Unbuffered: a buffer would be one more copy, and would hide short transfers.
            file = await aiofiles.open(path, "r+b", buffering=0, executor=self._executor)
            self._open[path] = file
        return file
