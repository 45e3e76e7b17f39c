"""tierstore as a disk peer, in the two ways that users meet it.  Public names only."""

from __future__ import annotations

from collections.abc import Mapping

import torch

import tierstore as ts
from bench.peers.diskjob import MIB, DiskJob, Way
from bench.peers.usage import Usage, metered
from bench.peers.workers import Absent

_PAGE_BYTES = 4096


def _disk(job: DiskJob, options: Mapping[str, object], room_bytes: int) -> ts.TierConfig:
    every: dict[str, object] = {
        "path": str(job.path),
        "aio_block_size": job.block_bytes,
        "aio_queue_depth": job.depth,
        "threads": job.depth,
    }
    return ts.TierConfig("disk", "files", room_bytes, options=every | dict(options))


def _room_bytes(job: DiskJob) -> int:
    """Return what all tensors take, and one more: a replaced key has two for a moment."""
    return -(-job.tensor_bytes // _PAGE_BYTES) * _PAGE_BYTES * (job.count + 1) + MIB


class Evicted:
    """A store of host memory and disk: writing is `evict`, reading is `fetch`, checksums on by default.

    Args:
        options: of the disk tier, beyond those that the job says.
    """

    way = Way.DIRECT

    def __init__(self, **options: object) -> None:
        self._options = {"checksum": True} | options
        self._given: dict[str, torch.Tensor] = {}

    def prepare(self, job: DiskJob) -> None:
        """Open the store.

        Raises:
            Absent: this version of the backend does not know an option, or its engine cannot be used here.
        """
        self._job = job
        self._keys = [f"k{index}" for index in range(job.count)]
        room_bytes = _room_bytes(job)
        try:
            self._store = ts.Store(
                ts.StoreConfig(
                    [ts.TierConfig("host", "pinned", room_bytes), _disk(job, self._options, room_bytes)]
                )
            )
        except (ts.ConfigError, ts.BackendError) as error:
            raise Absent(str(error)) from error

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Keep it until it is put."""
        self._given[self._keys[index]] = tensor

    def put(self) -> Usage:
        """Put all of them into host memory; what disk still holds is out of date from then on."""
        return metered(self._put)

    def _put(self) -> None:
        for key, tensor in self._given.items():
            self._store.put(key, tensor, tier="host", replace=key in self._store)

    def write(self) -> None:
        """Push all of them down at once."""
        self._store.evict(*self._keys, to="disk").result()

    def read(self) -> None:
        """Bring all of them up at once."""
        self._store.fetch(*self._keys, tier="host").result()

    def found(self, index: int) -> torch.Tensor:
        """Return a copy; forget what was put."""
        del self._given[self._keys[index]]
        return self._store.get(self._keys[index])

    def finish(self) -> None:
        """Close the store."""
        self._store.close()
        self._given = {}


class PutGot:
    """A store of nothing but disk: writing is `put`, reading is `get`, from and to the caller's tensors."""

    way = Way.DIRECT

    def __init__(self) -> None:
        self._given: dict[int, torch.Tensor] = {}
        self._found: dict[int, torch.Tensor] = {}

    def prepare(self, job: DiskJob) -> None:
        """Open the store."""
        self._store = ts.Store(ts.StoreConfig([_disk(job, {"checksum": True}, _room_bytes(job))]))

    def give(self, index: int, tensor: torch.Tensor) -> None:
        """Keep it until it is put."""
        self._given[index] = tensor

    def write(self) -> None:
        """Put one after the other."""
        for index, tensor in self._given.items():
            self._store.put(f"k{index}", tensor, replace=f"k{index}" in self._store)

    def read(self) -> None:
        """Get one after the other, each into fresh memory."""
        self._found = {index: self._store.get(f"k{index}") for index in self._given}

    def found(self, index: int) -> torch.Tensor:
        """Return it; forget it and what was put."""
        del self._given[index]
        return self._found.pop(index)

    def finish(self) -> None:
        """Close the store."""
        self._store.close()
        self._given = {}
