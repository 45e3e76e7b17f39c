"""In which slot of the device a row is.

Takes memory for the rows that are in slots, not for those that ever were: where ids are numbered as they come
(`tierstore.tables.page_numbers`), numbers begin anew before those of rows that have left are many.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from tierstore.tables.page_map import NOWHERE, less_one, longer
from tierstore.tables.page_numbers import HashedNumbers, PageNumbers, numbers_for

Ids = npt.NDArray[np.int64]
Slots = npt.NDArray[np.int64]

_FORMER: Final = 4
"""Numbers given for each slot before they begin anew."""
_FEW: Final = 1024


class SlotMap:
    """See the module.

    Args:
        num_rows: of the table.
        slots: how many there are.

    Attributes:
        num_rows: see above.
    """

    def __init__(self, num_rows: int, slots: int) -> None:
        self._most_numbers = _FORMER * slots + _FEW
        self._begin(num_rows)

    def slots_of(self, ids: Ids) -> Slots:
        """Return the slot of each id, in any order and with repeats; -1: it is in none."""
        return less_one(self._slots, self._numbers.find(ids))

    def put(self, ids: Ids, slots: Slots) -> None:
        """Say in which slots these distinct ids are."""
        if isinstance(self._numbers, HashedNumbers) and self._numbers.size + len(ids) > self._most_numbers:
            self.grow(self.num_rows)
        self._put(ids, slots)

    def forget(self, ids: Ids) -> None:
        """Let these ids be in no slot."""
        self._slots[self._numbers.find(ids)] = NOWHERE + 1

    def grow(self, num_rows: int) -> None:
        """Let the table have more rows."""
        numbers = np.flatnonzero(self._slots)
        ids, slots = self._numbers.pages_of(numbers), self._slots[numbers].astype(np.int64) - 1
        self._begin(num_rows)
        self._put(ids, slots)

    def _begin(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self._numbers: PageNumbers = numbers_for(num_rows)
        self._slots = np.zeros(self._numbers.size, dtype=np.int32)  # one more than they are; 0: in none

    def _put(self, ids: Ids, slots: Slots) -> None:
        numbers = self._numbers.give(ids)
        if self._numbers.size > len(self._slots):
            self._slots = longer(self._slots, self._numbers.size * 2)
        self._slots[numbers] = slots + 1
