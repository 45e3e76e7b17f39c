"""What an activation store counts."""

from __future__ import annotations

import collections
from dataclasses import dataclass, fields

from tierstore.training import locks
from tierstore.training.locks import Rank


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """What an activation store did so far.

    Attributes:
        kept, kept_bytes: storages that were taken over.
        released, released_bytes: those that were seen to have left the device: because they were given up, or
            because its quota demanded it.
        brought, brought_bytes: those that had left the device and were brought back.
        handed_over, handed_over_bytes: those that were wanted while still on the device: no byte came back.
        stalls: how often somebody waited: for bytes to come, or for a copy before a release.
        refused: releases that did not come about, because nothing below had room.
        offloaded, offloaded_bytes: those that are kept now.
    """

    kept: int = 0
    kept_bytes: int = 0
    released: int = 0
    released_bytes: int = 0
    brought: int = 0
    brought_bytes: int = 0
    handed_over: int = 0
    handed_over_bytes: int = 0
    stalls: int = 0
    refused: int = 0
    offloaded: int = 0
    offloaded_bytes: int = 0


class ActivationCounts:
    """The numbers behind `ActivationStats`.  Safe from any thread."""

    def __init__(self) -> None:
        self._lock = locks.new_lock(Rank.COUNTS)  # guards the next
        self._numbers: collections.Counter[str] = collections.Counter()

    def add(self, what: str, nbytes: int | None = None) -> None:
        """Count one more ``what``, with so many bytes."""
        with self._lock:
            self._numbers[what] += 1
            if nbytes is not None:
                self._numbers[f"{what}_bytes"] += nbytes

    def read(self, offloaded: int, offloaded_bytes: int) -> ActivationStats:
        """Return all numbers, with those of what is kept now."""
        with self._lock:
            counted = {each.name: self._numbers[each.name] for each in fields(ActivationStats)}
        return ActivationStats(**(counted | {"offloaded": offloaded, "offloaded_bytes": offloaded_bytes}))
