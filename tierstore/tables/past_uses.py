"""How often was used what has left memory: it counts again when it comes back.

A row or page that is asked for now and then leaves between two uses, and would be a stranger each time: one
that is asked for twice as often could not be told from it.  (Caches call what left and is remembered ghosts.)

Rule: memory is bounded.  Of two that share a place the later one is remembered; what is recalled is never
another's.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
Counts = npt.NDArray[np.float64]

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)  # Knuth: multiplied by it, neighbours come to lie far apart
_NOBODY: Final = -1


class PastUses:
    """See the module.

    Args:
        places: that there are at least, 24 bytes each.
    """

    def __init__(self, places: int) -> None:
        bits = max(1, (places - 1).bit_length())
        self._shift = np.uint64(64 - bits)
        self._who = np.full(1 << bits, _NOBODY, dtype=np.int64)
        self._counts = np.zeros(1 << bits)
        self._used_at = np.zeros(1 << bits, dtype=np.int64)

    def __len__(self) -> int:
        """How many places there are."""
        return len(self._who)

    def remember(self, who: Numbers, counts: Counts, used_at: Numbers) -> None:
        """Note how often these distinct ones were used, and when last."""
        places = self._places_of(who)
        self._who[places] = who
        stays = self._who[places] == who
        self._counts[places[stays]] = counts[stays]
        self._used_at[places[stays]] = used_at[stays]

    def recall(self, who: Numbers) -> tuple[Counts, Numbers]:
        """Return how often these were used, and when last; 0 of those that are not remembered."""
        places = self._places_of(who)
        is_known = self._who[places] == who
        return self._counts[places] * is_known, self._used_at[places] * is_known

    def _places_of(self, who: Numbers) -> Numbers:
        return ((who.astype(np.uint64) * _GOLDEN) >> self._shift).astype(np.int64)
