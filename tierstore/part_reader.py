"""Parts of values, read from where they lie: keys that are held once, and any number of reads in between.

Rule 1: what is held is a read lease on the key in the last tier.  So its bytes are not freed, moved or
changed, and what would need that is refused, naming the reader.
Rule 2: a read takes no lock of the store and tells the books nothing.
Rule 3: a lease ends when its key was removed and no read of it is under way any more.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from tierstore import forks
from tierstore.core import messages as m
from tierstore.engine.engine import Engine
from tierstore.engine.holds import Hold
from tierstore.engine.part_reads import Parts
from tierstore.engine.transfer import Transfer
from tierstore.errors import BackendError, IntegrityError, KeyNotFound, StoreClosed, UsageError
from tierstore.leases import check_key
from tierstore.signals import in_one_piece, let_wait, uninterrupted
from tierstore.spi import Medium, PartialError, Slot
from tierstore.tensors import bytes_of

_log = logging.getLogger("tierstore")

Begins = Sequence[int] | np.ndarray[Any, Any] | torch.Tensor
"""Where parts of one value begin, in bytes."""


@dataclass(slots=True, eq=False)
class _HeldValue:
    """A value whose bytes stay where they are.  The reader's lock guards the last two."""

    key: str
    slot: Slot
    hold: Hold
    reads: int = 0  # under way
    is_removed: bool = False


class PartReader:
    """Reads parts of values in the last tier of a store, such as pages of 4 KiB, without the rest of them.

    A context manager.  `add` keys, `read` as often as you like, `remove` them again, or close the reader::

        with store.reader() as reader:
            reader.add("pages/0", "pages/1")
            reader.read([("pages/0", 8192), ("pages/1", 0)], into).result()

    While a reader has a key it holds a read lease on it (see `Store.lease`): the key cannot be dropped,
    written or replaced by a rename, and its bytes count as leased ones of the tier.  A
    ``put(..., replace=True)`` is allowed, and a rename of the key itself: the reader goes on with the bytes
    that it has, under the name that it was given.  Safe from any thread.

    Parts are not compared with checksums (see `tierstore.spi.PartBackend`).

    Args:
        engine: of the store.
        tier: index of the last tier.
        count: told of what was read: of which tier, how many parts and how many bytes.
        patiently: does what asks for keys, and may try it again where leases are in the way.

    Attributes:
        tier: the name of the tier that it reads from.
        alignment_bytes: begins and lengths of parts are multiples of this.
    """

    def __init__(
        self,
        engine: Engine,
        tier: int,
        count: Callable[[int, int, int], None],
        patiently: Callable[[Callable[[], None]], None] = lambda act: act(),
    ) -> None:
        self._patiently = patiently
        self._engine = engine
        self._index = tier
        self._count = count
        self._process = forks.here()
        self._is_whole = not engine.part_reads.can_read_parts(tier)
        self._lock = threading.Lock()  # guards all below; never held while anything else is called
        self._held: dict[str, _HeldValue] = {}
        self._is_closed = False
        self._has_warned = False
        self.tier = engine.names[tier]
        self.alignment_bytes = 1 if self._is_whole else engine.backends[tier].capabilities.alignment_bytes

    # --- what is held -------------------------------------------------------------------------

    @in_one_piece
    def add(self, *keys: str) -> None:
        """Hold keys, all of them or none.  Blocks until their bytes are in the tier; brings what is not.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key is leased for writing; ``holders`` names who.
            UsageError: the reader has a key already: `remove` it to get other bytes under its name.
            CapacityError: the tier has no room for a key that is not there.
            BackendError: a copy failed; the replica it read from is unharmed.
            StoreClosed: the reader or the store was closed; `StoreForked` in the child of a fork.
        """
        forks.require_here(self._process, "the reader")
        wanted = dict.fromkeys(map(check_key, keys))
        holds: dict[str, Hold] = {}
        self._enter({})  # refused before anything is asked for, if it is closed
        self._refuse_those_it_has(wanted)
        try:
            for key in wanted:
                self._patiently(functools.partial(self._ask, key, holds))
            self._enter({key: _HeldValue(key, self._slot(hold), hold) for key, hold in holds.items()})
        except BaseException:
            self._give_up(holds)
            raise

    @uninterrupted
    def remove(self, *keys: str) -> None:
        """Hold keys no longer, all of them or none.  Does not block: reads of them under way end first.

        Raises:
            KeyNotFound: the reader does not have a key; nothing was changed.
            StoreForked: this is the child of a fork.
        """
        forks.require_here(self._process, "the reader")
        with self._lock:
            ended = self._withdraw([self._of(key) for key in dict.fromkeys(keys)])
        self._end(value.hold for value in ended)

    @uninterrupted
    def close(self) -> None:
        """Remove every key, and read no more.  Does not block; reads under way end.  Idempotent.

        In the child of a fork it does nothing: the reader is the parent's.
        """
        if self._process is not forks.here():
            return
        with self._lock:
            self._is_closed = True
            ended = self._withdraw(list(self._held.values()))
        self._end(value.hold for value in ended)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys that it has, in the order in which they were added."""
        return tuple(self._held)

    @let_wait
    def __enter__(self) -> Self:
        """Return the reader itself."""
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _ask(self, key: str, holds: dict[str, Hold]) -> None:
        number = self._engine.number()
        holder = f"{threading.current_thread().name} (a reader)"
        holds[key] = Hold(self._engine, m.LeaseReleased(number, written=False))
        holds[key].ask(m.LeaseRequested(number, (key,), self._index, m.Access.READ, holder), number, (key,))

    def _slot(self, hold: Hold) -> Slot:
        """Wait until a key's bytes are there; return where."""
        (granted,) = hold.granted()
        slot = self._engine.slot(granted)
        if self._engine.media[self._index] is Medium.HOST:
            in_memory = self._engine.addressable(slot, self._index)
            assert in_memory is not None  # host memory can be used in place
            in_memory.acquire()  # a device may still be writing them
            in_memory.release()
        return slot

    @uninterrupted
    def _enter(self, values: Mapping[str, _HeldValue]) -> None:
        with self._lock:
            self._refuse_if_closed()
            self._refuse_those_it_has(values)
            self._held.update(values)

    @uninterrupted
    def _give_up(self, holds: Mapping[str, Hold]) -> None:
        """Give back what an interrupted or refused call was granted, or will be, entered or not."""
        with self._lock:
            entered = {each.key: each for each in self._held.values() if holds.get(each.key) is each.hold}
            ended = self._withdraw(entered.values())
        self._end(value.hold for value in ended)
        self._end(hold for key, hold in holds.items() if key not in entered)

    def _withdraw(self, values: Iterable[_HeldValue]) -> list[_HeldValue]:
        """Take values out; return those of which no read is under way.  Under the lock."""
        ended: list[_HeldValue] = []
        for value in values:
            del self._held[value.key]
            value.is_removed = True
            if not value.reads:
                ended.append(value)
        return ended

    @staticmethod
    def _end(holds: Iterable[Hold]) -> None:
        for hold in holds:
            with contextlib.suppress(StoreClosed):  # something has stopped the store, and says so elsewhere
                hold.end_whole()

    def _refuse_those_it_has(self, keys: Iterable[str]) -> None:
        for key in keys:
            if key in self._held:
                raise UsageError(
                    f"this reader has {key!r} already. Remove it first, to read what is under that name now.",
                    key=key,
                    tier=self.tier,
                )

    def _of(self, key: str) -> _HeldValue:
        try:
            return self._held[key]
        except KeyError:
            raise KeyNotFound(
                f"{key!r} is not held by this reader, which has {len(self._held)} keys: add it first.",
                key=key,
                tier=self.tier,
            ) from None

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise StoreClosed("the reader is closed.")

    # --- reading ------------------------------------------------------------------------------

    @uninterrupted
    def read(
        self, parts: Sequence[tuple[str, int]] | Mapping[str, Begins], into: torch.Tensor
    ) -> Transfer[None]:
        """Begin to fill ``into`` with parts.  Does not block, unless the medium works in the calling thread.

        The transfer ends when all are there, and until then ``into`` is the reader's.  It fails with
        ``BackendError`` if any part could not be read; what ``into`` has then is not to be used.

        Args:
            parts: pairs of a key that the reader has and where a part of it begins, in bytes of the value as
                it is stored; or, for each key, an array of such begins.
            into: a contiguous tensor in host memory, of any dtype, with a row for each part, in their order.
                Each part has as many bytes as a row.

        Raises:
            KeyNotFound: the reader does not have a key.
            UsageError: a part is not aligned or not within its value, or ``into`` does not fit.
            StoreClosed: the reader or the store was closed; `StoreForked` in the child of a fork.
        """
        self._engine.require_open()
        keys, begins = _as_lists(parts)
        buffer = self._rows(into, len(begins))
        transfer: Transfer[None] = Transfer((), self.tier)
        if not begins:
            transfer.resolve()
            return transfer
        nbytes = buffer.numel() // len(begins)
        self._warn_if_whole(nbytes)
        with self._lock:
            self._refuse_if_closed()
            held = {key: self._of(key) for key in dict.fromkeys(keys)}
            values = [held[key] for key in keys]
            self._check(values, begins, nbytes)
            users = set(values)
            for value in users:
                value.reads += 1
        request = Parts([value.slot for value in values], begins, nbytes, buffer)
        ended = functools.partial(self._note_end, transfer, keys, request, users)
        try:
            self._engine.part_reads.begin(self._index, request, ended)
        except StoreClosed:
            self._let_go(users)
            raise
        return transfer

    def _rows(self, into: torch.Tensor, count: int) -> torch.Tensor:
        """Return the bytes of what is to be filled with so many parts."""
        is_flat = into.is_cpu and into.layout is torch.strided and into.is_contiguous()
        if not is_flat or into.dim() == 0 or into.shape[0] != count or into.is_conj() or into.is_neg():
            raise UsageError(
                f"{count} parts need a contiguous tensor in host memory with {count} rows, not "
                f"{list(into.shape)} {into.dtype} on {str(into.device)!r}.",
                tier=self.tier,
            )
        return bytes_of(into.detach())

    def _check(self, values: Sequence[_HeldValue], begins: Sequence[int], nbytes: int) -> None:
        unit = self.alignment_bytes
        if not nbytes or nbytes % unit:
            raise UsageError(
                f"parts of {nbytes} B: in {self.tier!r} they have a multiple of {unit} B, and at least that.",
                tier=self.tier,
            )
        for value, begin in zip(values, begins, strict=True):
            if begin < 0 or begin % unit or begin + nbytes > value.slot.nbytes:
                raise UsageError(
                    f"no part of {value.key!r} begins at {begin} and has {nbytes} B: it has to begin at a "
                    f"multiple of {unit} and to end within the {value.slot.nbytes} B of the value.",
                    key=value.key,
                    tier=self.tier,
                )

    def _note_end(
        self,
        transfer: Transfer[None],
        keys: Sequence[str],
        request: Parts,
        users: Iterable[_HeldValue],
        error: BaseException | None,
    ) -> None:
        """Count a read that has ended, let go of what was removed meanwhile, and tell whoever waits."""
        if error is None:
            self._count(self._index, len(keys), len(keys) * request.nbytes)
        else:
            error = self._explain(error, keys, request)
        self._let_go(users)
        transfer.resolve(None, error)

    def _let_go(self, users: Iterable[_HeldValue]) -> None:
        with self._lock:
            for value in users:
                value.reads -= 1
            ended = [value.hold for value in users if value.is_removed and not value.reads]
        self._end(ended)

    def _explain(self, error: BaseException, keys: Sequence[str], request: Parts) -> BackendError:
        """Name the tier, and the key of the first part that failed, in a backend's error."""
        failed: Mapping[int, BaseException] = {0: error}
        count = len(keys)
        if isinstance(error, PartialError):
            failed, count = error.errors, len(error.errors)
        first = min(failed)
        cause = failed[first]
        kind = IntegrityError if isinstance(cause, IntegrityError) else BackendError
        explained = kind(
            f"reading {count} of {len(keys)} parts of {request.nbytes} B in {self.tier!r} failed, the first "
            f"of them of {keys[first]!r} at {request.begins[first]}: {cause}",
            transient=isinstance(cause, BackendError) and cause.transient,
            key=keys[first],
            tier=self.tier,
            needed_bytes=request.nbytes,
        )
        explained.__cause__ = cause
        return explained

    def _warn_if_whole(self, nbytes: int) -> None:
        if not self._is_whole or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "tier %r cannot read parts of values, as its medium has none or a codec packs them: for each "
            "part of %d B its whole value is read. Keep what is read in parts in files without a codec.",
            self.tier,
            nbytes,
        )


def _as_lists(parts: Sequence[tuple[str, int]] | Mapping[str, Begins]) -> tuple[list[str], list[int]]:
    """Return the key of each part, and where it begins."""
    if not isinstance(parts, Mapping):
        return [key for key, _ in parts], [operator.index(begin) for _, begin in parts]
    keys: list[str] = []
    begins: list[int] = []
    for key, given in parts.items():
        own = given if isinstance(given, Sequence) else given.tolist()
        keys += [key] * len(own)
        begins += map(operator.index, own)
    return keys, begins
