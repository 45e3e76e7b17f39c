"""The store: tensors under keys, in tiers, within quotas.

`Store` is the facade over the engine: it turns tensors into bytes and back, tier names into indices,
and blocking calls into waits for transfers.  Every call is safe from any thread.  A blocking call
waits for hardware, never for another caller's lease.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self, cast

import torch

from tierstore import trace_ranges
from tierstore.accounts import collect, moving, rooms
from tierstore.callers import opening
from tierstore.config import StoreConfig
from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Plan
from tierstore.engine.engine import Engine, close_all
from tierstore.engine.executor import Opening
from tierstore.engine.gc_pause import no_collections
from tierstore.engine.holds import Hold
from tierstore.engine.transfer import Transfer
from tierstore.errors import TierStoreError, UsageError
from tierstore.leases import Lease, check_key, check_names
from tierstore.metrics import Number, as_metrics
from tierstore.part_reader import PartReader
from tierstore.recorded import Recording
from tierstore.signals import in_one_piece, uninterrupted
from tierstore.spi import Backend, Medium, device_storage_listeners
from tierstore.stats import MovingCopy, RoomInTier, StoreStats
from tierstore.tensor_io import TensorIo
from tierstore.tensors import TensorSpec, bytes_of, describe, found_spec, is_whole, to_text
from tierstore.tier_backends import TierBackend, open_all, tiers_of

log = logging.getLogger("tierstore")

FASTEST = "device"
"""The tier name that stands for the fastest tier where no tier bears it."""


class Store:
    """A tiered key-value store for tensors.  A context manager.

    Args:
        config: tiers, fastest first, and the eviction policy.

    Raises:
        ConfigError: a backend does not exist or refuses its options.
        BackendError: a medium is not there or cannot be used.
    """

    def __init__(self, config: StoreConfig) -> None:
        self.config = config
        self._quotas = list(config.tiers)  # with the shares that resizes gave; each written as a whole
        self._lock = threading.Lock()  # guards the next
        self._stall_seconds = 0.0
        self._closing = threading.RLock()  # held by whoever closes
        backends: list[Backend] = []
        try:
            with opening("Store(...)"), no_collections():
                self._start(config, open_all(config.tiers, backends))
        except BaseException:
            # Nothing waits and nothing moves yet.
            try:
                close_all(backends)
            except Exception:  # what is raised below says why the store does not open
                log.exception("a tier's backend could not be closed")
            raise

    def _start(self, config: StoreConfig, opened: Sequence[TierBackend]) -> None:
        backends = [each.backend for each in opened]
        tiers = tiers_of(config.tiers, backends)
        self.tier_names = tuple(tier.name for tier in tiers)
        self.is_durable = any(tier.is_durable for tier in tiers)
        ledger = Ledger(tiers, POLICIES[config.eviction])
        self._can_adopt = backends[0].capabilities.adopts
        self._engine = Engine(ledger, backends, self.tier_names, cast("Callable[[object], str]", to_text))
        self._tensor_io = TensorIo(self._engine)
        self._backends = dict(zip(self.tier_names, opened, strict=True))
        for index, each in enumerate(opened):
            if tiers[index].is_durable:
                self._engine.recover(index, each.found, found_spec)

    @property
    def device(self) -> torch.device:
        """Where tensors leased in the fastest tier live."""
        return self._engine.backends[0].capabilities.device

    @property
    def usable_tiers(self) -> tuple[str, ...]:
        """The tiers whose bytes can be used in place, as a lease does, fastest first."""
        media = zip(self.tier_names, self._engine.media, strict=True)
        return tuple(name for name, medium in media if medium is not Medium.STORAGE)

    # --- bytes in and out ---------------------------------------------------------------------

    def put(
        self,
        key: str,
        tensor: torch.Tensor,
        *,
        tier: str | None = None,
        replace: bool = False,
        adopt: bool = False,
    ) -> None:
        """Copy ``tensor`` in under ``key``; the caller's tensor is not kept.  Blocks.

        Args:
            key: any text.
            tensor: any dense tensor of a dtype whose bytes can be copied, on any device.
            tier: where to; None: the fastest tier that can take it, evicting by policy, and never
                blocked by leases (then a lower one).
            replace: replace an existing key's bytes; readers see the old or the new.
            adopt: whether the tensor's memory may be the bytes, without a copy, where it goes to the fastest
                tier and that takes it as it lies (see `adopt`): nobody may write to it from then on.

        Raises:
            UsageError: not storable, not a key, no such tier.
            KeyExists: the key is there and ``replace`` is false.
            CapacityError: no room, and none can be made.
            BackendError: a medium failed.  In every case the old bytes are unharmed.
        """
        check_key(key)
        spec = describe(tensor)
        target = None if tier is None else self._index(tier)

        def fill(room: Opening) -> None:
            self._tensor_io.fill(room, tensor.detach(), spec)

        memory = self._as_it_lies(tensor, spec) if adopt and self.can_adopt else None
        number = self._engine.number()
        self._engine.put(m.PutRequested(number, key, spec.nbytes, target, replace, spec), fill, memory)

    @property
    def can_adopt(self) -> bool:
        """Whether the fastest tier takes tensors as they lie; see `adopt`."""
        return self._can_adopt

    def adopt(self, key: str, tensor: torch.Tensor) -> None:
        """Let the memory of ``tensor`` be the bytes of ``key`` in the fastest tier, without a copy.  Blocks.

        From now on the memory is charged to that tier, and nobody may write to it.  When the tier gives
        its bytes back, the store only lets go of it: the memory is free when nobody else refers to it.

        Args:
            key: any text that nothing is under.
            tensor: on `device`, dense, from the first byte of its storage to the last.

        Raises:
            UsageError: not such a tensor, not a key, or a tier that adopts nothing (`can_adopt`).
            KeyExists: the key is there.
            CapacityError: no room in the tier, and none can be made.
            BackendError: a medium failed.  In every case the tensor is unharmed.
        """
        check_key(key)
        spec = describe(tensor)
        if not self.can_adopt:
            raise UsageError(
                f"the tier {self.tier_names[0]!r} cannot take memory that is not its own; put the tensor "
                "instead.",
                key=key,
                tier=self.tier_names[0],
            )
        memory = self._as_it_lies(tensor, spec)
        if memory is None:
            raise UsageError(
                f"cannot adopt {tensor.dtype} {list(tensor.shape)} with strides {list(tensor.stride())} on "
                f"{str(tensor.device)!r}: it has to fill its storage, on {str(self.device)!r}. "
                "Put it instead.",
                key=key,
            )
        number = self._engine.number()
        event = m.PutRequested(number, key, spec.nbytes, 0, replace=False, spec=spec)
        self._engine.adopt(event, memory)

    def _as_it_lies(self, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor | None:
        """Return the bytes of a tensor that fills its storage on `device`; ``None``: it does not."""
        if tensor.device != self.device or not is_whole(tensor, spec):
            return None
        with torch.no_grad():
            return bytes_of(tensor.detach())

    @in_one_piece
    def get(self, key: str, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Return an independent copy that the caller owns.  Blocks; moves no replica.

        Args:
            key: whose bytes.
            device: where to; None: where the tensor was when it was put.

        Raises:
            KeyNotFound: nothing was put under the key, or it was dropped.
            LeaseError: it is leased for writing.
            BackendError: reading failed; ``IntegrityError`` if the bytes came back different.
        """
        number = self._engine.number()
        hold = Hold(self._engine, m.ReadDone(number))
        try:
            (granted,) = hold.obtain(m.ReadRequested(number, check_key(key)), number, (key,))
            copy = self._tensor_io.copy_out(granted, device)
            hold.end()
        except BaseException:
            hold.end()
            raise
        return copy

    @in_one_piece
    def lease(self, *keys: str, tier: str = FASTEST, write: bool = False) -> Lease:
        """Bring ``keys`` to ``tier`` and keep them there while the lease is held.

        Blocks until the bytes are ready, or at most as long as hardware takes: never for another
        caller's lease.  The tensors are the replicas themselves, without a copy.

        Args:
            keys: which; at least one.
            tier: where; ``"device"`` stands for the fastest tier if none has that name.
            write: whether the bytes will be changed.  Such a lease is exclusive, and when it is
                released the other replicas are stale and drop.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: another lease excludes this one; ``holders`` names it.
            CapacityError: leases hold what would have to go; ``holders`` names them.
            BackendError: the copy failed; the replica it read from is unharmed.
            UsageError: no keys, no such tier, or a tier whose bytes cannot be used in place.
        """
        if not keys:
            raise UsageError("lease needs at least one key.")
        index = self._index(tier)
        if self._engine.media[index] is Medium.STORAGE:
            raise UsageError(
                f"bytes in {tier!r} cannot be used in place; lease in one of {list(self.usable_tiers)}.",
                tier=tier,
            )
        number = self._engine.number()
        access = m.Access.WRITE if write else m.Access.READ
        event = m.LeaseRequested(
            number, tuple(map(check_key, keys)), index, access, threading.current_thread().name
        )
        released = m.LeaseReleased(number, written=False)
        hold = Hold(self._engine, released)
        try:
            with self._range("fetch", keys) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
                granted = hold.obtain(event, number, keys, self._count_stall)
            return self._lend(granted, released, hold)
        except BaseException:
            hold.end()
            raise

    def _lend(self, granted: Sequence[m.Granted], released: m.LeaseReleased, hold: Hold) -> Lease:
        tensors, loan = self._tensor_io.lend(granted)

        def end(written: bool) -> None:
            released.written = written
            try:
                loan.end()
            finally:
                hold.end_whole()

        places = {each.key: each.place for each in granted}
        return Lease(tensors, places, loan.use, end, functools.partial(self._split, released.request))

    def _split(self, lease: int, names: Mapping[m.ReplicaId, str]) -> bool:
        number = self._engine.number()
        event = m.SplitRequested(number, lease, names)
        return not names or bool(self._engine.request(event, number, tuple(names.values())).result())

    def reader(self) -> PartReader:
        """Return what reads parts of values in the last tier, such as pages of 4 KiB.  It has no key yet.

        A reader that is open when the store is closed is of no use any more, as a lease is not.
        """
        return self._reader(lambda act: act())

    def _reader(self, patiently: Callable[[Callable[[], None]], None]) -> PartReader:
        """Return a reader that asks for its keys by a call of ``patiently``."""
        self._engine.require_here()
        return PartReader(self._engine, len(self.tier_names) - 1, self._tensor_io.count, patiently)

    @uninterrupted
    def _count_stall(self, seconds: float) -> None:
        with self._lock:
            self._stall_seconds += seconds

    # --- moving -------------------------------------------------------------------------------

    def fetch(self, *keys: str, tier: str = FASTEST) -> Transfer[None]:
        """Begin to bring ``keys`` to ``tier``.  Does not block.

        The transfer ends when all are ready there.  It fails with ``CapacityError`` or
        ``BackendError``; what a failed copy read from is unharmed.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key is leased for writing elsewhere.
        """
        return self._bring(keys, tier, m.Urgency.DEMAND)

    def prefetch(self, *keys: str, tier: str = FASTEST) -> Transfer[None]:
        """Advise that ``keys`` will be needed in ``tier``.  Does not block; may be declined.

        A prefetch takes what is free, or what the plan needs later; it never fails for lack of room.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
        """
        return self._bring(keys, tier, m.Urgency.PREFETCH)

    def _bring(self, keys: tuple[str, ...], tier: str, urgency: m.Urgency) -> Transfer[None]:
        index = self._index(tier)
        number = self._engine.number()
        event = m.FetchRequested(number, tuple(map(check_key, keys)), index, urgency)
        verb = "fetch" if urgency is m.Urgency.DEMAND else "prefetch"
        with self._range(verb, keys) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
            return self._engine.request(event, number, keys, self.tier_names[index])  # type: ignore[return-value]

    def evict(self, *keys: str, to: str | None = None) -> Transfer[None]:
        """Begin to push ``keys`` down to the tier ``to`` (None: the next one).  Does not block.

        A key that is already at or below it is left alone.  The transfer ends when the bytes above
        are free.  It fails with ``CapacityError`` or ``BackendError``, and with ``LeaseError`` if
        somebody wants a key up again meanwhile: whoever asks last is heard.  No bytes are lost.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key is leased above that tier.
        """
        index = None if to is None else self._index(to)
        number = self._engine.number()
        event = m.EvictRequested(number, tuple(map(check_key, keys)), index)
        with self._range("evict", keys) if trace_ranges.are_on() else trace_ranges.NO_RANGE:
            return self._engine.request(event, number, keys, to)  # type: ignore[return-value]

    def _range(self, verb: str, keys: Sequence[str]) -> contextlib.AbstractContextManager[None]:
        """Return a range for who profiles."""
        nbytes = self._engine.look(lambda ledger: _nbytes(ledger, keys))
        return trace_ranges.named_range(verb, keys, nbytes)

    def flush(self, *keys: str, keep: str = "", release: str = "") -> None:
        """Return when every key would survive a power loss.  Blocks.

        A flush is one moment between its call and its return: opening the durable tier again finds exactly
        the keys that were there then, with the bytes that they had, whatever was put, written, renamed or
        dropped since.  Whoever leases one of them for writing meanwhile waits until its bytes are there.
        Until the next flush, bytes that only the last one counts on stay in the durable tier, and are
        charged to it.

        Args:
            keys: only these are found as they are now; others as the last flush of them left them, names
                and bytes, unless neither they nor their bytes are there any more.  What a key was renamed
                from, or gave its name to, is flushed with it.  None: every key.
            keep: what the flush before has left under these keys is found, too, each under this and its key,
                until a flush releases it: two moments survive then.  What has not changed is found once,
                under its key, and what an earlier flush has kept so stays.  Such names are no keys before the
                durable tier is opened again.  "": the moment before is forgotten.
            release: what was kept under names that begin so is not found any more; "": nothing is released.

        Raises:
            UsageError: no tier is durable, or something would be found under two names.
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key that has changed since the last flush is leased for writing.
            CapacityError, BackendError: a key could not be brought there, or the medium failed.  What
                the flush before made durable still is, and no bytes are lost.
        """
        number = self._engine.number()
        named = tuple(map(check_key, keys)) or None
        self._engine.request(m.FlushRequested(number, named, keep, release), number, keys).result()

    def drop(self, *keys: str) -> None:
        """Forget ``keys`` in every tier.  Their bytes are freed when no copy touches them any more.

        Raises:
            KeyNotFound: a key is not there; nothing was dropped.
            LeaseError: a key is leased; nothing was dropped.
        """
        self._engine.turn(m.DropRequested(tuple(map(check_key, keys))))

    def rename(self, names: Mapping[str, str], *, replace: bool = False) -> None:
        """Let what is under some keys be found under others: all of them, or none.  Moves no bytes.

        Args:
            names: the new key for each key.
            replace: drop what is under the new keys.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            KeyExists: a new key is there, and ``replace`` is false.
            LeaseError: what would be replaced is leased.
            UsageError: a new key is given twice, or is itself to be renamed.
        """
        self._engine.turn(m.RenameRequested(check_names(names), replace))

    def resize(
        self, tier: str, capacity: int | str, *, high: float | None = None, low: float | None = None
    ) -> None:
        """Give ``tier`` a new quota at once; evict down to it.  Blocks until it fits.

        Args:
            tier: its name.
            capacity: the new quota, as a size.
            high: the share of it above which eviction begins from now on; ``None``: the one before, which a
                former call gave, or the configuration.
            low: the share down to which it goes on; ``None``: the one before, if that is not above ``high``,
                else ``high``.

        Raises:
            CapacityError: leases hold more, or the tiers below cannot take the rest: no change.
            ConfigError: it is no size, or no share: no change.
        """
        index = self._index(tier)
        former = self._quotas[index]
        new = replace(former, capacity=capacity, high=former.high if high is None else high, low=low)
        if low is None and former.low is not None and former.low <= new.high:
            new = replace(new, low=former.low)
        number = self._engine.number()
        self._engine.resize(
            m.ResizeRequested(number, index, new.capacity_bytes, new.high_bytes, new.low_bytes)
        )
        self._quotas[index] = new

    def follow(self, plan: Plan | None) -> None:
        """Take ``plan`` as advice about what is used when; None: know nothing.

        It feeds next-use eviction, what prefetches may push out and room in good time, never correctness.
        """
        self._engine.turn(m.PlanFollowed(plan))

    def advance(self, position: int) -> None:
        """Say that the access at ``position`` of the plan happens now: what is asked for next goes by it."""
        self._engine.note(m.Advanced(position))

    # --- looking ------------------------------------------------------------------------------

    def where(self, key: str) -> tuple[str, ...]:
        """Return the names of the tiers that hold a READY replica, fastest first."""
        tiers = self._engine.look(lambda ledger: ledger.where(check_key(key)))
        return tuple(self.tier_names[tier] for tier in tiers)

    def spec(self, key: str) -> TensorSpec:
        """Return shape, dtype and size of what is under ``key``; of damaged ones see `TensorSpec.unread`."""
        spec = self._engine.look(lambda ledger: ledger.spec(check_key(key)))
        assert isinstance(spec, TensorSpec)
        return spec

    def story(self, key: str) -> list[str]:
        """Return the last events of ``key``, oldest first, as text."""
        return self._engine.look(lambda ledger: ledger.story(check_key(key)))

    def check(self) -> None:
        """Verify every rule of the books.  For tests: it walks over all keys.

        Raises:
            InvariantError: one is broken, which is a bug in tierstore.
        """
        self._engine.look(lambda ledger: ledger.check())

    def __contains__(self, key: object) -> bool:
        return self._engine.look(lambda ledger: key in ledger)

    def __len__(self) -> int:
        return self._engine.look(len)

    def __iter__(self) -> Iterator[str]:
        return iter(self._engine.look(list))

    def keys(self) -> tuple[str, ...]:
        """Return the keys, in the order of their first put."""
        return tuple(self._engine.look(list))

    @in_one_piece
    def stats(self) -> StoreStats:
        """Return what there is and what happened, as one frozen object."""
        self._engine.require_here()
        with self._lock:
            stall_seconds = self._stall_seconds
        return collect(self._engine, self._backends, self._tensor_io.got, stall_seconds)

    def metrics(self) -> dict[str, Number]:
        """Return the numbers of `stats` under stable names.  In any thread.

        Such as ``{'tierstore_tier_hits_total{tier="host"}': 14, ...}``.

        `tierstore.metrics_catalogue.CATALOGUE` has the names, and what they say.
        """
        return as_metrics(self.stats())

    def moving(self, most: int = 32) -> tuple[MovingCopy, ...]:
        """Return copies that are under way now, the oldest first, and at most so many."""
        return moving(self._engine, self.tier_names, most)

    def recorded(self) -> contextlib.AbstractContextManager[Recording]:
        """Record inside a context what happens: copies, waits, leases and what is charged, with their times.

        The context yields plain data that grows until it ends, some hundred bytes for each request and copy;
        several may be open at once.  Outside of one nothing is recorded, and that costs nothing.

        Raises:
            StoreClosed: the store is closed; `StoreForked` in the child of a fork.
        """
        return self._engine.recorded()

    def leased_bytes(self, tier: str) -> int:
        """Return the bytes of a tier that leases hold: as `stats` says, without all the rest.

        Raises:
            UsageError: there is no such tier.
        """
        index = self._index(tier)
        return self._engine.look(lambda ledger: ledger.books.tier_states[index].leased_bytes)

    def rooms(self) -> Mapping[str, RoomInTier]:
        """Return what tiers have room for, the fastest first: as `stats` says, without all the rest."""
        return rooms(self._engine, self.tier_names)

    @staticmethod
    def watch_device(listener: Callable[[torch.UntypedStorage], None]) -> Callable[[], None]:
        """Tell ``listener`` of every storage that an emulated device allocates or adopts, of whatever store.

        An accelerator's allocator can be asked instead.  Returns what ends this.
        """
        device_storage_listeners.append(listener)
        return functools.partial(_leave, listener)

    # --- the end ------------------------------------------------------------------------------

    def close(self, *, flush: bool = True) -> None:
        """Fail what waits, wait for what moves, give every medium back.  Idempotent.

        A call while another one closes waits for it; if a call is interrupted, the next one goes on with it.
        Not from a callback of a transfer: what is to be waited for may be waiting for that.  In the child of
        a fork it does nothing: the store is the parent's.

        Args:
            flush: whether a store with a durable tier is flushed first.

        Raises:
            LeaseError, CapacityError, BackendError: as from `flush`.  The store is closed all the same,
                and what survives is what the flush before left.
        """
        if not self._engine.is_here:
            return
        with self._closing:
            try:
                if flush and self.is_durable and not self._engine.is_closed:
                    self.flush()
            finally:
                self._engine.close()
                self._tensor_io.close()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it; an error of the last flush is only logged if another one is under way."""
        try:
            self.close()
        except TierStoreError:
            if error is None:
                raise
            log.exception("the store could not be flushed when it was closed")

    def _index(self, tier: str) -> int:
        if tier in self.tier_names:
            return self.tier_names.index(tier)
        if tier == FASTEST:
            return 0
        raise UsageError(f"no tier {tier!r}; the tiers are {', '.join(self.tier_names)}.", tier=str(tier))


def _nbytes(ledger: Ledger, keys: Sequence[str]) -> int:
    return sum(cast("TensorSpec", ledger.spec(key)).nbytes for key in keys if key in ledger)


def _leave(listener: Callable[[torch.UntypedStorage], None]) -> None:
    with contextlib.suppress(ValueError):  # it has left
        device_storage_listeners.remove(listener)
