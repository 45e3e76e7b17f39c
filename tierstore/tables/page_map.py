"""Where the pages of a table are.

Arrays over numbers of pages (`tierstore.tables.page_numbers`), which grow by doubling and take memory where
they were written only.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tierstore.tables.page_numbers import HashedNumbers, OwnNumbers, PageNumbers, Pages, numbers_for

Frames = npt.NDArray[np.int64]

NOWHERE = -1


class PageMap:
    """Page to frame.

    Args:
        pages: how many the table has.
    """

    def __init__(self, pages: int) -> None:
        self._numbers: PageNumbers = numbers_for(pages)
        self._frames = np.zeros(0, dtype=np.int64)  # each one more than it is: 0 is what fresh memory holds
        self._make_room()

    def frames_of(self, pages: Pages) -> Frames:
        """Return the frame of each page, in any order and with repeats; -1: it is in none."""
        numbers = self._numbers.find(pages)
        if not len(self._frames):
            return np.full(len(pages), NOWHERE)
        # The frame of a page without a number would be the last array element's.
        return np.where(numbers < 0, 0, self._frames[numbers]) - 1

    def set_frames(self, pages: Pages, frames: Frames) -> None:
        """Say in which frames these distinct pages are."""
        numbers = self._numbers.give(pages)
        self._make_room()
        self._frames[numbers] = frames + 1

    def pages_in_frames(self) -> Pages:
        """Return the pages that are in a frame, ascending."""
        pages, numbers = self._numbers.known()
        return pages[self._frames[numbers] > 0]

    def grow(self, pages: int) -> None:
        """Let the table have more pages."""
        if isinstance(self._numbers, OwnNumbers):
            numbers = numbers_for(pages)
            if isinstance(numbers, HashedNumbers):
                known = np.flatnonzero(self._frames)
                frames = self._frames[known] - 1
                self._numbers, self._frames = numbers, np.zeros(0, dtype=np.int64)
                self.set_frames(known, frames)
            else:
                self._numbers = numbers
                self._make_room()

    def _make_room(self) -> None:
        if self._numbers.size > len(self._frames):
            own = isinstance(self._numbers, OwnNumbers)
            room = np.zeros(self._numbers.size * (1 if own else 2), dtype=np.int64)
            room[: len(self._frames)] = self._frames
            self._frames = room
