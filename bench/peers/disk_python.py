"""Disk peers that go through the page cache: ``torch.save``, safetensors, zarr, aiofiles."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import torch

from bench.peers.diskjob import DiskJob, Way
from bench.peers.workers import required


class OneByOne:
    """A library with one call to save a tensor and one to load it, a file each.

    Args:
        save: writes a tensor as the file at a path.
        load: returns it, all of its bytes in memory.
    """

    way = Way.CACHED

    def __init__(
        self, save: Callable[[torch.Tensor, str], object], load: Callable[[str], torch.Tensor]
    ) -> None:
        self._save, self._load = save, load
        self._tensors: dict[int, torch.Tensor] = {}
        self._found: dict[int, torch.Tensor] = {}

    def prepare(self, job: DiskJob) -> None:
        """Nothing is allocated before it is needed."""
        self._job = job

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Keep it until it is written."""
        self._tensors[index] = tensor

    def write(self) -> None:
        """Save one after the other."""
        for index, tensor in self._tensors.items():
            self._save(tensor, str(self._job.file(index)))

    def read(self) -> None:
        """Load one after the other, each into fresh memory."""
        self._found = {}
        for index in self._tensors:
            self._found[index] = self._load(str(self._job.file(index)))

    def found(self, index: int) -> torch.Tensor:
        """Return it; forget it and what was written."""
        del self._tensors[index]
        return self._found.pop(index)

    def finish(self) -> None:
        """Let go of everything."""
        self._tensors, self._found = {}, {}


def torch_save() -> OneByOne:
    """Return ``torch.save`` and ``torch.load``."""
    return OneByOne(torch.save, torch.load)


def safetensors() -> OneByOne:
    """Return safetensors; what it maps is copied, for until then nothing was read.

    Raises:
        Absent: it is not installed.
    """
    library = required("safetensors.torch")

    def load(path: str) -> torch.Tensor:
        tensor: torch.Tensor = library.load_file(path)["x"].clone()
        return tensor

    return OneByOne(lambda tensor, path: library.save_file({"x": tensor}, path), load)


def zarr() -> OneByOne:
    """Return zarr: an array a tensor in one chunk, without a codec, in a local store.

    Raises:
        Absent: it is not installed.
    """
    library = required("zarr")

    def save(tensor: torch.Tensor, path: str) -> None:
        array = library.create_array(
            path,
            shape=tensor.shape,
            chunks=tensor.shape,
            dtype="uint8",
            compressors=None,
            filters=None,
            overwrite=True,
        )
        array[:] = tensor.numpy()

    def load(path: str) -> torch.Tensor:
        return torch.from_numpy(library.open_array(path, mode="r")[:])

    return OneByOne(save, load)


class Aiofiles:
    """aiofiles without a buffer of its own: as many tensors at a time as the job's depth, in its blocks.

    Raises:
        Absent: it is not installed.
    """

    way = Way.CACHED

    def __init__(self) -> None:
        self._library = required("aiofiles")
        self._tensors: dict[int, torch.Tensor] = {}
        self._found: dict[int, torch.Tensor] = {}

    def prepare(self, job: DiskJob) -> None:
        """Allocate what is read into."""
        self._job = job
        self._targets = {
            index: torch.zeros(job.tensor_bytes, dtype=torch.uint8) for index in range(job.count)
        }

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Keep it until it is written."""
        self._tensors[index] = tensor

    def write(self) -> None:
        """Write a file each."""
        asyncio.run(self._several(self._write_one))

    def read(self) -> None:
        """Read into the memory that was prepared."""
        asyncio.run(self._several(self._read_one))

    async def _several(self, move: Callable[[int], Awaitable[None]]) -> None:
        free = asyncio.Semaphore(self._job.depth)

        async def one(index: int) -> None:
            async with free:
                await move(index)

        await asyncio.gather(*(one(index) for index in range(self._job.count)))

    async def _write_one(self, index: int) -> None:
        async with self._library.open(self._job.file(index), "wb", buffering=0) as file:
            for block in self._blocks(self._tensors[index]):
                if await file.write(block) != len(block):
                    raise OSError("a short write")

    async def _read_one(self, index: int) -> None:
        async with self._library.open(self._job.file(index), "rb", buffering=0) as file:
            for block in self._blocks(self._targets[index]):
                if await file.readinto(block) != len(block):
                    raise OSError("a short read")

    def _blocks(self, tensor: torch.Tensor) -> Iterator[memoryview]:
        view = memoryview(tensor.numpy().data)
        for start in range(0, len(view), self._job.block_bytes):
            yield view[start : start + self._job.block_bytes]

    def found(self, index: int) -> torch.Tensor:
        """Return the memory that was read into; forget what was written."""
        del self._tensors[index]
        return self._targets[index]

    def finish(self) -> None:
        """Let go of everything."""
        self._tensors, self._targets = {}, {}
