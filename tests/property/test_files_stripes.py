"""Room on several drives, in any order of calls: no byte given twice, and none that cannot be had."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierstore.errors import CapacityError
from tierstore.units import KIB, MIB, align_up
from tierstore_backends.files.addressing.direct_io_probe import OPEN_FLAGS, IoMode
from tierstore_backends.files.addressing.drives import SPAN_BYTES, Drive
from tierstore_backends.files.addressing.segments import Segments
from tierstore_backends.files.addressing.space import Space
from tierstore_backends.files.addressing.stripes import Stripes, allot
from tierstore_backends.files.extents import Extent
from tierstore_backends.files.io.kernel import KERNEL

PAGE = 4096
MOST = 2 * MIB


class StripesMachine(RuleBasedStateMachine):
    """Stripes against a count of bytes.  Nothing is written, so no file is ever opened."""

    @initialize(
        weights=st.lists(st.integers(1, 1 << 34), min_size=2, max_size=4),
        capacity_bytes=st.integers(0, MOST),
        block=st.sampled_from([PAGE, 16 * KIB, MIB]),
    )
    def open(self, weights: list[int], capacity_bytes: int, block: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        count = len(weights)
        most = [SPAN_BYTES] * count
        shares = allot(capacity_bytes, PAGE, weights, least=[0] * count, most=most)
        mode = IoMode(is_direct=False, alignment_bytes=PAGE, memory_alignment_bytes=1)
        drives = []
        for weight, share in zip(weights, shares, strict=True):
            segments = Segments(
                Path(self.folder.name), OPEN_FLAGS, KERNEL, segment_bytes=MIB, stride_bytes=PAGE
            )
            space = Space(share, PAGE, segments)
            drives.append(Drive(Path(self.folder.name), mode, weight, segments, space))
        self.drives = drives
        self.stripes = Stripes(drives, block, PAGE)
        self.capacity_bytes = capacity_bytes - capacity_bytes % PAGE
        self.slots: list[tuple[Extent, ...]] = []

    def teardown(self) -> None:
        if not hasattr(self, "stripes"):
            return
        for slot in self.slots:
            self.stripes.free(slot)
        self.slots = []
        everything = self.stripes.reserve(self.capacity_bytes)  # all of it, whatever went before
        assert size(everything) == self.capacity_bytes
        self.folder.cleanup()

    @property
    def live_bytes(self) -> int:
        return sum(size(slot) for slot in self.slots)

    @rule(nbytes=st.integers(0, MOST // 2))
    def reserve(self, nbytes: int) -> None:
        needed_bytes = align_up(nbytes, PAGE)
        fits = needed_bytes <= self.capacity_bytes - self.live_bytes
        try:
            extents = self.stripes.reserve(nbytes)
        except CapacityError:
            assert not fits
        else:
            assert fits
            assert size(extents) == needed_bytes
            self.slots.append(extents)

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.stripes.free(self.slots.pop(data.draw(st.integers(0, len(self.slots) - 1))))

    @rule(capacity_bytes=st.integers(0, MOST))
    def resize(self, capacity_bytes: int) -> None:
        before = [drive.space.capacity_bytes for drive in self.drives]
        try:
            self.stripes.resize(capacity_bytes)
        except CapacityError:
            assert capacity_bytes < self.live_bytes
        else:
            assert capacity_bytes >= self.live_bytes
            is_growing = capacity_bytes >= self.capacity_bytes
            self.capacity_bytes = capacity_bytes - capacity_bytes % PAGE
            # So that whoever reserves meanwhile is not refused what there is before and after.
            for drive, share in zip(self.drives, before, strict=True):
                now = drive.space.capacity_bytes
                assert now >= share if is_growing else now <= share

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        """A slot met drives without blocks."""
        which = data.draw(st.integers(0, len(self.slots) - 1))
        full = data.draw(st.sets(st.integers(0, len(self.drives) - 1), min_size=1))
        moved = self.stripes.move(self.slots[which], full)
        if moved is None:
            assert len(full) == len(self.drives)
            return
        assert size(moved) == size(self.slots[which])
        assert not any(start // SPAN_BYTES in full for start, _ in moved)
        assert not any(self.drives[drive].space.free_bytes for drive in full)
        self.slots[which] = moved

    @invariant()
    def no_address_is_given_twice(self) -> None:
        if not hasattr(self, "stripes"):
            return
        extents = sorted(extent for slot in self.slots for extent in slot)
        for (_, end), (start, _) in itertools.pairwise(extents):
            assert end <= start
        for start, end in extents:
            assert start < end
            assert not (start | end) % PAGE
            assert start // SPAN_BYTES == (end - 1) // SPAN_BYTES < len(self.drives)

    @invariant()
    def shares_add_up_to_the_capacity(self) -> None:
        if hasattr(self, "stripes"):
            assert sum(drive.space.capacity_bytes for drive in self.drives) == self.capacity_bytes


def size(extents: tuple[Extent, ...]) -> int:
    return sum(end - start for start, end in extents)


TestStripes = StripesMachine.TestCase
