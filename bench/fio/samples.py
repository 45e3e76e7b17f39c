"""One operation's numbers, kept as they come.

Each thread records into a list of its own, so that nothing is locked while something is timed.
"""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass

import numpy as np

_FIELDS = 6


class Kind(enum.IntEnum):
    """What an operation counts as in fio's report."""

    READ = 0
    WRITE = 1
    SYNC = 2


class Recorder:
    """Numbers of operations in the order of their completion.  For one thread."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def record(self, kind: Kind, ended_ns: int, slat_ns: int, clat_ns: int, nbytes: int, depth: int) -> None:
        """Keep one operation.

        Args:
            kind: what it counts as.
            ended_ns: when it ended, on the job's clock.
            slat_ns: how long the call took that began it; -1 where that is not apart from the rest.
            clat_ns: how long it took from then on.
            nbytes: what it moved.
            depth: how many were in flight, this one among them.
        """
        self._numbers.extend((kind, ended_ns, slat_ns, clat_ns, nbytes, depth))

    def samples(self) -> Samples:
        """Return what was recorded."""
        return Samples(np.frombuffer(self._numbers, dtype=np.int64).reshape(-1, _FIELDS).copy())


@dataclass(frozen=True, slots=True)
class Samples:
    """Many operations: a row each, a column for each number that was recorded."""

    rows: np.ndarray

    @classmethod
    def joined(cls, parts: list[Samples]) -> Samples:
        """Return all operations of all parts."""
        rows = [part.rows for part in parts] or [np.empty((0, _FIELDS), dtype=np.int64)]
        return cls(np.concatenate(rows))

    def of(self, kind: Kind) -> Samples:
        """Return those of one kind."""
        return Samples(self.rows[self.rows[:, 0] == kind])

    def since(self, moment_ns: int) -> Samples:
        """Return those that ended at ``moment_ns`` of the job's clock or later, which becomes 0."""
        kept = self.rows[self.rows[:, 1] >= moment_ns].copy()
        kept[:, 1] -= moment_ns
        return Samples(kept)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ended_ns(self) -> np.ndarray:
        """When each ended, on the job's clock."""
        return self._column(1)

    @property
    def slat_ns(self) -> np.ndarray:
        """How long each call took, of those where that is known."""
        column = self._column(2)
        known: np.ndarray = column[column >= 0]
        return known

    @property
    def clat_ns(self) -> np.ndarray:
        """How long each took after the call."""
        return self._column(3)

    @property
    def lat_ns(self) -> np.ndarray:
        """How long each took."""
        total: np.ndarray = np.maximum(self._column(2), 0) + self._column(3)
        return total

    @property
    def nbytes(self) -> np.ndarray:
        """What each moved."""
        return self._column(4)

    @property
    def depth(self) -> np.ndarray:
        """How many were in flight when each began."""
        return self._column(5)

    def _column(self, index: int) -> np.ndarray:
        column: np.ndarray = self.rows[:, index]
        return column
