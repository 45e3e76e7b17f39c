"""Layout and files together, from any thread: what is reserved, and what the disk holds for it.

Promises: the files never hold more than the capacity.  Freed addresses are used again before
new ones; their blocks stay with the files, which is what makes writing there fast, until the
capacity shrinks, the disk is full, or the store has been quiet for a while.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

from tierstore.errors import BackendError
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.extents import Extent, Layout


class Limits(NamedTuple):
    """What files may hold: nothing from ``end`` on, and nothing in the ``retired`` ranges below it."""

    end: int
    retired: Sequence[Extent]
    is_dense: bool


class Space:
    """Room in the files of one directory.

    Args:
        capacity_bytes: the most the files may hold.
        alignment_bytes: what every extent is a multiple of.
        segments: the files.
        live: what is reserved from the beginning: sorted, aligned, no two overlapping.

    Raises:
        CapacityError: ``live`` is more than the capacity.
        BackendError: the files hold more than the capacity and could not be cut.
    """

    def __init__(
        self, capacity_bytes: int, alignment_bytes: int, segments: Segments, live: Sequence[Extent] = ()
    ) -> None:
        self._segments = segments
        self._resizing = threading.Lock()  # one resize at a time; held while files are cut
        self._lock = threading.Lock()  # guards the layout
        self._layout = Layout(capacity_bytes, alignment_bytes, live)
        self.apply_limits(Limits(self._layout.end, self._layout.retired_ranges, self._layout.is_dense))

    @property
    def live_bytes(self) -> int:
        """What is reserved."""
        return self._layout.live_bytes

    @property
    def free_bytes(self) -> int:
        """What can still be reserved."""
        return self._layout.free_bytes

    def reserve(self, nbytes: int) -> tuple[Extent, ...]:
        """Take extents for ``nbytes``.

        Raises:
            CapacityError: fewer bytes are free.
        """
        with self._lock:
            return self._layout.reserve(nbytes)

    def free(self, extents: Sequence[Extent]) -> bool:
        """Take extents back; return whether the files hold more than is in use above them all."""
        with self._lock:
            self._layout.free(extents)
            tail_start = self._layout.tail_start
        return any(end > tail_start for _, end in extents)

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on; what lies above is given back before this returns.

        Raises:
            CapacityError: more is reserved.
            BackendError: the files could not be cut; the new capacity holds for what is reserved.
        """
        with self._resizing:
            self.apply_limits(self.allot(capacity_bytes))

    @property
    def capacity_bytes(self) -> int:
        """What is reserved or can be."""
        with self._lock:
            return self._layout.live_bytes + self._layout.free_bytes

    def allot(self, capacity_bytes: int) -> Limits:
        """Change the capacity, not the disk; return what to `apply_limits`.  By one thread at a time.

        Raises:
            CapacityError: more is reserved.
        """
        with self._lock:
            return self._limits(self._layout.resize(capacity_bytes))

    def retire_free(self) -> Limits:
        """Give up everything that is free; return what to `apply_limits`.  By one thread at a time."""
        with self._lock:
            return self._limits(self._layout.resize(self._layout.live_bytes))

    def give_back(self) -> None:
        """Give the blocks of everything that is free back to the file system, which has none left.

        Nobody gets addresses meanwhile, so nobody writes there.

        Raises:
            OSError: the file system failed at it.
        """
        with self._lock:
            for start, end in self._layout.free_ranges:
                self._segments.punch(start, end)

    def trim(self) -> None:
        """Cut off the tail of the files that is free.  Only while no write begins (see `engine`).

        Raises:
            OSError: a file cannot be cut.
        """
        with self._lock:
            tail_start = self._layout.tail_start
        # What is reserved from here on may lie there too, but nobody writes it before this returns.
        self._segments.trim(tail_start)

    def apply_limits(self, limits: Limits) -> None:
        """Let the files hold what is in use and nothing else.

        Raises:
            BackendError: the files could not be cut.
        """
        try:
            self._segments.limit(limits.end, is_dense=limits.is_dense)
            for start, stop in limits.retired:
                self._segments.punch(start, stop)
        except OSError as error:
            raise BackendError(f"files could not be made smaller: {error}") from error

    def _limits(self, retired: Sequence[Extent]) -> Limits:
        return Limits(self._layout.end, retired, self._layout.is_dense)
