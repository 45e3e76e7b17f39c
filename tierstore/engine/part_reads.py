"""Reads of parts under way: begun past the books, and waited for when the engine ends.

Whoever reads holds the slots READY by a lease, so the books need not know.  But media are closed only when
nothing moves, and so reads are counted here.

Rule 1: once reads are refused none begins, and those that have begun are waited for.
Rule 2: a medium that cannot read parts is read whole, `WHOLE_BYTES` at a time, or one value if it is larger.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, cast

import numpy as np
import torch

from tierstore import forks
from tierstore.errors import StoreClosed
from tierstore.signals import uninterrupted
from tierstore.spi import Backend, Buffer, Completion, FullBackend, PartialError, Slot
from tierstore.units import MIB

WHOLE_BYTES: Final = 64 * MIB
"""How much of whole values is in memory at a time where a medium cannot read parts."""

Then = Callable[[BaseException | None], None]


class Parts(NamedTuple):
    """Parts of slots of one tier, and where their bytes are to go, one after the other."""

    slots: Sequence[Slot]
    begins: Sequence[int]
    nbytes: int
    into: Buffer


class PartReads:
    """Begins reads of parts, and counts those under way.  Safe from any thread.

    Args:
        backends: one for each tier, fastest first.
    """

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._is_refusing = False  # set once, and looked at under the lock
        self._lock = threading.Lock()  # guards the next two; never held while anything is called
        self._under_way = 0
        self._ended: threading.Event | None = None  # set with the last one, where somebody waits for that

    def can_read_parts(self, tier: int) -> bool:
        """Whether a tier's medium reads parts without the rest."""
        return self._backends[tier].capabilities.has_parts

    def begin(self, tier: int, parts: Parts, then: Then) -> None:
        """Read parts; tell ``then`` what it came to, once: in the backend's thread, or before this returns.

        Where nothing interrupts.

        Raises:
            StoreClosed: the engine ends; ``then`` is not called.
        """
        with self._lock:
            if self._is_refusing:
                raise StoreClosed("the store is closed.")
            self._under_way += 1
        completion = _begun(functools.partial(self._read, tier, parts))
        completion.add_done_callback(functools.partial(self._end, then))

    def refuse(self) -> None:
        """Begin none any more."""
        self._is_refusing = True

    def wait(self) -> None:
        """Return when none is under way; none is to begin any more.  Blocks."""
        ended = self._end_of_all()
        if ended is not None:
            forks.wait(ended, None)

    @uninterrupted
    def _end_of_all(self) -> threading.Event | None:
        """Return what is set with the end of the last; ``None``: none is under way."""
        with self._lock:
            if not self._under_way:
                return None
            self._ended = self._ended or threading.Event()
            return self._ended

    def _read(self, tier: int, parts: Parts) -> Completion:
        backend = cast("FullBackend", self._backends[tier])
        if backend.capabilities.has_parts:
            return backend.read_parts(*parts)
        whole = _WholeReads(backend, parts)
        whole.go_on()
        return whole.outer

    def _end(self, then: Then, error: BaseException | None) -> None:
        try:
            then(error)
        finally:
            with self._lock:
                self._under_way -= 1
                if not self._under_way and self._ended is not None:
                    self._ended.set()


class _Wanted(NamedTuple):
    """A slot, and the positions of its parts."""

    slot: Slot
    positions: list[int]


class _WholeReads:
    """Parts that are cut out of whole values.  Safe from any thread.

    Attributes:
        outer: ends with the last of them, as `tierstore.spi.PartBackend` says.
    """

    def __init__(self, backend: Backend, parts: Parts) -> None:
        self._backend = backend
        self._parts = parts
        self.outer = Completion()
        wanted: dict[int, _Wanted] = {}
        for position, slot in enumerate(parts.slots):
            wanted.setdefault(id(slot), _Wanted(slot, [])).positions.append(position)
        self._lock = threading.Lock()  # guards all below
        self._waiting = deque(wanted.values())
        self._under_way = 0
        self._held_bytes = 0
        self._errors: dict[int, BaseException] = {}
        self._is_beginning = False  # in one thread at a time, so that ends do not nest

    def go_on(self) -> None:
        """Begin what may begin; end it all with the last."""
        with self._lock:
            if self._is_beginning:  # that thread looks again before it stops
                return
            self._is_beginning = True
        while (wanted := self._next()) is not None:
            self._begin(wanted)

    def _next(self) -> _Wanted | None:
        with self._lock:
            if self._waiting:
                nbytes = self._waiting[0].slot.nbytes
                if not self._under_way or self._held_bytes + nbytes <= WHOLE_BYTES:
                    self._under_way += 1
                    self._held_bytes += nbytes
                    return self._waiting.popleft()
            self._is_beginning = False
            is_last = not self._waiting and not self._under_way
        if is_last:
            self.outer.complete(PartialError(self._errors) if self._errors else None)
        return None

    def _begin(self, wanted: _Wanted) -> None:
        # Not by torch: whoever meters a device by its operations would take this for device memory.
        whole = torch.from_numpy(np.empty(wanted.slot.nbytes, dtype=np.uint8))
        completion = _begun(functools.partial(self._backend.read, wanted.slot, whole))
        completion.add_done_callback(functools.partial(self._settle, wanted, whole))

    def _settle(self, wanted: _Wanted, whole: Buffer, error: BaseException | None) -> None:
        if error is None:
            self._cut(wanted.positions, whole)
        with self._lock:
            if error is not None:
                self._errors.update(dict.fromkeys(wanted.positions, error))
            self._under_way -= 1
            self._held_bytes -= wanted.slot.nbytes
        self.go_on()

    def _cut(self, positions: Sequence[int], whole: Buffer) -> None:
        nbytes = self._parts.nbytes
        target, source = self._parts.into.numpy(), whole.numpy()
        for position in positions:
            begin = self._parts.begins[position]
            target[position * nbytes : (position + 1) * nbytes] = source[begin : begin + nbytes]


def _begun(begin: Callable[[], Completion]) -> Completion:
    """Begin an operation; one that cannot even begin is one that has failed."""
    try:
        return begin()
    except BaseException as error:  # noqa: BLE001 - a foreign backend may raise anything
        return Completion.done(error.with_traceback(None))
