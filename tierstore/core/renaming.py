"""Bytes under another key: replicas that become keys of their own, and keys that change their names.

No byte moves in either, so both are decided at once.

1. *Split*: a replica that is leased for writing leaves its key together with the lease, if another
   READY one stays behind.  Each of the two keys then has a last copy of its own.  What is READY in stream
   order only, while its bytes are on their way, is waited for: the copy may fail yet.
2. *Rename*: all of the given keys, or none.  What was under a new name before is dropped, as `drop`
   drops it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tierstore.core.books import Books
from tierstore.core.entry import EntryLife, Replica
from tierstore.errors import KeyExists, KeyNotFound, UsageError


def can_split(replica: Replica) -> bool:
    """Whether a replica that is leased for writing can leave its key now."""
    return replica.copy is None and any(other.copy is None for other in _others(replica))


def is_split_to_wait(replicas: Sequence[Replica]) -> bool:
    """Whether replicas that cannot leave their keys now can once copies have ended."""
    could = all(_others(replica) for replica in replicas)
    return could and not all(can_split(replica) for replica in replicas)


def _others(replica: Replica) -> list[Replica]:
    return [other for other in replica.entry.ready() if other is not replica]


def check_names(books: Books, names: Mapping[str, str], *, replace: bool) -> None:
    """Raise if the keys in ``names`` cannot get the names that it gives them.

    Raises:
        KeyNotFound: a key is not there, or its first bytes are only coming.
        KeyExists: a new name is taken, and ``replace`` is false.
        UsageError: a new name is given twice, or is one of the keys.
    """
    for key, name in names.items():
        entry = books.index.get(key)
        if entry is None or entry.life is not EntryLife.LIVE:
            raise KeyNotFound(f"no key {key!r} in the store: it was never put, or it was dropped.", key=key)
        if name in names:
            raise UsageError(f"{key!r} cannot become {name!r}, which is given another name as well.", key=key)
        if name in books.index and not replace:
            raise KeyExists(
                f"{key!r} cannot become {name!r}, which is there already. Drop it first.", key=name
            )
    if len(set(names.values())) < len(names):
        raise UsageError(f"several keys cannot become one: {sorted(names.values())}.")
