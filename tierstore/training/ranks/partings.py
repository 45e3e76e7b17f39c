"""What processes that leave a run tell the others: in the store of their process group, which blocks nobody.

Nobody has to wait for a process that leaves.  It writes why, and then closes its connections, so that whoever
waits for it, now or later, is told by gloo at once, and reads here why that is.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import NamedTuple

from torch import distributed

from tierstore.training.ranks.where import RankPlace

_KEY = "tierstore/parting"
_FAILURES = (RuntimeError, OSError, ValueError)


class Parting(NamedTuple):
    """What one process has said.

    Attributes:
        rank: of the process.
        why: a clause: ``"has closed its run"``.
        is_by_error: whether an error has ended it; if not, it came to its end.
        is_first: whether it left by itself; if not, as it has waited for another in vain.
    """

    rank: int
    why: str
    is_by_error: bool = False
    is_first: bool = True


class Partings:
    """Where one process says that it leaves, and hears of others.

    Args:
        where: which process it is.
        group: that they exchange rows in.
    """

    def __init__(self, where: RankPlace, group: distributed.ProcessGroup) -> None:
        self._where = where
        self._store = group.get_group_store()
        self._is_lost = False  # PyTorch logs every call that finds it gone
        with contextlib.suppress(*_FAILURES):  # of another life in the same store; not all can forget
            self._store.delete_key(self._key(where.rank))

    @staticmethod
    def _key(rank: int) -> str:
        return f"{_KEY}/{rank}"

    def say(self, parting: Parting) -> None:
        """Let the others know that this process has left; it is known when this returns."""
        if self._is_lost:
            return
        with self._while_it_lasts():
            self._store.set(self._key(self._where.rank), json.dumps(parting))
            self._store.check([self._key(self._where.rank)])  # which is answered when that is done

    def others(self) -> list[Parting]:
        """Return what the others have said so far: those first who have left by themselves."""
        found: list[Parting] = []
        for rank in range(self._where.world_size):
            if rank != self._where.rank and not self._is_lost:
                with self._while_it_lasts():
                    if self._store.check([self._key(rank)]):
                        found.append(Parting(*json.loads(self._store.get(self._key(rank)))))
        return sorted(found, key=lambda each: not each.is_first)

    @contextlib.contextmanager
    def _while_it_lasts(self) -> Iterator[None]:
        """Do without the store once it is gone, with the process that had it or with the group."""
        try:
            yield
        except _FAILURES:
            self._is_lost = True
