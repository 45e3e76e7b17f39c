"""The crates of one name as keys of the store: made, found, read, written anew and given back.

Rule 1: crates are made, joined and given back by one thread at a time, the *writer* (`CrateStock.alone`),
also while the store moves bytes for it.  Rule 2: a crate is in the store before the index says so, and the
index forgets it after the store has.  Rule 3: in a durable store a crate that is given back becomes an
empty *stub*, until the crates are flushed.  A flush of some keys, whoever wants it, also speaks of keys
that are gone: what has taken the crate's place might not be durable yet.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Collection, Iterable, Iterator

import torch

from tierstore import forks
from tierstore.crates import layout
from tierstore.crates.finding import found_crates
from tierstore.crates.index import FAN, Crate
from tierstore.crates.layout import Contents, CrateRecord, PackedTensor
from tierstore.crates.sharing import CrateSharing, lent_bytes
from tierstore.errors import CapacityError, TierStoreError, UsageError
from tierstore.store import Store

_log = logging.getLogger("tierstore")


class CrateStock:
    """The crates of one name in a store.

    Args:
        store: where they are.
        name: what their keys begin with, before a slash.
        crate_bytes: of a full one.
        sharing: who uses them.
    """

    def __init__(self, store: Store, name: str, crate_bytes: int, sharing: CrateSharing) -> None:
        self.store = store
        self.name = name
        self.crate_bytes = crate_bytes
        self._sharing = sharing
        self._process = forks.here()
        self._writing = threading.Lock()  # held by the writer; guards all below
        self._writer: int | None = None  # the thread
        self._stubs: dict[str, None] = {}
        self._next = 0
        self._rests_until = 0  # until crates have this number, nothing is written anew: that has failed

    def find(self) -> None:
        """Take in what is in the store."""
        for crate in found_crates(self.store, self.name):
            self._next = crate.number + 1
            if crate.records:
                self._sharing.index.add(crate)
            else:
                self._stubs[crate.name] = None

    @property
    def is_here(self) -> bool:
        """Whether this is the process that they were opened in."""
        return self._process is forks.here()

    def require_here(self) -> None:
        """Raise ``StoreForked`` in the child of a fork."""
        forks.require_here(self._process, f"crates {self.name!r}")

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the writer.

        Raises:
            UsageError: this thread is it: in a callback, which would wait for itself.
        """
        self.require_here()
        if self._writer == threading.get_ident():
            raise UsageError(
                f"crates {self.name!r} are being written by this thread: not from a callback of a transfer."
            )
        with self._writing:
            self._writer = threading.get_ident()
            try:
                self._sharing.require_open()
                yield
            finally:
                self._writer = None

    # --- reading ------------------------------------------------------------------------------

    def copy(self, crate: Crate, record: CrateRecord, device: torch.device | str | None) -> torch.Tensor:
        """Return a copy of what is in a crate that nobody writes or gives back meanwhile.  Blocks.

        A crate that is only where bytes cannot be used in place is brought to the tier above, if it has room.
        """
        usable, where = self.store.usable_tiers, self.store.where(crate.name)
        tier = next((each for each in where if each in usable), None)
        if tier is not None or usable:
            past = () if tier else (CapacityError,)  # no room: it is read past that tier
            with contextlib.suppress(*past), self.store.lease(crate.name, tier=tier or usable[-1]) as lease:
                return layout.copied(lease.tensor, record, device)
        return layout.copied(self.store.get(crate.name, device="cpu"), record, device)

    def _copy_from(self, memory: torch.Tensor | None, crate: Crate, record: CrateRecord) -> torch.Tensor:
        return self.copy(crate, record, "cpu") if memory is None else layout.copied(memory, record, "cpu")

    def move_apart(self, keys: Collection[str], *, is_write: bool) -> None:
        """Copy keys to other crates where leases on others are in the way.  Blocks; for the writer."""
        moving = self._sharing.move_apart(keys, is_write=is_write)
        contents: dict[str, PackedTensor | None] = {}
        try:
            for crate, ours in moving.items():
                memory = lent_bytes(crate)
                for key in ours:
                    record = crate.records[key]
                    assert record.spec is not None  # a key has a tensor
                    copy = self._copy_from(memory, crate, record)
                    contents[key] = record.spec, copy
            if contents:
                self.add(contents, None)
        finally:
            self._sharing.settle(moving)

    # --- writing ------------------------------------------------------------------------------

    def add(self, contents: Contents, tier: str | None) -> None:
        """Put crates with these contents, and let them count: all, or none.  For the writer."""
        made: list[Crate] = []
        try:
            for part in layout.divide(contents, self.crate_bytes):
                memory, records = layout.pack(part)
                crate = Crate(self._next, f"{self.name}/{self._next}", records)
                self._next += 1
                made.append(crate)
                self.store.put(crate.name, memory, tier=tier)
        except BaseException:
            for crate in made:
                with contextlib.suppress(TierStoreError):
                    self._empty(crate)
            raise
        with self._sharing.changed:
            for crate in made:
                self._sharing.index.add(crate)

    def _empty(self, crate: Crate) -> None:
        """Give a crate's bytes back; nothing in it counts.  For the writer.

        In a durable store its name stays until the next flush of the crates: whatever keys others flush, a
        crate that is gone would be gone with that, and what has taken its place might not be there yet.
        """
        if self.store.is_durable and crate.name in self.store:
            self.store.put(crate.name, torch.empty(0, dtype=torch.uint8), replace=True)
            self._stubs[crate.name] = None
        else:
            self.store.drop(crate.name)

    def tidy(self) -> None:
        """Write crates anew where that is due.  Blocks; for the writer.

        What fails here is tried again later: nothing is lost, and what the caller wanted is done.
        """
        if self._next < self._rests_until:
            return
        try:
            while self._has_rewritten():
                pass
        except TierStoreError as error:
            self._rests_until = self._next + FAN
            _log.warning("crates %r keep what could be given back, for now: %s", self.name, error)

    def _has_rewritten(self) -> bool:
        """Write some crates anew; return whether there were any to be."""
        with self._sharing.changed:
            crates = self._sharing.index.next_to_rewrite()
            records = {crate: list(self._sharing.index.live(crate)) for crate in crates}
            for crate in crates:
                crate.is_moving = True
        try:
            contents: dict[str, PackedTensor | None] = {}
            for crate, live in records.items():
                memory = (
                    self.store.get(crate.name, device="cpu") if any(each.spec for _, each in live) else None
                )
                for key, (spec, begin) in live:
                    if spec is None or memory is None:
                        contents[key] = None
                    else:
                        contents[key] = spec, layout.view(memory, CrateRecord(spec, begin))
            if contents:
                self.add(contents, self._lowest(crates))
            for crate in crates:
                self._empty(crate)
                with self._sharing.changed:
                    self._sharing.index.remove(crate)
        finally:
            self._sharing.settle(crates)
        return bool(crates)

    def _lowest(self, crates: Iterable[Crate]) -> str:
        """Return the lowest tier that one of the crates is used from: what they become is in no one's way."""
        tiers = self.store.tier_names
        used = [tier for crate in crates for tier in self.store.where(crate.name)[:1]]
        return max(used, key=tiers.index, default=tiers[-1])

    def flush(self) -> None:
        """Make every crate durable, and forget the stubs.  Blocks; for the writer."""
        if not self.store.is_durable:
            raise UsageError(f"crates {self.name!r} cannot be flushed: no tier of their store is durable.")
        with self._sharing.changed:
            names = [crate.name for crate in self._sharing.index.crates.values()]
        if names or self._stubs:
            self.store.flush(*names, *self._stubs)
        self.store.drop(*(name for name in self._stubs if name in self.store))
        self._stubs.clear()
