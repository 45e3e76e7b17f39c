"""What tensors of a training loop look like to a codec, and backends for it to stand around."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from tierstore.errors import BackendError
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Medium, Record, Slot
from tierstore.testing.conformance import contents, stored
from tierstore_backends.memory import MemoryBackend

KIB, MIB = 2**10, 2**20


def as_bytes(tensor: torch.Tensor) -> Buffer:
    """Return a tensor's bytes."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def repeating(nbytes: int, seed: int = 0) -> Buffer:
    """Return bytes of numbers that count up: four bytes wide, they pack well."""
    return as_bytes(torch.arange(seed, seed + nbytes // 4 + 1, dtype=torch.int32))[:nbytes].clone()


def random(nbytes: int, seed: int = 0) -> Buffer:
    """Return bytes that nothing makes shorter."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)


class Watched(MemoryBackend):
    """Memory behind I/O that knows its slots, and what it was given to write."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes, is_storage=True)
        self.slots: list[Slot] = []  # reserved and not freed
        self.sources: list[Buffer] = []
        self.peak_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, nbytes: int) -> Slot:
        slot = super().reserve(nbytes)
        with self._lock:
            self.slots.append(slot)
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return slot

    def write(self, slot: Slot, source: Buffer) -> Completion:
        self.sources.append(source)
        return super().write(slot, source)

    def free(self, slot: Slot) -> Completion:
        freed = super().free(slot)
        with self._lock:
            self.slots.remove(slot)
        return freed

    @property
    def held_bytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots)

    def flip(self, slot: Slot, at: int) -> None:
        """Flip a bit of what a slot holds."""
        whole = contents(self, slot)
        whole[at] ^= 0x10
        super().write(slot, whole)


@dataclass
class Shelf:
    """What survives: names, notes and bytes, as the last commit left them."""

    records: list[tuple[str, str, Buffer]] = field(default_factory=list)


class Lasting:
    """Memory behind I/O that is opened again on what was committed: a `DurableBackend` without a disk."""

    def __init__(self, capacity_bytes: int, shelf: Shelf) -> None:
        self._memory: Backend = MemoryBackend(capacity_bytes, is_storage=True)
        self._shelf = shelf
        self.fails = False

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(medium=Medium.STORAGE, is_durable=True)

    def recovered(self) -> Sequence[Record]:
        return [Record(name, note, stored(self._memory, data)) for name, note, data in self._shelf.records]

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        if self.fails:
            return Completion.done(BackendError("the disk is gone"))
        names = [record.name for record in records]
        spoken = {*names, *(gone or ())}
        assert len(spoken) == len(names) + len(gone or ()), "rule: names are different"
        stay = [] if gone is None else [each for each in self._shelf.records if each[0] not in spoken]
        self._shelf.records = stay + [
            (record.name, record.note, contents(self._memory, record.slot)) for record in records
        ]
        return Completion.done()

    def reserve(self, nbytes: int) -> Slot:
        return self._memory.reserve(nbytes)

    def read(self, slot: Slot, into: Buffer) -> Completion:
        return self._memory.read(slot, into)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        return self._memory.write(slot, source)

    def free(self, slot: Slot) -> Completion:
        return self._memory.free(slot)

    def resize(self, capacity_bytes: int) -> None:
        self._memory.resize(capacity_bytes)

    def close(self) -> None:
        self._memory.close()
