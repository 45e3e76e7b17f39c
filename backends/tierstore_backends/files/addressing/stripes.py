"""Room on several drives: who gets how many bytes, of the capacity and of each slot.

Rule 1: each drive has a share of the capacity; the shares add up to it, so the files never hold more.
Rule 2: shares follow the bandwidths, but no drive's is more than its disk has, as long as another's can be.
Rule 3: a slot is cut by bandwidth into parts of whole blocks, so that all drives end together; what does
not divide goes to the drive that holds least for its bandwidth, and so does a slot of one block or less.
Rule 4: where a drive has no room for its part the others take it: what fits into what is free in total
is never refused.
Rule 5: a drive whose disk turns out to be full gives what is free of its share to the others, until the
capacity is changed or the drive is opened again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tierstore.errors import BackendError, CapacityError
from tierstore.units import align_up, format_bytes
from tierstore_backends.files.addressing.drives import SPAN_BYTES, Drive, split_by_drive
from tierstore_backends.files.addressing.space import Limits, Space
from tierstore_backends.files.extents import Extent

_log = logging.getLogger("tierstore.files")

_NO_LIMIT = 1 << 62


@dataclass(frozen=True, slots=True)
class Load:
    """One drive, as far as the next slot is concerned."""

    weight: int
    live_bytes: int
    free_bytes: int


def split(nbytes: int, block_bytes: int, loads: Sequence[Load]) -> list[int]:
    """Return how many of ``nbytes`` each drive gets.

    Where all have room, each part is less than a block away from its share of the whole blocks.

    Args:
        nbytes: no more than is free in total.
        block_bytes: what parts are multiples of, except for one, and where a drive has no room for more.
        loads: of each drive.
    """
    parts = [0] * len(loads)
    able = [drive for drive, load in enumerate(loads) if load.free_bytes]
    while nbytes:
        wanted = _by_weight(nbytes, block_bytes, {drive: loads[drive] for drive in able})
        over = [drive for drive in able if wanted[drive] > loads[drive].free_bytes]
        for drive in over or able:
            parts[drive] = min(wanted[drive], loads[drive].free_bytes)
            nbytes -= parts[drive]
        able = [drive for drive in able if drive not in over]
    return parts


def _by_weight(nbytes: int, block_bytes: int, loads: dict[int, Load]) -> dict[int, int]:
    total = sum(load.weight for load in loads.values())
    blocks = -(-nbytes // block_bytes)
    shares = {drive: divmod(blocks * load.weight, total) for drive, load in loads.items()}
    parts = {drive: whole * block_bytes for drive, (whole, _) in shares.items()}

    def urgency(drive: int) -> tuple[bool, float]:
        load, part = loads[drive], min(parts[drive] + block_bytes, nbytes)
        return part > load.free_bytes, (load.live_bytes + part) / load.weight

    last = max(parts, key=lambda drive: parts[drive])
    left = blocks - sum(whole for whole, _ in shares.values())
    for drive in sorted((drive for drive, (_, rest) in shares.items() if rest), key=urgency)[:left]:
        parts[drive] += block_bytes
        last = drive
    parts[last] -= blocks * block_bytes - nbytes  # one block is not whole
    return parts


def allot(
    capacity_bytes: int,
    alignment_bytes: int,
    weights: Sequence[int],
    *,
    least: Sequence[int],
    most: Sequence[int],
) -> list[int]:
    """Return each drive's share of the capacity, by its weight and between ``least`` and ``most``.

    The shares are multiples of the alignment and add up to the capacity, rounded down to it.  If the
    capacity exceeds what ``most`` says in total, the rest is given by weight all the same; if it is less
    than ``least`` says in total, so are they.

    Args:
        capacity_bytes: what is given out.
        alignment_bytes: what ``least`` are multiples of.
        weights: above 0.
        least: below this no share goes.
        most: above this none goes; where it says less than ``least``, that holds.
    """
    capacity_bytes -= capacity_bytes % alignment_bytes
    floors = list(least)
    ceilings = [
        max(floor, limit - limit % alignment_bytes) for floor, limit in zip(floors, most, strict=True)
    ]
    if sum(ceilings) < capacity_bytes:
        floors, ceilings = ceilings, [_NO_LIMIT] * len(floors)
    if sum(floors) >= capacity_bytes:
        return floors

    def at(level: float) -> list[int]:
        """Return the shares where each is ``level`` times its weight, as far as it may be."""
        return [
            min(max(math.floor(level * weight) // alignment_bytes * alignment_bytes, floor), ceiling)
            for weight, floor, ceiling in zip(weights, floors, ceilings, strict=True)
        ]

    low, high = 0.0, capacity_bytes / min(weights)
    for _ in range(100):  # more than a float has bits
        middle = (low + high) / 2
        low, high = (middle, high) if sum(at(middle)) <= capacity_bytes else (low, middle)
    shares = at(low)
    left_bytes = capacity_bytes - sum(shares)
    for drive, (share, ceiling) in enumerate(zip(shares, ceilings, strict=True)):
        more = min(left_bytes, ceiling - share)
        shares[drive] += more
        left_bytes -= more
    return shares


class Stripes:
    """Room on several drives.  See `tierstore_backends.files.addressing.space.Space`, for one.

    Args:
        drives: each with its share of the capacity.
        block_bytes: what the parts of a slot are multiples of; itself one of the alignment.
        alignment_bytes: what every extent is a multiple of.
    """

    def __init__(self, drives: Sequence[Drive], block_bytes: int, alignment_bytes: int) -> None:
        self._drives = drives
        self._spaces: list[Space] = [drive.space for drive in drives]
        self._weights = [drive.bandwidth_bytes_per_s for drive in drives]
        self._block_bytes = block_bytes
        self._alignment_bytes = alignment_bytes
        self._resizing = threading.Lock()  # one change of shares at a time; held while files are cut
        self._lock = threading.Lock()  # held while bytes are given out; they may come back meanwhile

    def reserve(self, nbytes: int) -> tuple[Extent, ...]:
        """Take extents for ``nbytes``.

        Raises:
            CapacityError: fewer bytes are free.
        """
        with self._lock:
            return self._reserve(nbytes)

    def free(self, extents: Sequence[Extent]) -> bool:
        """Take extents back; return whether files hold more than is in use above them all."""
        parts = split_by_drive(extents, len(self._spaces))
        is_above = [space.free(part) for space, part in zip(self._spaces, parts, strict=True) if part]
        return any(is_above)

    def resize(self, capacity_bytes: int) -> None:
        """Hold at most ``capacity_bytes`` from now on; what lies above is given back before this returns.

        Raises:
            CapacityError: more is reserved.
            BackendError: files could not be cut; the new capacity holds for what is reserved.
        """
        with self._resizing:
            most = [drive.most_bytes() for drive in self._drives]
            with self._lock:
                limits = self._reallot(capacity_bytes, most)
            self._apply_limits(limits)

    def move(self, extents: Sequence[Extent], full: Collection[int]) -> tuple[Extent, ...] | None:
        """Exchange extents for others, none of them on the drives ``full``, which have no blocks left.

        Returns:
            The others; ``None`` if no drive is left, and then nothing has changed.
        """
        others = [drive for drive in range(len(self._spaces)) if drive not in full]
        if not others:
            return None
        with self._resizing:
            with self._lock:
                self.free(extents)
                limits = self._give_up(full, others)
                # There is room elsewhere: as much as was free on the full drives, and these extents with it.
                moved = self._reserve(sum(end - start for start, end in extents), without=full)
            try:
                self._apply_limits(limits)
            except BackendError:
                _log.warning("unused space of the files could not be given back", exc_info=True)
        return moved

    def _reserve(self, nbytes: int, *, without: Collection[int] = ()) -> tuple[Extent, ...]:
        """Take extents, none of them on drives ``without``.  Called with the lock."""
        needed_bytes = align_up(nbytes, self._alignment_bytes)
        loads = [
            Load(weight, space.live_bytes, 0 if drive in without else space.free_bytes)
            for drive, (weight, space) in enumerate(zip(self._weights, self._spaces, strict=True))
        ]
        free_bytes = sum(load.free_bytes for load in loads)
        if needed_bytes > free_bytes:
            live_bytes = sum(load.live_bytes for load in loads)
            raise CapacityError(
                f"a slot of {format_bytes(needed_bytes)} does not fit into files on {len(loads)} drives with "
                f"{format_bytes(free_bytes)} free of {format_bytes(live_bytes + free_bytes)}",
                needed_bytes=needed_bytes,
                free_bytes=free_bytes,
            )
        parts = split(needed_bytes, self._block_bytes, loads)
        return tuple(
            (drive * SPAN_BYTES + start, drive * SPAN_BYTES + end)
            for drive, part in enumerate(parts)
            if part
            for start, end in self._spaces[drive].reserve(part)
        )

    def _reallot(self, capacity_bytes: int, most: Sequence[int]) -> list[Limits]:
        """Change the shares.  Called with the lock.

        Where the capacity grows no share shrinks, and where it shrinks none grows: so what is free
        between two changes is never less than after both.
        """
        now = [space.capacity_bytes for space in self._spaces]
        live = [space.live_bytes for space in self._spaces]
        if sum(live) > capacity_bytes:
            raise CapacityError(
                f"the files cannot shrink to {format_bytes(capacity_bytes)}: "
                f"{format_bytes(sum(live))} are in use",
                needed_bytes=sum(live),
                free_bytes=capacity_bytes,
            )
        is_growing = capacity_bytes >= sum(now)
        shares = allot(
            capacity_bytes,
            self._alignment_bytes,
            self._weights,
            least=now if is_growing else live,
            most=most if is_growing else now,
        )
        return [space.allot(share) for space, share in zip(self._spaces, shares, strict=True)]

    def _give_up(self, full: Collection[int], others: Sequence[int]) -> list[Limits]:
        """Give what is free on ``full`` to the ``others``.  Called with the lock."""
        before = sum(self._spaces[drive].capacity_bytes for drive in full)
        limits = {drive: self._spaces[drive].retire_free() for drive in full}
        more = allot(
            before - sum(self._spaces[drive].capacity_bytes for drive in full),
            self._alignment_bytes,
            [self._weights[drive] for drive in others],
            least=[0] * len(others),
            most=[_NO_LIMIT] * len(others),
        )
        for drive, bonus in zip(others, more, strict=True):
            limits[drive] = self._spaces[drive].allot(self._spaces[drive].capacity_bytes + bonus)
        return [limits[drive] for drive in range(len(self._spaces))]

    def _apply_limits(self, limits: Sequence[Limits]) -> None:
        """Let the files of every drive hold what is in use and nothing else; raise the first error."""
        with contextlib.ExitStack() as all_of_them:
            for space, limit in zip(self._spaces, limits, strict=True):
                all_of_them.callback(space.apply_limits, limit)
