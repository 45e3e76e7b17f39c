"""Bytes under another key: replicas that become keys of their own, and keys that change their names.

No byte moves in either, so both are decided at once.

1. *Split*: a READY replica that nobody uses leaves its key, if another one stays behind that nothing
   can take away any more.  Each of the two keys then has a last copy of its own.
2. *Rename*: all of the given keys, or none.  What was under a new name before is dropped, as `drop`
   drops it.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.core.books import Books
from tierstore.core.entry import Entry, Life
from tierstore.core.residency import Replica, State
from tierstore.errors import KeyExists, KeyNotFound, UsageError


def replica_to_split(books: Books, entry: Entry, tier: int) -> Replica | None:
    """Return the replica of ``entry`` in ``tier`` if it can leave its key, else ``None``."""
    replica = entry.replicas.get(tier)
    if replica is None or replica.state is not State.READY or not replica.is_idle:
        return None
    if entry.uid in books.shelves[tier].leaving:
        return None  # a copy of it is about to be made, for this very entry
    stays = any(other is not replica and other.copy is None for other in entry.ready())
    return replica if stays else None


def check_names(books: Books, names: Mapping[str, str], *, replace: bool) -> None:
    """Raise if the keys in ``names`` cannot get the names that it gives them.

    Raises:
        KeyNotFound: a key is not there, or its first bytes are only coming.
        KeyExists: a new name is taken, and ``replace`` is false.
        UsageError: a new name is given twice, or is one of the keys.
    """
    for key, name in names.items():
        entry = books.index.get(key)
        if entry is None or entry.life is not Life.LIVE:
            raise KeyNotFound(f"no key {key!r} in the store: it was never put, or it was dropped.", key=key)
        if name in names:
            raise UsageError(f"{key!r} cannot become {name!r}, which is given another name as well.", key=key)
        if name in books.index and not replace:
            raise KeyExists(
                f"{key!r} cannot become {name!r}, which is there already. Drop it first.", key=name
            )
    if len(set(names.values())) < len(names):
        raise UsageError(f"several keys cannot become one: {sorted(names.values())}.")
