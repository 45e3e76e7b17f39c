"""The work that every disk peer does, and what a peer is."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch

KIB, MIB = 1024, 1024**2


class Way(enum.Enum):
    """How bytes get to the drive and back."""

    DIRECT = "O_DIRECT: past the page cache, not flushed"
    CACHED = "page cache: written and synced; read after its pages were dropped (cold), and again (warm)"


@dataclass(frozen=True)
class DiskJob:
    """Tensors to write and to read.

    Attributes:
        path: a directory of the peer's own.
        tensor_bytes: of each, a multiple of the page size.
        count: how many.
        block_bytes: of one request, where a peer lets that be chosen.
        depth: requests at a time, where a peer lets that be chosen.
    """

    path: Path
    tensor_bytes: int
    count: int
    block_bytes: int
    depth: int

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, object]) -> DiskJob:
        """Read what `to_mapping` wrote."""
        values = {name: int(str(mapping[name])) for name in ("tensor_bytes", "count", "block_bytes", "depth")}
        return cls(Path(str(mapping["path"])), **values)

    def to_mapping(self) -> dict[str, object]:
        """Return it as JSON takes it."""
        return asdict(self) | {"path": str(self.path)}

    @property
    def nbytes(self) -> int:
        """All of them together."""
        return self.tensor_bytes * self.count

    def file(self, index: int) -> Path:
        """Return where a peer that keeps a file a tensor keeps one."""
        return self.path / f"{index}.tensor"

    def expected(self, turn: int) -> Iterator[torch.Tensor]:
        """Yield the tensors of one turn: no two alike, and none as it was in the turn before."""
        generator = torch.Generator().manual_seed(0)
        noise = torch.randint(256, (self.tensor_bytes,), dtype=torch.uint8, generator=generator)
        noise.add_(turn % 256)
        for index in range(self.count):
            yield noise.roll(index)


class DiskPeer(Protocol):
    """Writes and reads the tensors of a job; all calls come from one thread.

    ``way`` is fixed when the peer is opened.  Memory is its own business: what a user would do.
    """

    way: Way

    def prepare(self, job: DiskJob) -> None:
        """Get ready, unmeasured.  The directory is there and empty."""

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Take what is to be written next, unmeasured."""

    def write(self) -> None:
        """Write all tensors; return when the library says that they are written."""

    def read(self) -> None:
        """Read all of them into memory."""

    def found(self, index: int) -> torch.Tensor:
        """Return what was read, unmeasured; asked for once, in order."""

    def finish(self) -> None:
        """Let go of the memory and of what was prepared; files may stay."""


def check(peer: DiskPeer, job: DiskJob, turn: int) -> None:
    """Compare every byte that was read.

    Raises:
        AssertionError: one differs.
    """
    for index, expected in enumerate(job.expected(turn)):
        found = peer.found(index)
        if not torch.equal(found.view(torch.uint8).reshape(-1), expected):
            raise AssertionError(f"tensor {index} of {job.count} is not what was written")
