"""A mapping of keys to small tensors, many of which are one key of a store: a crate.

1. *Written once.*  Tensors that are put together become a crate, which the store moves, charges and flushes
   as one value.  A later put or drop makes a crate of its own; only a write lease changes bytes of a crate.
2. *Never out of step.*  What is where is in each crate's own bytes, and crates with higher numbers count
   before others (`tierstore.crates.index`).  So every moment between two turns of the store is whole, and so
   is whatever a flush leaves.
3. *Leases are on keys.*  Nobody is refused a key because of its neighbours (`tierstore.crates.sharing`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Final

import torch

from tierstore import forks
from tierstore.crates import layout
from tierstore.crates.index import CrateIndex, CrateUse
from tierstore.crates.layout import PackedTensor
from tierstore.crates.leases import CrateLease
from tierstore.crates.sharing import CrateSharing, lent_bytes, refuse_holders
from tierstore.crates.stock import CrateStock
from tierstore.engine.transfer import Transfer
from tierstore.errors import KeyExists, LeaseError, UsageError
from tierstore.leases import Lease, check_key
from tierstore.signals import in_one_piece
from tierstore.store import FASTEST, Store
from tierstore.tensors import TensorSpec, describe
from tierstore.units import format_bytes, parse_bytes

_Named = weakref.WeakValueDictionary[str, "Crates"]

_open: weakref.WeakKeyDictionary[Store, _Named] = weakref.WeakKeyDictionary()
_opening: Final = forks.free_in_child(threading.Lock())  # guards it


class Crates:
    """Small tensors under keys, in crates of a store.

    A key of a store costs some 20 µs each time that it moves, whatever its size; tensors of one crate cost
    that once.  Quotas, eviction and priorities are the store's: its keys ``NAME/NUMBER`` are the crates,
    which nobody else should touch.  Tensors that are put with one call are together, so put together what
    is used together.

    What a flush left is found when `Crates` of the same name are made over the reopened store; the
    directory of each crate is read then.  Every flush of the store counts, whoever calls it: each crate is
    in it or not.

    What is superseded or dropped is made free as crates are written anew, inside the calls that put and
    drop: it takes no more than what counts, but in crates that leases hold, and in a durable tier, until
    the next flush, for what the last one left.  That needs memory for a few crates meanwhile, beside the
    quotas.

    Safe from any thread.  A call that would change crates is refused in a callback of a transfer that ends
    while the same thread changes some.

    Args:
        store: where to.
        name: of these crates in the store.
        crate_bytes: how large a crate may be, as a size: the most that moves for one key.  A single tensor
            may be as large.  It may differ from one opening to the next.

    Raises:
        UsageError: crates of that name are open over this store, or something else is under such a key.
        ConfigError: the size is none.
        IntegrityError: a crate came back different; the message names it, and `Store.drop` forgets it.
        BackendError: a crate cannot be read.
    """

    def __init__(self, store: Store, name: str = "crates", *, crate_bytes: int | str = "2MiB") -> None:
        limit = parse_bytes(crate_bytes)
        if limit < layout.ALIGNMENT_BYTES:
            raise UsageError(f"crate_bytes={crate_bytes!r}: at least {layout.ALIGNMENT_BYTES} bytes.")
        self._store = store
        self._sharing = CrateSharing(check_key(name), CrateIndex(limit))
        self._stock = CrateStock(store, name, limit, self._sharing)
        store.keys()  # refuses the child of a fork
        with _opening:
            names = _open.setdefault(store, weakref.WeakValueDictionary())
            if name in names:
                raise UsageError(f"crates {name!r} of this store are open: use those, or close them.")
            names[name] = self
        try:
            self._stock.find()
        except BaseException:
            with _opening:
                del names[name]
            raise

    @property
    def store(self) -> Store:
        """The store that they are in."""
        return self._store

    @property
    def name(self) -> str:
        """What their keys in the store begin with, before a slash."""
        return self._stock.name

    @property
    def crate_bytes(self) -> int:
        """How large a crate may be."""
        return self._stock.crate_bytes

    # --- bytes in and out ---------------------------------------------------------------------

    def put(self, key: str, tensor: torch.Tensor, *, tier: str | None = None, replace: bool = False) -> None:
        """Copy ``tensor`` in under ``key``, in a crate of its own for now.  Blocks.  See `put_all`."""
        self.put_all({key: tensor}, tier=tier, replace=replace)

    @in_one_piece
    def put_all(
        self, tensors: Mapping[str, torch.Tensor], *, tier: str | None = None, replace: bool = False
    ) -> None:
        """Copy tensors in, together: all, or none.  Blocks.

        They fill as many crates as they need.  A flush that comes in between finds some of these.

        Args:
            tensors: by key, of any dtype, shape and device that a store takes.
            tier: where to; ``None``: as of `Store.put`.
            replace: replace what is under the keys; who has a read lease goes on with the former bytes.

        Raises:
            UsageError: not storable, not a key, no such tier, or larger than a crate: put that in the store.
            KeyExists: a key is there and ``replace`` is false.
            LeaseError: a key is leased for writing.
            CapacityError: no room for a crate, and none can be made.
            BackendError: a medium failed.  In every case the old bytes are unharmed.
        """
        contents = {check_key(key): self._packed(key, tensor) for key, tensor in tensors.items()}
        with self._stock.alone():
            with self._sharing.changed:
                for key in contents:
                    self._refuse_if_there(key, replace=replace)
            self._stock.add(contents, tier)
            self._stock.tidy()

    def _packed(self, key: str, tensor: torch.Tensor) -> PackedTensor:
        spec = describe(tensor)
        if spec.nbytes > self.crate_bytes:
            raise UsageError(
                f"{key!r} has {format_bytes(spec.nbytes)}, and a crate of {self.name!r} at most "
                f"{format_bytes(self.crate_bytes)}: put it in the store itself.",
                key=key,
                needed_bytes=spec.nbytes,
            )
        return spec, tensor.detach()

    def _refuse_if_there(self, key: str, *, replace: bool) -> None:
        crate = self._sharing.index.places.get(key)
        if crate is None:
            return
        if not replace:
            raise KeyExists(f"{key!r} is there already; replace=True replaces it.", key=key)
        refuse_holders("replace", key, crate.holders(key), are_writers=True)

    @in_one_piece
    def get(self, key: str, *, device: torch.device | str | None = None) -> torch.Tensor:
        """Return an independent copy that the caller owns.  Blocks.

        A crate that is only in a tier whose bytes cannot be used in place is brought to the one above if
        there is room for it: who asks for one of its tensors will probably ask for the next.

        Args:
            key: whose bytes.
            device: where to; ``None``: where the tensor was when it was put.

        Raises:
            KeyNotFound: nothing was put under the key, or it was dropped.
            LeaseError: it is leased for writing.
            BackendError: reading failed; ``IntegrityError`` if the bytes came back different.
        """
        use = CrateUse(threading.current_thread().name, is_lease=False)
        self._stock.require_here()
        with self._sharing.changed:
            (crate,) = self._sharing.settled((key,))
            record = crate.records[key]
            refuse_holders("get", key, crate.holders(key), are_writers=True)
            lent = lent_bytes(crate)
            if lent is not None:  # by who cannot give it back before the lock is free
                return layout.copied(lent, record, device)
            use.crates.append(crate)
            crate.readers.append(use)
        try:
            return self._stock.copy(crate, record, device)
        finally:
            self._sharing.end(use)

    # --- leases -------------------------------------------------------------------------------

    @in_one_piece
    def lease(self, *keys: str, tier: str = FASTEST, write: bool = False) -> CrateLease:
        """Bring the crates of ``keys`` to ``tier`` and keep them there while the lease is held.

        Blocks until the bytes are ready: never for another caller's lease.  The tensors are views of the
        crates, without a copy; but a key whose crate a lease on other keys holds, where one of both is for
        writing, is copied to another crate first.

        Args:
            keys: which; at least one.
            tier: where; ``"device"`` stands for the fastest tier if none has that name.
            write: whether the bytes will be changed; such a lease is exclusive.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: another lease on a key excludes this one; ``holders`` names it.
            CapacityError: leases hold what would have to go, or there is no room for a copy.
            BackendError: a copy failed; the replica it read from is unharmed.
            UsageError: no keys, no such tier, or a tier whose bytes cannot be used in place.
        """
        if not keys:
            raise UsageError("lease needs at least one key.")
        wanted = tuple(dict.fromkeys(map(check_key, keys)))
        use = CrateUse(threading.current_thread().name, is_write=write)
        self._stock.require_here()
        try:
            if write:
                self._begin_write(wanted, use, tier)
            else:
                while not self._sharing.begin_read(wanted, use):
                    with self._stock.alone():
                        self._stock.move_apart(wanted, is_write=False)
                use.lease = self._lease_crates(use, tier)
        except BaseException:
            self._sharing.end(use)
            raise
        return CrateLease(use, self._end)

    def _begin_write(self, keys: Collection[str], use: CrateUse, tier: str) -> None:
        with self._stock.alone():
            while not self._sharing.begin_write(keys, use):
                self._stock.move_apart(keys, is_write=True)
            try:
                self._sharing.own(use)
                use.lease = self._lease_crates(use, tier)
            finally:
                if use.lease is None:
                    self._sharing.end(use)
                self._sharing.settle(use.crates)

    def _lease_crates(self, use: CrateUse, tier: str) -> Lease:
        return self._store.lease(*(crate.name for crate in use.crates), tier=tier, write=use.is_write)

    def _end(self, use: CrateUse, written: bool) -> None:
        assert use.lease is not None  # it was lent
        if use.is_write:
            self._sharing.begin_ending(use)
        try:
            use.lease.release(written=written)
        finally:
            self._sharing.end(use)
            if use.is_write:
                self._sharing.settle(use.crates)

    # --- moving -------------------------------------------------------------------------------

    def fetch(self, *keys: str, tier: str = FASTEST) -> Transfer[None]:
        """Begin to bring the crates of ``keys`` to ``tier``, as `Store.fetch` does.

        Does not block, but while a crate is being written anew.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key of one of these crates is leased for writing elsewhere.
        """
        return self._begin(keys, lambda names: self._store.fetch(*names, tier=tier))

    def prefetch(self, *keys: str, tier: str = FASTEST) -> Transfer[None]:
        """Advise that ``keys`` will be needed in ``tier``, as `Store.prefetch` does; otherwise as `fetch`.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
        """
        return self._begin(keys, lambda names: self._store.prefetch(*names, tier=tier))

    def evict(self, *keys: str, to: str | None = None) -> Transfer[None]:
        """Begin to push the crates of ``keys`` down, as `Store.evict` does: their other keys go along.

        Does not block, but while a crate is being written anew.

        Raises:
            KeyNotFound: nothing was put under a key, or it was dropped.
            LeaseError: a key of one of these crates is leased above that tier.
        """
        return self._begin(keys, lambda names: self._store.evict(*names, to=to))

    def _begin(self, keys: Collection[str], act: Callable[[list[str]], Transfer[None]]) -> Transfer[None]:
        """Begin to move the crates of keys; none of them is written anew before that has ended."""
        self._stock.require_here()
        use = CrateUse(threading.current_thread().name, is_lease=False)
        self._sharing.begin_moving(keys, use)
        try:
            transfer = act([crate.name for crate in use.crates])
        except LeaseError as error:
            self._sharing.end(use)
            raise self._in_words(keys, error) from error
        except BaseException:
            self._sharing.end(use)
            raise
        transfer.add_done_callback(lambda: self._sharing.end(use))
        return transfer

    def _in_words(self, keys: Iterable[str], error: LeaseError) -> LeaseError:
        """Return the error of a crate as one of the key that is in it."""
        with self._sharing.changed:
            places = self._sharing.index.places
            key = next((key for key in keys if key in places and places[key].name == error.key), None)
        return LeaseError(f"{key!r} is in the crate {error.key!r}: {error}", key=key, holders=error.holders)

    @in_one_piece
    def flush(self) -> None:
        """Return when every key would survive a power loss, as of `Store.flush` with the keys of the crates.

        Raises:
            UsageError: no tier is durable.
            LeaseError: a crate that has changed since the last flush is leased for writing.
            CapacityError, BackendError: as of `Store.flush`.
        """
        with self._stock.alone():
            self._stock.flush()

    @in_one_piece
    def drop(self, *keys: str) -> None:
        """Forget ``keys``: all, or none.  Notes of that take some bytes until what is superseded has gone.

        Raises:
            KeyNotFound: a key is not there.
            LeaseError: a key is leased.
            CapacityError, BackendError: as of `put_all`; nothing was dropped.
        """
        with self._stock.alone():
            with self._sharing.changed:
                for key, crate in {key: self._sharing.place(check_key(key)) for key in keys}.items():
                    refuse_holders("drop", key, crate.holders(key))
            self._stock.add(dict.fromkeys(keys), None)
            self._stock.tidy()

    @in_one_piece
    def close(self) -> None:
        """Let go of the name: crates of it can be opened again.  Idempotent.  The store and its bytes stay.

        Where nobody has the crates any more, the name is free as soon as Python has collected them.

        Raises:
            LeaseError: a key is leased, or its crate is being moved.
        """
        if self._stock.is_here:
            with _opening:
                names = _open.get(self._store)
                if names is not None and names.get(self.name) is self:
                    self._sharing.close()
                    del names[self.name]

    # --- looking ------------------------------------------------------------------------------

    def where(self, key: str) -> tuple[str, ...]:
        """Return the names of the tiers that hold a ready replica of the key's crate, fastest first."""
        self._stock.require_here()
        use = CrateUse(threading.current_thread().name, is_lease=False)
        self._sharing.begin_moving((key,), use)
        try:
            return self._store.where(use.crates[0].name)
        finally:
            self._sharing.end(use)

    def spec(self, key: str) -> TensorSpec:
        """Return shape, dtype and size of what is under ``key``.  Raises ``KeyNotFound``."""
        with self._sharing.changed:
            spec = self._sharing.place(check_key(key)).records[key].spec
        assert spec is not None  # a place has a tensor
        return spec

    def keys(self) -> tuple[str, ...]:
        """Return the keys, in no order that is promised."""
        self._stock.require_here()
        with self._sharing.changed:
            return tuple(self._sharing.index.places)

    def __contains__(self, key: object) -> bool:
        self._stock.require_here()
        return key in self._sharing.index.places

    def __len__(self) -> int:
        self._stock.require_here()
        return len(self._sharing.index.places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())
