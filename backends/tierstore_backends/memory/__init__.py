"""The reference backend: plain memory, simple and obviously right.

Promises every rule of `tierstore.spi` with the least code that can: a slot is one tensor, a copy is
done when the call returns, and bytes are given back at once.  For tests, and to read first when
writing a backend.

Options:
    durable: whether what a commit names is kept in `MemoryBackend.image`, which another backend may find.
    storage: whether bytes are reached by ``read`` and ``write`` only, as behind I/O.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from tierstore.errors import BackendError
from tierstore.spi import Buffer, Capabilities, Completion, Medium, Record, Slot
from tierstore_backends import host
from tierstore_backends.options import Options
from tierstore_backends.quota import Quota

__all__ = ["MemoryBackend", "open_backend"]

_CLOSED = "the 'memory' backend is closed"


@dataclass(frozen=True, slots=True)
class _Enclosed:
    """A slot whose bytes cannot be touched in place."""

    inside: host.HostSlot[None]

    @property
    def nbytes(self) -> int:
        return self.inside.nbytes


Image = dict[str, tuple[str, torch.Tensor]]
"""What a power loss leaves: note and bytes by name."""


class MemoryBackend:
    """Holds bytes in tensors of their own.  See the module for the options.

    Args:
        capacity_bytes: the most that slots may take.
        is_durable: see the module.
        is_storage: see the module.
        image: what another one left, which this one finds.

    Attributes:
        image: what the last commit named.
    """

    def __init__(
        self,
        capacity_bytes: int,
        *,
        is_durable: bool = False,
        is_storage: bool = False,
        image: Image | None = None,
    ) -> None:
        self.capabilities = Capabilities(
            medium=Medium.STORAGE if is_storage else Medium.HOST, is_durable=is_durable, has_parts=True
        )
        self._quota = Quota("memory", capacity_bytes)
        self._is_closed = False
        self.image: Image = image or {}

    def recovered(self) -> Sequence[Record]:
        """Take room for what the image holds, and return it.

        Raises:
            CapacityError: it is more than the capacity.
        """
        records: list[Record] = []
        for name, (note, memory) in self.image.items():
            slot = self.reserve(memory.numel())
            host.copy(host.own(_inside(slot)).memory, memory)
            records.append(Record(name, note, slot))
        return records

    def commit(self, records: Sequence[Record], gone: Collection[str] | None = None) -> Completion:
        """Keep copies of the records' bytes in the image, before returning."""
        if self._is_closed:
            return Completion.done(BackendError(_CLOSED))
        with host.plain_tensors():
            named = {
                name: (note, host.own(_inside(slot)).memory.clone())
                for name, note, slot in ((r.name, r.note, r.slot) for r in records)
            }
        if gone is None:
            self.image = named
        else:
            self.image.update(named)
            for name in gone:
                self.image.pop(name, None)
        return Completion.done()

    def reserve(self, nbytes: int) -> Slot:
        """Take room for ``nbytes``.

        Raises:
            CapacityError: more than what is free.
            BackendError: the backend is closed.
        """
        if self._is_closed:
            raise BackendError(_CLOSED)
        self._quota.take(nbytes)
        # Not what an operation returns: a meter of the emulated device would take it for device memory.
        with host.plain_tensors():
            memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(torch.UntypedStorage(nbytes))
        slot = host.HostSlot(memory, place=None)
        return _Enclosed(slot) if self.capabilities.medium is Medium.STORAGE else slot

    def read(self, slot: Slot, into: Buffer) -> Completion:
        """Copy the slot's bytes into ``into`` before returning."""
        if self._is_closed:
            return Completion.done(BackendError(_CLOSED))
        return host.read(_inside(slot), into)

    def read_parts(
        self, slots: Sequence[Slot], begins: Sequence[int], nbytes: int, into: Buffer
    ) -> Completion:
        """Copy the parts into ``into`` before returning."""
        if self._is_closed:
            return Completion.done(BackendError(_CLOSED))
        return host.read_parts(list(map(_inside, slots)), begins, nbytes, into, 1)

    def write(self, slot: Slot, source: Buffer) -> Completion:
        """Copy ``source`` into the slot before returning."""
        if self._is_closed:
            return Completion.done(BackendError(_CLOSED))
        return host.write(_inside(slot), source)

    def free(self, slot: Slot) -> Completion:
        """Give the slot's bytes back before returning."""
        try:
            host.own(_inside(slot)).vacate()
        except BackendError as error:
            return Completion.done(error)
        self._quota.give(slot.nbytes)
        return Completion.done()

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on."""
        self._quota.resize(capacity_bytes)

    def close(self) -> None:
        """Refuse everything from now on."""
        self._is_closed = True


def _inside(slot: Slot) -> Slot:
    return slot.inside if isinstance(slot, _Enclosed) else slot


def open_backend(*, capacity_bytes: int, options: Mapping[str, object]) -> MemoryBackend:
    """Open the reference backend.

    Raises:
        ConfigError: an unknown option or a bad value.
    """
    known = Options("memory", options, ("durable", "storage"))
    return MemoryBackend(
        capacity_bytes,
        is_durable=known.flag("durable", default=False),
        is_storage=known.flag("storage", default=False),
    )
