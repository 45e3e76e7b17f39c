"""Where the pages of a table are: in which frame, and at which place of the log.

Arrays over numbers of pages (`tierstore.tables.page_numbers`), which grow by doubling and take memory where
they were written only.  A page may be in a frame, in the log, in both (then the frame is right) or in
neither (then it was never written).
"""

from __future__ import annotations

from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from tierstore.tables.page_numbers import HashedNumbers, Numbers, PageNumbers, Pages, numbers_for

Frames = npt.NDArray[np.int64]
Places = npt.NDArray[np.int64]
Checks = npt.NDArray[np.uint32]

_T = TypeVar("_T", bound=np.generic)

NOWHERE: Final = -1


class Logged(NamedTuple):
    """Pages with their places in the log.

    Attributes:
        pages: distinct.
        places: of each.
        checks: of the bytes of each.
    """

    pages: Pages
    places: Places
    checks: Checks

    def only(self, which: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Logged:
        """Return some of them."""
        return Logged(self.pages[which], self.places[which], self.checks[which])


class PageMap:
    """See the module.

    Args:
        pages: how many the table has.
    """

    def __init__(self, pages: int) -> None:
        self._numbers: PageNumbers = numbers_for(pages)
        # Frames and places are one more than they are: 0, which fresh memory holds, stands for none.
        self._frames = np.zeros(0, dtype=np.int32)
        self._places = np.zeros(0, dtype=np.int64)
        self._checks = np.zeros(0, dtype=np.uint32)
        self._make_room()

    def frames_of(self, pages: Pages) -> Frames:
        """Return the frame of each page, in any order and with repeats; -1: it is in none."""
        return less_one(self._frames, self._numbers.find(pages))

    def places_of(self, pages: Pages) -> Places:
        """Return the place of each page in the log; -1: it is not there."""
        return less_one(self._places, self._numbers.find(pages))

    def checks_of(self, pages: Pages) -> Checks:
        """Return the checks of pages that are in the log."""
        return self._checks[self._numbers.find(pages)]

    def set_frames(self, pages: Pages, frames: Frames | int) -> None:
        """Say in which frames these distinct pages are; -1: in none."""
        numbers = self._give(pages)
        self._frames[numbers] = np.asarray(frames) + 1

    def set_logged(self, logged: Logged) -> None:
        """Say where pages are in the log."""
        numbers = self._give(logged.pages)
        self._places[numbers] = logged.places + 1
        self._checks[numbers] = logged.checks

    def logged(self) -> Logged:
        """Return all pages that are in the log, ascending."""
        numbers = np.flatnonzero(self._places)
        pages = self._numbers.pages_of(numbers)
        order = np.argsort(pages, kind="stable")  # of pages with their own numbers: they are in order
        numbers = numbers[order]
        return Logged(pages[order], self._places[numbers] - 1, self._checks[numbers])

    def grow(self, pages: int) -> None:
        """Let the table have more pages."""
        if isinstance(self._numbers, HashedNumbers):
            return
        in_frames = np.flatnonzero(self._frames)
        frames, logged = self._frames[in_frames].astype(np.int64) - 1, self.logged()
        self._numbers = numbers_for(pages)
        if isinstance(self._numbers, HashedNumbers):
            self._frames, self._places, self._checks = self._frames[:0], self._places[:0], self._checks[:0]
            self.set_frames(in_frames, frames)
            self.set_logged(logged)
        self._make_room()

    def _give(self, pages: Pages) -> Numbers:
        numbers = self._numbers.give(pages)
        self._make_room()
        return numbers

    def _make_room(self) -> None:
        """Let the arrays have an item for each number."""
        needed = self._numbers.size
        if needed > len(self._frames):
            room = needed * 2 if isinstance(self._numbers, HashedNumbers) else needed
            self._frames = longer(self._frames, room)
            self._places = longer(self._places, room)
            self._checks = longer(self._checks, room)


def less_one(array: npt.NDArray[np.int32] | npt.NDArray[np.int64], numbers: Numbers) -> npt.NDArray[np.int64]:
    """Return one less than the items of these numbers; -1 where there is no number."""
    if not len(array):
        return np.full(len(numbers), NOWHERE)
    found = array[numbers].astype(np.int64) - 1  # of the number -1: the last one's
    found[numbers < 0] = NOWHERE
    return found


def longer(array: npt.NDArray[_T], length: int) -> npt.NDArray[_T]:
    """Return a copy of an array with zeros behind it."""
    longer = np.zeros(length, dtype=array.dtype)
    longer[: len(array)] = array
    return longer
