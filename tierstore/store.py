"""The store: tensors under keys, in tiers, within quotas.

`Store` is the facade over the engine: it turns tensors into bytes and back, tier names into indices,
and blocking calls into waits for transfers.  Every call is safe from any thread.  A blocking call
waits for hardware, never for another caller's lease.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from types import MappingProxyType, TracebackType
from typing import Self, cast

import torch

from tierstore.config import StoreConfig, TierConfig
from tierstore.core import messages as m
from tierstore.core.eviction import POLICIES
from tierstore.core.ledger import Ledger
from tierstore.core.model import Plan, Tier
from tierstore.core.quota import Shelf
from tierstore.engine.engine import Engine, Opening
from tierstore.engine.registry import open_backend
from tierstore.engine.transfer import Transfer
from tierstore.errors import KeyNotFound, UsageError
from tierstore.outputs import OutputPool
from tierstore.spi import AddressableSlot, Backend, Completion, Medium
from tierstore.stats import StoreStats, TierStats, Traffic, io_of
from tierstore.tensors import TensorSpec, bytes_of, describe, view_bytes

FASTEST = "device"
"""The tier name that stands for the fastest tier where no tier bears it."""


class Lease:
    """Tensors that stay ready in one tier while the lease is held.

    A context manager; it is held from the call of `Store.lease` until the block ends or `release`.
    """

    def __init__(
        self,
        store: Store,
        number: int,
        tensors: Mapping[str, torch.Tensor],
        places: Mapping[str, m.Place],
        slots: Sequence[AddressableSlot],
    ) -> None:
        self._store = store
        self._number = number
        self._tensors = tensors
        self._places = places
        self._slots = slots
        self._is_held = True

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the tensor of ``key``, without a copy.  Do not use it after the release."""
        if not self._is_held:
            raise UsageError("the lease was released; the bytes it showed may be gone.", key=key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyNotFound(f"{key!r} is not in this lease: {tuple(self._tensors)}", key=key) from None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of a lease on one key."""
        if self._is_held and len(self._tensors) != 1:
            raise UsageError(f"lease.tensor needs a lease on one key, not on {len(self._tensors)}.")
        return self[next(iter(self._tensors), "")]

    def release(self, *, written: bool = True) -> None:
        """End the lease.  A second call does nothing.

        Args:
            written: for a write lease, whether the bytes were changed; if not, the other replicas
                stay valid.
        """
        if not self._is_held:
            return
        self._is_held = False
        self._tensors = {}
        self._store._end_lease(self._number, self._slots, written)  # noqa: SLF001 - one unit

    def split(self, names: Mapping[str, str]) -> bool:
        """Make the leased replicas keys of their own, with the same bytes.  For write leases; moves no bytes.

        The lease goes on with the new keys; the former ones keep their other replicas and are free to
        be used.  So new bytes can be written beside the old ones, until `Store.rename` lets them take
        their place, all at once, or `Store.drop` forgets them.

        Args:
            names: the new key for each key of the lease that is to be split.

        Returns:
            False, and nothing was changed, if a key has no other ready replica.

        Raises:
            KeyNotFound: a key is not in the lease.
            UsageError: the lease is for reading, or was released.
            KeyExists: a new key is there.
        """
        for key in names:
            self[key]
        places = {self._places[key]: name for key, name in _check_names(names).items()}
        return self._store._split(self._number, places)  # noqa: SLF001 - one unit

    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        self.release()


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
        backends = _open_all(config.tiers)
        tiers = [_tier(tier, backend) for tier, backend in zip(config.tiers, backends, strict=True)]
        self.tier_names = tuple(tier.name for tier in tiers)
        self._engine = Engine(Ledger(tiers, POLICIES[config.eviction]), backends, self.tier_names)
        self._outputs = OutputPool()
        self._lock = threading.Lock()  # guards the next two
        self._gets: dict[str, Traffic] = {}
        self._stall_seconds = 0.0

    @property
    def device(self) -> torch.device:
        """Where tensors leased in the fastest tier live."""
        return self._engine.backends[0].capabilities.device

    # --- bytes in and out ---------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor, *, tier: str | None = None, replace: bool = False) -> None:
        """Copy ``tensor`` in under ``key``; the caller's tensor is not kept.  Blocks.

        Args:
            key: any text.
            tensor: any dense tensor of a dtype whose bytes can be copied, on any device.
            tier: where to; None: the fastest tier that can take it, evicting by policy, and never
                blocked by leases (then a lower one).
            replace: replace an existing key's bytes; readers see the old or the new.

        Raises:
            UsageError: not storable, not a key, no such tier.
            KeyExists: the key is there and ``replace`` is false.
            CapacityError: no room, and none can be made.
            BackendError: a medium failed.  In every case the old bytes are unharmed.
        """
        _check_key(key)
        spec = describe(tensor)
        target = None if tier is None else self._index(tier)

        def fill(room: Opening) -> None:
            self._fill(room, tensor.detach(), spec)

        number = self._engine.number()
        self._engine.put(m.PutRequested(number, key, spec.nbytes, target, replace, spec), fill)

    def _fill(self, room: Opening, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Bring a tensor's bytes into the slot that was reserved for them."""
        if spec.nbytes == 0:
            return
        slot = self._engine.addressable(room.slot, room.tier)
        if slot is not None:
            slot.acquire()
            with torch.no_grad():
                view_bytes(slot.memory, spec).copy_(tensor)
            slot.release()
            return
        is_plain = tensor.device.type == "cpu" and tensor.stride() == spec.stride
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            tensor = copy.copy_(tensor)
        _wait(self._engine.backends[room.tier].write(room.slot, bytes_of(tensor)))

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
        request = self._engine.request(m.ReadRequested(number, _check_key(key)), number, (key,))
        (granted,) = self._engine.wait(request, lambda _: self._engine.turn(m.ReadDone(number)))
        try:
            return self._copy_out(granted, device)
        finally:
            self._engine.turn(m.ReadDone(number))

    def _copy_out(self, granted: m.Granted, device: torch.device | str | None) -> torch.Tensor:
        spec = _spec(granted)
        target = spec.device if device is None else torch.device(device)
        if target.type != "cpu":
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=target)
        else:
            out = view_bytes(self._outputs.take(spec.nbytes), spec)
        if spec.nbytes:
            self._read_into(out, granted, spec)
        self._count_get(self.tier_names[granted.place.tier], spec.nbytes)
        return out

    def _read_into(self, out: torch.Tensor, granted: m.Granted, spec: TensorSpec) -> None:
        source = self._engine.slot(granted)
        slot = self._engine.addressable(source, granted.place.tier)
        if slot is not None:
            slot.acquire()
            with torch.no_grad():
                out.copy_(view_bytes(slot.memory, spec))
            slot.release()
            return
        is_host = out.device.type == "cpu"
        host = bytes_of(out) if is_host else self._outputs.take(spec.nbytes)
        _wait(self._engine.backends[granted.place.tier].read(source, host))
        if not is_host:
            out.copy_(view_bytes(host, spec))

    def _count_get(self, tier: str, nbytes: int) -> None:
        with self._lock:
            former = self._gets.get(tier, Traffic(0, 0))
            self._gets[tier] = Traffic(former.copies + 1, former.nbytes + nbytes)

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
            usable = [
                n for n, x in zip(self.tier_names, self._engine.media, strict=True) if x is not Medium.STORAGE
            ]
            raise UsageError(
                f"bytes in {tier!r} cannot be used in place; lease in one of {usable}.", tier=tier
            )
        number = self._engine.number()
        access = m.Access.WRITE if write else m.Access.READ
        event = m.LeaseRequested(
            number, tuple(map(_check_key, keys)), index, access, threading.current_thread().name
        )
        granted = self._await(
            self._engine.request(event, number, keys, self.tier_names[index]),
            lambda _: self._engine.turn(m.LeaseReleased(number, written=False)),
        )
        return self._lend(number, granted)

    def _lend(self, number: int, granted: Sequence[m.Granted]) -> Lease:
        tensors: dict[str, torch.Tensor] = {}
        slots: list[AddressableSlot] = []
        for replica in granted:
            slot = self._engine.addressable(self._engine.slot(replica), replica.place.tier)
            assert slot is not None  # a lease is refused where bytes cannot be used in place
            slot.acquire()
            slots.append(slot)
            tensors[replica.key] = view_bytes(slot.memory, _spec(replica))
        return Lease(self, number, tensors, {each.key: each.place for each in granted}, slots)

    def _end_lease(self, number: int, slots: Sequence[AddressableSlot], written: bool) -> None:
        for slot in slots:
            slot.release()
        self._engine.turn(m.LeaseReleased(number, written))

    def _split(self, lease: int, names: Mapping[m.Place, str]) -> bool:
        number = self._engine.number()
        event = m.SplitRequested(number, lease, names)
        return not names or bool(self._engine.request(event, number, tuple(names.values())).result())

    def _await(
        self, request: Transfer[Sequence[m.Granted]], undo: Callable[[Sequence[m.Granted]], None]
    ) -> Sequence[m.Granted]:
        """Wait for a grant; count the time."""
        begin = time.perf_counter()
        is_done = request.done()
        try:
            return request.result() if is_done else self._engine.wait(request, undo)
        finally:
            del request  # a failed one keeps its error, whose traceback refers to this frame
            if not is_done:
                with self._lock:
                    self._stall_seconds += time.perf_counter() - begin

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
        event = m.FetchRequested(number, tuple(map(_check_key, keys)), index, urgency)
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
        event = m.EvictRequested(number, tuple(map(_check_key, keys)), index)
        return self._engine.request(event, number, keys, to)  # type: ignore[return-value]

    def flush(self) -> None:
        """Return when every key is on a durable tier and would survive a power loss.

        Raises:
            UsageError: no tier is durable.
            CapacityError, BackendError: a key could not be brought there; none is lost.
        """
        number = self._engine.number()
        self._engine.request(m.FlushRequested(number), number).result()

    def drop(self, *keys: str) -> None:
        """Forget ``keys`` in every tier.  Their bytes are freed when no copy touches them any more.

        Raises:
            KeyNotFound: a key is not there; nothing was dropped.
            LeaseError: a key is leased; nothing was dropped.
        """
        self._engine.turn(m.DropRequested(tuple(map(_check_key, keys))))

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
        self._engine.turn(m.RenameRequested(_check_names(names), replace))

    def resize(self, tier: str, capacity: int | str) -> None:
        """Give ``tier`` a new quota at once; evict down to it.  Blocks until it fits.

        Raises:
            CapacityError: leases hold more, or the tiers below cannot take the rest: no change.
        """
        index = self._index(tier)
        new = replace(self.config.tiers[index], capacity=capacity)
        number = self._engine.number()
        self._engine.resize(
            m.ResizeRequested(number, index, new.capacity_bytes, new.high_bytes, new.low_bytes)
        )

    def follow(self, plan: Plan | None) -> None:
        """Take ``plan`` as advice about what is used when; None: know nothing.

        It feeds next-use eviction and what prefetches may push out, never correctness.
        """
        self._engine.turn(m.PlanFollowed(plan))

    def advance(self, position: int) -> None:
        """Say that the access at ``position`` of the plan happens now."""
        self._engine.turn(m.Advanced(position))

    # --- looking ------------------------------------------------------------------------------

    def where(self, key: str) -> tuple[str, ...]:
        """Return the names of the tiers that hold a READY replica, fastest first."""
        tiers = self._engine.look(lambda ledger: ledger.where(_check_key(key)))
        return tuple(self.tier_names[tier] for tier in tiers)

    def spec(self, key: str) -> TensorSpec:
        """Return shape, dtype and size of what is stored under ``key``."""
        spec = self._engine.look(lambda ledger: ledger.spec(_check_key(key)))
        assert isinstance(spec, TensorSpec)
        return spec

    def story(self, key: str) -> list[str]:
        """Return the last events of ``key``, oldest first, as text."""
        return self._engine.look(lambda ledger: ledger.story(_check_key(key)))

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

    def stats(self) -> StoreStats:
        """Return what there is and what happened, as one frozen object."""
        tiers = self._engine.look(lambda ledger: [_tier_stats(shelf) for shelf in ledger.books.shelves])
        lanes = self._engine.look(
            lambda ledger: {
                d: Traffic(x.copies, x.moved_bytes) for d, x in ledger.moving.traffic.lanes.items()
            }
        )
        names = (*self.tier_names, "caller")  # index -1 is the caller
        traffic = {(names[source], names[target]): moved for (source, target), moved in lanes.items()}
        with self._lock:
            traffic.update({(tier, "caller"): moved for tier, moved in self._gets.items()})
            stall_seconds = self._stall_seconds
        by_name = {
            name: replace(tier, reserved_bytes=_reserved_bytes(backend, tier), io=io_of(backend))
            for name, tier, backend in zip(self.tier_names, tiers, self._engine.backends, strict=True)
        }
        return StoreStats(MappingProxyType(by_name), MappingProxyType(traffic), stall_seconds)

    # --- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """Fail what waits, wait for what moves, give every medium back.  Idempotent."""
        self._engine.close()
        self._outputs.clear()

    def __enter__(self) -> Self:
        """Return the store itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()

    def _index(self, tier: str) -> int:
        if tier in self.tier_names:
            return self.tier_names.index(tier)
        if tier == FASTEST:
            return 0
        raise UsageError(f"no tier {tier!r}; the tiers are {', '.join(self.tier_names)}.", tier=str(tier))


def _open_all(tiers: Sequence[TierConfig]) -> list[Backend]:
    """Open every tier's backend; if one fails, close those that were opened here."""
    backends: list[Backend] = []
    try:
        for tier in tiers:
            if isinstance(tier.backend, str):
                backends.append(
                    open_backend(tier.backend, capacity_bytes=tier.capacity_bytes, options=tier.options)
                )
            else:
                backends.append(cast("Backend", tier.backend))
    except BaseException:
        for backend in backends:
            backend.close()
        raise
    return backends


def _tier(config: TierConfig, backend: Backend) -> Tier:
    capabilities = backend.capabilities
    return Tier(
        name=config.name,
        capacity_bytes=config.capacity_bytes,
        high_bytes=config.high_bytes,
        low_bytes=config.low_bytes,
        alignment_bytes=capabilities.alignment_bytes,
        is_durable=capabilities.is_durable,
        is_host=capabilities.medium is Medium.HOST,
        is_storage=capabilities.medium is Medium.STORAGE,
    )


def _tier_stats(shelf: Shelf) -> TierStats:
    return TierStats(
        capacity_bytes=shelf.tier.capacity_bytes,
        charged_bytes=shelf.charged_bytes,
        ready_bytes=shelf.ready_bytes,
        in_flight_bytes=shelf.filling_bytes,
        peak_charged_bytes=shelf.peak_charged_bytes,
        reserved_bytes=shelf.charged_bytes,
        **asdict(shelf.counters),
    )


def _reserved_bytes(backend: Backend, tier: TierStats) -> int:
    """Ask a backend that keeps more than its slots, such as a pool, what it holds."""
    return int(getattr(backend, "reserved_bytes", tier.charged_bytes))


def _spec(granted: m.Granted) -> TensorSpec:
    assert isinstance(granted.spec, TensorSpec)
    return granted.spec


def _check_names(names: Mapping[str, str]) -> dict[str, str]:
    return {_check_key(key): _check_key(name) for key, name in names.items()}


def _check_key(key: object) -> str:
    if not isinstance(key, str):
        raise UsageError(f"a key is text, not {type(key).__name__}: {key!r}.")
    return key


def _wait(completion: Completion) -> None:
    """Block until a backend's operation has ended.

    Raises:
        BackendError: it failed.
    """
    ended = threading.Event()
    completion.add_done_callback(lambda _: ended.set())
    ended.wait()
    if completion.error is not None:
        raise completion.error
