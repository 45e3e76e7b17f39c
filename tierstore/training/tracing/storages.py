"""Memory that is nowhere: how many bytes of each sort a model on the meta device would have now.

1. A storage counts from the operator that first returned it until it dies, by the object, as
   `tierstore.testing.memory` counts those that have bytes.
2. What it is may change: an operator's result becomes an activation when autograd saves it.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable

import torch


class Sort(enum.Enum):
    """What memory is to the program."""

    STANDING = enum.auto()  # parameters that do not travel, buffers, inputs
    PARAMETERS = enum.auto()
    STATE = enum.auto()
    GRADIENT = enum.auto()
    ACTIVATION = enum.auto()
    OWN = enum.auto()  # whatever else operators made


class CountedStorage(weakref.ref[torch.UntypedStorage]):
    """One storage.

    Attributes:
        number: its ``id``.
        nbytes: of it.
        sort: what it is.
        key: of the datum that it is, or is a part of.
    """

    __slots__ = ("key", "nbytes", "number", "sort")

    number: int
    nbytes: int
    sort: Sort
    key: str | None


class MetaStorages:
    """What is live.  Of one thread.

    Args:
        ended: called with the key of an activation whose memory has died.

    Attributes:
        total_bytes: of all.
        peak_bytes: the most that they were since `begin_peak`.
        own_bytes: of those that are `Sort.OWN`.
    """

    def __init__(self, ended: Callable[[str], None]) -> None:
        self._ended = ended
        self._known: dict[int, CountedStorage] = {}
        self.total_bytes = 0
        self.peak_bytes = 0
        self.own_bytes = 0

    def find(self, tensor: torch.Tensor) -> CountedStorage | None:
        """Return the storage of a tensor, if it counts."""
        if tensor.layout is not torch.strided:
            return None
        return self._known.get(id(tensor.untyped_storage()))

    def add(
        self, tensor: torch.Tensor, sort: Sort = Sort.OWN, key: str | None = None
    ) -> CountedStorage | None:
        """Count a tensor's memory, if that is nowhere; say what it is, if it counts already.

        Args:
            tensor: whose.
            sort: what it is.
            key: of its datum.
        """
        if tensor.layout is not torch.strided or tensor.device.type != "meta":
            return None
        storage = tensor.untyped_storage()
        known = self._known.get(id(storage))
        if known is None:
            known = CountedStorage(storage, self._forget)
            known.number, known.nbytes, known.sort, known.key = id(storage), storage.nbytes(), sort, key
            self._known[known.number] = known
            self._count(known, known.nbytes)
            self.peak_bytes = max(self.peak_bytes, self.total_bytes)
        else:
            self.call(known, sort, key)
        return known

    def call(self, known: CountedStorage, sort: Sort, key: str | None) -> None:
        """Say what a storage is from now on."""
        self.own_bytes += ((sort is Sort.OWN) - (known.sort is Sort.OWN)) * known.nbytes
        known.sort, known.key = sort, key

    def take_in(self, made: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """Count what an operator made, and look again at the size of what it was given."""
        for tensor in given:
            known = self.find(tensor)
            if known is not None:
                nbytes = tensor.untyped_storage().nbytes()
                if nbytes != known.nbytes:
                    self._count(known, nbytes - known.nbytes)
                    known.nbytes = nbytes
        for tensor in made:
            if self.find(tensor) is None:
                self.add(tensor)
        self.peak_bytes = max(self.peak_bytes, self.total_bytes)

    def begin_peak(self) -> None:
        """Let `peak_bytes` be what is live now."""
        self.peak_bytes = self.total_bytes

    def note_peak(self, nbytes: int) -> None:
        """As many bytes as that would have been live since."""
        self.peak_bytes = max(self.peak_bytes, nbytes)

    def _forget(self, known: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(known, CountedStorage)
        self._count(known, -known.nbytes)
        del self._known[known.number]
        if known.sort is Sort.ACTIVATION and known.key is not None:
            self._ended(known.key)

    def _count(self, known: CountedStorage, added_bytes: int) -> None:
        self.total_bytes += added_bytes
        if known.sort is Sort.OWN:
            self.own_bytes += added_bytes
