"""What of a tensor or a bundle one rank has."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tierstore.planning.homes import values_of
from tierstore.planning.machine import is_rate
from tierstore.planning.program import ByteKind, Datum, Program, is_bytes
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import named


class Sharding(enum.Enum):
    """What ranks divide between them."""

    NONE = "none"  # each has all: data parallel
    OPTIMIZER = "optimizer"  # gradients, once they are reduced, and state
    FULL = "full"  # parameters as well: FSDP


def shard_bytes(nbytes: int, world_size: int, rows: int | None = None) -> int:
    """Return the bytes of the largest shard; collectives move so many of each rank, padding included.

    Args:
        nbytes: of the whole.
        world_size: how many ranks divide it.
        rows: elements of its first dimension, of which FSDP2 gives each rank ``ceil(rows / world_size)``;
            ``None``: unknown, it is divided by bytes.
    """
    if rows is None or rows < 1 or nbytes % rows:
        return -(-nbytes // world_size)
    return -(-rows // world_size) * (nbytes // rows)


@dataclass(frozen=True)
class RankGroup:
    """How many processes train together, and what they share.

    Attributes:
        world_size: ranks altogether: a multiple of `Machine.ranks_per_host`, or fewer, on one host.
        shard: what ranks divide.
        rows: elements of the first dimension of parameters, by the key of their gradient: shards are padded
            by rows, as FSDP2's; of what is not named, by bytes.
        bucket_bytes: of `Sharding.NONE`: gradients are reduced in buckets of so many bytes, as
            ``DistributedDataParallel`` does (25 MiB); ``None``: each as a message of its own, as
            ``run.average_gradients()`` does.
        storage_bytes_per_s: what storage that all hosts share reads or writes a second; ``None``: each host
            has its own drives.

    Raises:
        ConfigError: lists every fault.
    """

    world_size: int
    shard: Sharding = Sharding.NONE
    rows: Mapping[str, int] = field(default_factory=dict)
    bucket_bytes: int | None = None
    storage_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        faults = WrongValues()
        faults.add_unless(_is_count(self.world_size), "world_size", self.world_size, _COUNT_LISTED)
        faults.add_unless(isinstance(self.shard, Sharding), "shard", self.shard, values_of(Sharding))
        for key, count in self.rows.items():
            faults.add_unless(is_bytes(count), f"rows[{named(key)}]", count, "an int of at least 0")
        if self.bucket_bytes is not None:
            faults.add_unless(_is_count(self.bucket_bytes), "bucket_bytes", self.bucket_bytes, _COUNT_LISTED)
            faults.add_unless(
                self.shard is Sharding.NONE,
                "bucket_bytes",
                self.bucket_bytes,
                "null, where anything is sharded",
            )
        if self.storage_bytes_per_s is not None:
            rate = self.storage_bytes_per_s
            faults.add_unless(is_rate(rate), "storage_bytes_per_s", rate, "a number greater than 0")
        faults.raise_if_any("RankGroup")


_COUNT_LISTED = "an int greater than 0"


def _is_count(value: object) -> bool:
    return is_bytes(value) and value != 0


class RankShards:
    """What one rank has of a program's data.

    Args:
        program: whose.
        world_size: how many ranks divide it.
        rows: elements of the first dimension of parameters, by the key of their gradient.
    """

    def __init__(self, program: Program, world_size: int, rows: Mapping[str, int]) -> None:
        self._world_size = world_size
        self._rows = rows
        self._data = program.data
        self._gradients: dict[str, list[Datum]] = {}
        for unit in program.units:
            self._gradients[unit.bundle] = [program.data[key] for key in unit.gradients]

    def nbytes(self, key: str) -> int:
        """Return the bytes of the largest shard of a key."""
        datum = self._data[key]
        if datum.kind is ByteKind.GRADIENT:
            return shard_bytes(datum.nbytes, self._world_size, self._rows.get(key))
        if datum.kind is ByteKind.STATE and datum.owner is not None and datum.owner in self._data:
            return -(-datum.nbytes * self.nbytes(datum.owner) // max(1, self._data[datum.owner].nbytes))
        known = [each for each in self._gradients.get(key, ()) if each.key in self._rows]
        known_bytes = sum(each.nbytes for each in known)
        if not known or known_bytes > datum.nbytes:
            return shard_bytes(datum.nbytes, self._world_size)
        # What is left is padding between the tensors of a bundle, which shards have not, or frozen tensors.
        left = datum.nbytes - known_bytes
        if len(known) == len(self._gradients[key]):
            left = 0
        return sum(self.nbytes(each.key) for each in known) + shard_bytes(left, self._world_size)

    def ratio(self, key: str) -> float:
        """Return how much of a key a shard is."""
        return self.nbytes(key) / max(1, self._data[key].nbytes)

    def gathered_bytes(self, key: str) -> int:
        """Return the bytes of all shards together, padding included."""
        return self.nbytes(key) * self._world_size
