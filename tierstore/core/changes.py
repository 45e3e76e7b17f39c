"""What has changed since the last good commit: the keys that a flush has to look at, and no others.

A key is *dirty* from the moment before something happens to it (a put, a write lease, a drop, a new name)
until a commit has ended well after which it is as it was committed.  So a flush looks at what has changed,
and its commit speaks of that.

A key that gets another name is still the bytes that were committed under the old one.  Whoever flushes it
by name flushes the names that it had and that others took from it as well, or a crash would find its bytes
twice, or not at all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tierstore.core.books import Books
from tierstore.core.entry import Entry, EntryLife, Replica

Image = dict[str, Replica]
"""What survives: one replica for each key."""

Moment = Mapping[str, Entry | None]
"""What a flush is about: keys with their entries; ``None``: the key was not there."""


class Changes:
    """Compares the keys with what was committed.

    Args:
        books: of the store.
        tier: the durable one; ``None``: there is none, and nothing is noted.

    Attributes:
        committed: what the last good commit named.
    """

    def __init__(self, books: Books, tier: int | None) -> None:
        self._books = books
        self._tier = tier
        self.committed: Image = {}
        # Dirty keys, and the uid of the entry whose bytes were committed under each, if any were.
        self._dirty: dict[str, int | None] = {}
        self._names: dict[int, str] = {}  # the other way round
        self._vanished: dict[str, None] = {}  # dirty keys whose committed bytes are nobody's any more

    def note(self, key: str) -> None:
        """Something is about to happen to a key."""
        if self._tier is None or key in self._dirty:
            return
        entry = self._books.index.get(key) if key in self.committed else None
        self._note_base(key, None if entry is None else entry.uid)

    def _note_base(self, key: str, uid: int | None) -> None:
        self._dirty[key] = uid
        if uid is not None:
            self._names[uid] = key

    def note_end(self, entry: Entry) -> None:
        """A key was dropped or replaced: its bytes are nobody's."""
        name = self._names.get(entry.uid)
        if name is not None:
            self._vanished[name] = None

    def dirty(self) -> list[str]:
        """Return all keys that may differ from what was committed."""
        return list(self._dirty)

    def unknown(self) -> list[str]:
        """Return the keys that were committed without anybody knowing of which entry: there are none."""
        return [key for key, uid in self._dirty.items() if uid is None and key in self.committed]

    def uids(self, keys: Iterable[str]) -> dict[str, int]:
        """Return the entries whose bytes were committed under some keys, for those that are dirty."""
        return {key: uid for key in keys if (uid := self._dirty.get(key)) is not None}

    def joined(self, keys: Sequence[str], pending: Sequence[Moment]) -> list[str]:
        """Return ``keys``, what they were renamed from or what took their names, and keys that are gone.

        Args:
            keys: to begin with.
            pending: what flushes are about that have not ended: it may be committed any time.
        """
        names: defaultdict[int, list[str]] = defaultdict(list)
        uids: defaultdict[str, list[int]] = defaultdict(list)
        gone = dict(self._vanished)
        for moment in pending:
            for key, entry in moment.items():
                if entry is not None:
                    names[entry.uid].append(key)
                    uids[key].append(entry.uid)
                    if entry.life is not EntryLife.LIVE:
                        gone[key] = None
        found = self._closure(keys, names, uids)
        for key in gone:
            if key not in found and not self._is_there(key):
                part = self._closure([key], names, uids)
                if not any(map(self._is_there, part)):  # what is there was not asked for
                    found.update(part)
        return list(found)

    def _closure(
        self, keys: Sequence[str], names: Mapping[int, Sequence[str]], uids: Mapping[str, Sequence[int]]
    ) -> dict[str, None]:
        found: dict[str, None] = {}
        waiting = list(keys)
        while waiting:
            key = waiting.pop()
            if key in found:
                continue
            found[key] = None
            if (present := self._books.index.get(key)) is not None:
                waiting += names.get(present.uid, ())
            waiting += self._relatives(key, uids.get(key, ()))
        return found

    def _is_there(self, key: str) -> bool:
        entry = self._books.index.get(key)
        return entry is not None and entry.life is EntryLife.LIVE

    def _relatives(self, key: str, uids: Iterable[int]) -> Iterator[str]:
        """Yield what a key was committed as, and the names of what is or will be committed under it."""
        present = self._books.index.get(key)
        if present is not None and present.uid in self._names:
            yield self._names[present.uid]
        for uid in (self._dirty.get(key), *uids):
            former = self._books.entries.get(uid or 0)
            if former is not None and self._books.index.get(former.key) is former:
                yield former.key

    def commit(
        self, names: Mapping[str, Replica | None], uids: Mapping[str, int], pending: Sequence[Moment]
    ) -> None:
        """A commit has ended well.

        Args:
            names: what it named, and ``None`` for each key that it left out.
            uids: of the entries whose bytes it named.
            pending: what flushes are about that have not ended: what they name is not clean.
        """
        for key, replica in names.items():
            if replica is None:
                self.committed.pop(key, None)
            else:
                self.committed[key] = replica
        for key in names:
            former = self._dirty.pop(key, None)
            if former is not None and self._names.get(former) == key:
                del self._names[former]
            self._vanished.pop(key, None)
        for key in names:
            if any(key in moment for moment in pending) or not self._is_clean(key):
                self._note_base(key, uids.get(key))
                if key in uids and not self._is_live(uids[key]):
                    self._vanished[key] = None

    def _is_live(self, uid: int) -> bool:
        entry = self._books.entries.get(uid)
        return entry is not None and entry.life is EntryLife.LIVE

    def _is_clean(self, key: str) -> bool:
        entry = self._books.index.get(key)
        if entry is None:
            return key not in self.committed
        if entry.life is not EntryLife.LIVE or entry.writer is not None:
            return False
        assert self._tier is not None
        return entry.replicas.get(self._tier) is self.committed.get(key, entry)
