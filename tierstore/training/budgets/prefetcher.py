"""Carries what `tierstore.planning.deciding.Follower` decides to a run's store.

Safe from any thread: autograd runs backward in threads of its own.  A step has one order of uses, in which
threads may interleave as they like.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import assert_never

from tierstore.errors import KeyNotFound
from tierstore.planning.deciding import (
    Advance,
    Advice,
    Follow,
    Follower,
    Prefetch,
    PrefetchWindow,
    ResidentChooser,
)
from tierstore.store import Store
from tierstore.training import locks
from tierstore.training.locks import Rank

__all__ = ["PrefetchWindow", "Prefetcher"]


class Prefetcher:
    """Records steps and follows the plan made of them.

    Args:
        store: that takes the plan as advice.
        windows: see `tierstore.planning.deciding.Follower`, and so are what follows.
        nbytes_of: the bytes of a key.
        optimizers: how many there are.
        chooser: says which keys stay where they are.
    """

    def __init__(
        self,
        store: Store,
        windows: Sequence[PrefetchWindow] | None,
        nbytes_of: Callable[[str], int],
        optimizers: int,
        chooser: ResidentChooser | None = None,
    ) -> None:
        self._store = store
        self._has_optimizers = optimizers > 0
        # Guards the follower, and the order in which the store is advised, which waits for nobody.
        self._lock = locks.new_lock(Rank.PREFETCHER)
        self._follower = Follower(
            windows, store.tier_names[0], nbytes_of, optimizers, chooser, store.__contains__
        )

    @property
    def has_plan(self) -> bool:
        """Whether a step was recorded and is followed."""
        return self._follower.has_plan

    @property
    def residents(self) -> frozenset[str]:
        """The keys that stay where they are, as they were chosen last."""
        return self._follower.residents

    def set_limit(self, tier: str, limit_bytes: int) -> None:
        """Prefetch as far as ``limit_bytes`` into ``tier`` from now on."""
        with self._lock:
            self._follower.set_limit(tier, limit_bytes)

    def note(self, *keys: str) -> None:
        """Take in that ``keys`` are used now, in this order; prefetch what comes after them."""
        if keys and self._follower.is_planning:
            with self._lock:
                self._advise(itertools.chain.from_iterable(map(self._follower.note, keys)))

    def note_passing(self, key: str, nbytes: int) -> None:
        """Take in that an activation is used now.

        Its user tells when it has to be on the device; until then it is prefetched to the tiers below.
        """
        with self._lock:
            self._advise(self._follower.note_passing(key, nbytes))

    def note_gradient(self, key: str, room_bytes: int = 0) -> None:
        """Take in that a gradient comes to be under ``key``: it is there until the step ends.

        Args:
            key: it is put when this is done.
            room_bytes: see `tierstore.planning.deciding.Follower.note_gradient`.
        """
        with self._lock:
            self._advise(self._follower.note_gradient(key, room_bytes))

    def leave_out(self, keys: Sequence[str]) -> None:
        """Take in that the next use of each key is as in no other step."""
        with self._lock:
            self._follower.leave_out(keys)

    def note_step(self, optimizer: int) -> None:
        """Take in that an optimizer has stepped."""
        with self._lock:
            self._follower.note_step(optimizer)

    def begin_use(self, part: Hashable = None) -> None:
        """Take in that a model, or a part of it that the program calls, is used.

        With optimizers a new step begins after their steps; without any each use is one.
        """
        with self._lock:
            follower = self._follower
            is_step = self._has_optimizers
            self._advise(follower.begin_forward() if is_step else follower.begin_inference(part))

    def _advise(self, advices: Iterator[Advice]) -> None:
        """Carry advice out: what is to come to one tier is asked for together."""
        ahead: dict[str, list[str]] = {}
        for advice in advices:
            match advice:
                case Follow(plan):
                    self._store.follow(plan)
                case Advance(position):
                    self._store.advance(position)
                case Prefetch(key, tier):
                    ahead.setdefault(tier, []).append(key)
                case _ as never:
                    assert_never(never)
        for tier, keys in ahead.items():
            self._prefetch(keys, tier)

    def _prefetch(self, keys: list[str], tier: str) -> None:
        while keys:
            try:
                self._store.prefetch(*keys, tier=tier)
            except KeyNotFound as error:
                keys.remove(error.key or "")  # a gradient that is not there yet, or was dropped
            else:
                return
