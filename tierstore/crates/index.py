"""Which crate has the tensor of each key, which notes are needed still, and which crates to write anew.

1. *The last one counts.*  Crates have ascending numbers.  What is under a key is the record of it in the
   crate with the highest number; every other record of it is superseded.
2. *Notes.*  A record without a tensor says that the key was dropped.  It is needed while a crate below has
   another record of the key: as long as there is one, it would be found again.
3. *Superseded bytes.*  A crate of which less than half counts is hollow, and is written anew without the
   rest.  So what is superseded takes no more than what counts, but where leases hold crates.
4. *Few crates.*  Crates below half of the full size stand on shelves by their size, each up to `FAN` times as
   large as on the one before.  Where `FAN` are on a shelf, some become one.  So there are few small ones,
   and a tensor is copied about once for each shelf.

Knows no store, no bytes and no locks: who asks holds one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

from tierstore.crates.layout import CrateRecord, cost
from tierstore.leases import Lease

FAN: Final = 16
"""How many small crates of a shelf become one."""

_HOLLOW: Final = -1
_FULL: Final = 3
"""The shelf of what is not joined with others."""


@dataclass(eq=False, slots=True)
class CrateUse:
    """Crates that somebody reads or writes.

    Attributes:
        holder: who, for messages.
        crates: each once.
        records: of a lease: by key, the crate of each and where it is there.
        is_lease: whether it excludes who wants to write the same records; a copy that is made does not.
        is_write: whether the bytes may change.
        lease: on the crates; ``None``: not yet.
    """

    holder: str
    crates: list[Crate] = field(default_factory=list)
    records: dict[str, tuple[Crate, CrateRecord]] = field(default_factory=dict)
    is_lease: bool = True
    is_write: bool = False
    lease: Lease | None = None


@dataclass(eq=False, slots=True)
class Crate:
    """One key of the store, and the records in it.

    Attributes:
        number: higher ones were written later.
        name: its key in the store.
        records: by key.
        all_bytes: what its records cost.
        live_bytes: of that, what counts.
        readers: who reads.
        writer: who may write; nobody else uses the crate then.
        is_moving: records of it are being copied elsewhere, or its writer is ending: wait.
        shelf: where it stands.
    """

    number: int
    name: str
    records: dict[str, CrateRecord]
    all_bytes: int = 0
    live_bytes: int = 0
    readers: list[CrateUse] = field(default_factory=list)
    writer: CrateUse | None = None
    is_moving: bool = False
    shelf: int = _FULL

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it."""
        return not (self.readers or self.writer or self.is_moving)

    @property
    def is_leased(self) -> bool:
        """Whether somebody has a lease on a record of it."""
        return self.writer is not None or any(use.is_lease for use in self.readers)

    def holders(self, key: str) -> list[CrateUse]:
        """Return the leases on a record of it."""
        uses = [*self.readers, *([] if self.writer is None else [self.writer])]
        return [use for use in uses if use.is_lease and use.records.get(key, (None,))[0] is self]


class CrateIndex:
    """What is where.

    Args:
        crate_bytes: of a full crate.

    Attributes:
        places: by key, the crate that has its tensor.
        notes: by key, the crate with a note that is needed.
        crates: by number.
        version: changes when anything does.
    """

    def __init__(self, crate_bytes: int) -> None:
        self._crate_bytes = crate_bytes
        self.places: dict[str, Crate] = {}
        self.notes: dict[str, Crate] = {}
        self.crates: dict[int, Crate] = {}
        self.version = 0
        self._superseded: dict[str, int] = {}  # records of a key that do not count
        self._shelves: dict[int, dict[int, Crate]] = {shelf: {} for shelf in range(_HOLLOW, _FULL)}

    def add(self, crate: Crate) -> None:
        """Let the records of a crate count: it has the highest number."""
        self.version += 1
        self.crates[crate.number] = crate
        crate.all_bytes = crate.live_bytes = sum(
            cost(key, each.nbytes) for key, each in crate.records.items()
        )
        for key, record in list(crate.records.items()):
            former = self.places.get(key) or self.notes.pop(key, None)
            if former is not None:
                self._superseded[key] = self._superseded.get(key, 0) + 1
                self._lose(former, key)
            if record.spec is not None:
                self.places[key] = crate
                continue
            self.places.pop(key, None)
            if key in self._superseded:
                self.notes[key] = crate
            else:
                crate.live_bytes -= cost(key, 0)
                del crate.records[key]  # it counts nowhere, and never will
        self._shelve(crate)

    def remove(self, crate: Crate) -> None:
        """Forget a crate of which nothing counts: it is not in the store any more."""
        self.version += 1
        del self.crates[crate.number]
        self._shelves[crate.shelf].pop(crate.number)
        for key in crate.records:
            left = self._superseded[key] - 1
            if left:
                self._superseded[key] = left
                continue
            del self._superseded[key]
            noted = self.notes.pop(key, None)
            if noted is not None:
                self._lose(noted, key)
                del noted.records[key]

    def live(self, crate: Crate) -> Iterator[tuple[str, CrateRecord]]:
        """Yield the records of a crate that count, and the notes that are needed."""
        for key, record in crate.records.items():
            if (self.places if record.spec is not None else self.notes).get(key) is crate:
                yield key, record

    def next_to_rewrite(self) -> list[Crate]:
        """Return crates that are to become fewer or smaller; none: all is well, or in use."""
        for shelf, crates in self._shelves.items():
            idle = [crate for crate in crates.values() if crate.is_idle]
            dead = [crate for crate in idle if not crate.live_bytes]
            if dead:
                return dead  # which takes no room
            if len(idle) >= (1 if shelf == _HOLLOW else FAN):
                return self._some(idle)
        return []

    def _some(self, crates: list[Crate]) -> list[Crate]:
        """Return as many of them as are copied at a time: what is read is in memory meanwhile."""
        chosen: list[Crate] = []
        nbytes = 0
        for crate in crates[:FAN]:
            if chosen and nbytes + crate.all_bytes > 2 * self._crate_bytes:
                break
            chosen.append(crate)
            nbytes += crate.all_bytes
        return chosen

    def _lose(self, crate: Crate, key: str) -> None:
        crate.live_bytes -= cost(key, crate.records[key].nbytes)
        self._shelve(crate)

    def _shelve(self, crate: Crate) -> None:
        if crate.shelf != _FULL:
            self._shelves[crate.shelf].pop(crate.number, None)
        crate.shelf = self._shelf_of(crate)
        if crate.shelf != _FULL:
            self._shelves[crate.shelf][crate.number] = crate

    def _shelf_of(self, crate: Crate) -> int:
        if 2 * crate.live_bytes < crate.all_bytes or not crate.live_bytes:
            return _HOLLOW
        limit = self._crate_bytes // 2
        return next(
            (shelf for shelf in range(_FULL) if crate.all_bytes * FAN ** (_FULL - 1 - shelf) < limit), _FULL
        )
