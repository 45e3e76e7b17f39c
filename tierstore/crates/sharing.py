"""Who reads and writes which crate, and who has to wait or to take another one.

1.  Readers share a crate; a writer has it alone.  But leases are on keys: where a lease on other keys is in
   the way, the key is copied to another crate.  It is refused only where its own record is leased.
2.  A crate that is *moving* has records that are being copied elsewhere, or a writer that begins or ends.
   Whoever comes waits until it has settled: for hardware, never for a lease.
3.  A copy that is made of a record for its caller is a use, too, and a transfer of the whole crate, but no
   lease: a writer waits for it.

All calls from any thread.  Nothing here asks the store for anything that moves bytes.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Sequence

import torch

from tierstore.crates.index import Crate, CrateIndex, CrateUse
from tierstore.errors import KeyNotFound, LeaseError, StoreClosed
from tierstore.leases import check_key


class CrateSharing:
    """The uses of the crates of one name.

    Args:
        name: for messages.
        index: what is where.

    Attributes:
        changed: guards the index and what its crates say of their uses; notified when a crate settles.
        index: what is where.
    """

    def __init__(self, name: str, index: CrateIndex) -> None:
        self._name = name
        self._is_closed = False  # guarded by the next, as is the index
        self.index = index
        self.changed = threading.Condition(threading.Lock())

    def require_open(self) -> None:
        """Raise ``StoreClosed`` after `close`."""
        if self._is_closed:
            raise StoreClosed(f"the crates {self._name!r} are closed.")

    def close(self) -> None:
        """Refuse uses from now on.

        Raises:
            LeaseError: there are some.
        """
        with self.changed:
            for crate in self.index.crates.values():
                if not crate.is_idle:
                    uses = [*crate.readers, *([] if crate.writer is None else [crate.writer])]
                    raise LeaseError(
                        f"cannot close crates {self._name!r} while {crate.name!r} is used. Release it first.",
                        holders=tuple(use.holder for use in uses),
                    )
            self._is_closed = True

    def place(self, key: str) -> Crate:
        """Return the crate of a key.  Under the lock.

        Raises:
            KeyNotFound: nothing is under the key.
        """
        try:
            return self.index.places[key]
        except KeyError:
            raise KeyNotFound(
                f"no key {key!r} in crates {self._name!r}: it was never put, or it was dropped.", key=key
            ) from None

    def settled(self, keys: Collection[str]) -> list[Crate]:
        """Return the crates of keys, each once, when none of them moves.  Under the lock, free meanwhile.

        Raises:
            KeyNotFound: nothing is under a key.
            UsageError: it is no key.
            StoreClosed: after `close`.
        """
        self.require_open()
        while True:
            try:  # all anew: they may be others after a wait
                crates = list(dict.fromkeys(map(self.index.places.__getitem__, keys)))
            except (KeyError, TypeError):
                for key in keys:
                    self.place(check_key(key))
                raise
            if not any(crate.is_moving for crate in crates):
                return crates
            self.changed.wait()

    def _note(self, keys: Iterable[str], use: CrateUse, crates: list[Crate]) -> None:
        use.crates = crates
        use.records = {
            key: (crate, crate.records[key]) for key in keys for crate in (self.index.places[key],)
        }

    def begin_read(self, keys: Collection[str], use: CrateUse) -> bool:
        """Note a reader; return whether no writer of other keys is in the way.  Blocks.

        Raises:
            KeyNotFound: nothing is under a key.
            LeaseError: a key is leased for writing.
        """
        with self.changed:
            crates = self.settled(keys)
            if any(crate.writer is not None for crate in crates):
                for key in keys:
                    refuse_holders("lease", key, self.place(key).holders(key), are_writers=True)
                return False
            self._note(keys, use, crates)
            for crate in crates:
                crate.readers.append(use)
            return True

    def begin_moving(self, keys: Collection[str], use: CrateUse) -> None:
        """Note that crates of keys are to stay what they are, whoever leases them.  Blocks while one moves.

        Raises:
            KeyNotFound: nothing is under a key.
        """
        with self.changed:
            use.crates = self.settled(keys)
            for crate in use.crates:
                crate.readers.append(use)

    def begin_write(self, keys: Collection[str], use: CrateUse) -> bool:
        """Let the crates of keys move, to be written; return whether no lease is in the way.  Blocks.

        Raises:
            KeyNotFound: nothing is under a key.
        """
        with self.changed:
            crates = self.settled(keys)
            if any(crate.is_leased for crate in crates):
                return False
            self._note(keys, use, crates)
            for crate in crates:
                crate.is_moving = True
            return True

    def own(self, use: CrateUse) -> None:
        """Let a use write its crates, which move, once no copies are made of them.  Blocks."""
        with self.changed:
            while any(crate.readers for crate in use.crates):
                self.changed.wait()
            for crate in use.crates:
                crate.writer = use

    def move_apart(self, keys: Collection[str], *, is_write: bool) -> dict[Crate, list[str]]:
        """Let crates of keys move where leases on other keys are in the way; return these keys.  Blocks.

        Raises:
            KeyNotFound: nothing is under a key.
            LeaseError: a key itself is leased.
        """
        moving: dict[Crate, list[str]] = {}
        with self.changed:
            self.settled(keys)
            for key in keys:
                crate = self.place(key)
                refuse_holders("lease", key, crate.holders(key), are_writers=not is_write)
                if crate.writer is not None or (is_write and crate.is_leased):
                    moving.setdefault(crate, []).append(key)
            for crate in moving:
                crate.is_moving = True
        return moving

    def begin_ending(self, use: CrateUse) -> None:
        """Let nobody read the crates of a writer any more: it gives them back."""
        with self.changed:
            for crate in use.crates:
                while crate.is_moving:
                    self.changed.wait()
                crate.is_moving = True

    def end(self, use: CrateUse) -> None:
        """Forget a use."""
        with self.changed:
            for crate in use.crates:
                if crate.writer is use:
                    crate.writer = None
                elif use in crate.readers:
                    crate.readers.remove(use)
            self.changed.notify_all()

    def settle(self, crates: Iterable[Crate]) -> None:
        """Let crates move no more."""
        with self.changed:
            for crate in crates:
                crate.is_moving = False
            self.changed.notify_all()


def refuse_holders(verb: str, key: str, uses: Sequence[CrateUse], *, are_writers: bool = False) -> None:
    """Raise ``LeaseError`` if there are any; of those that write only, if that is said."""
    holders = tuple(
        f"{'write' if use.is_write else 'read'} lease of {use.holder!r}"
        for use in uses
        if use.is_write or not are_writers
    )
    if holders:
        raise LeaseError(
            f"cannot {verb} {key!r} beside the {', '.join(holders)}. Release that first.",
            key=key,
            holders=holders,
        )


def lent_bytes(crate: Crate) -> torch.Tensor | None:
    """Return the bytes of a crate that has a writer and has settled, to read what that does not write."""
    if crate.writer is None or crate.writer.lease is None:
        return None
    crate.writer.lease.use()
    return crate.writer.lease[crate.name]
