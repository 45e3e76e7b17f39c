"""The layout of scratch files against a set of addresses."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierstore.errors import CapacityError
from tierstore.units import align_up
from tierstore_backends.files.extents import Extent, Layout

UNIT = 4
LARGEST = 60 * UNIT


class LayoutMachine(RuleBasedStateMachine):
    """Extents against the plain set of the addresses they cover."""

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 40 * UNIT
        self.layout = Layout(self.capacity, UNIT)
        self.slots: list[tuple[int, tuple[Extent, ...]]] = []

    def live(self) -> list[int]:
        return [
            address for _, extents in self.slots for start, end in extents for address in range(start, end)
        ]

    @rule(nbytes=st.integers(0, LARGEST))
    def reserve(self, nbytes: int) -> None:
        fits = align_up(nbytes, UNIT) <= self.capacity - len(self.live())
        try:
            extents = self.layout.reserve(nbytes)
        except CapacityError:
            assert not fits
        else:
            assert fits
            assert sum(end - start for start, end in extents) == align_up(nbytes, UNIT)
            self.slots.append((nbytes, extents))

    @precondition(lambda self: self.slots)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.slots) - 1))
        self.layout.free(self.slots.pop(index)[1])

    @rule(capacity=st.integers(0, LARGEST))
    def resize(self, capacity: int) -> None:
        whole = capacity - capacity % UNIT
        live = set(self.live())
        try:
            retired = self.layout.resize(capacity)
        except CapacityError:
            assert len(live) > whole
        else:
            assert len(live) <= whole
            assert sum(end - start for start, end in retired) == max(0, self.capacity - whole)
            assert live.isdisjoint(address for start, end in retired for address in range(start, end))
            self.capacity = whole

    @rule(capacity=st.integers(0, LARGEST))
    def begin_again(self, capacity: int) -> None:
        whole = capacity - capacity % UNIT
        live = sorted(extent for _, extents in self.slots for extent in extents)
        try:
            layout = Layout(capacity, UNIT, live)
        except CapacityError:
            assert len(self.live()) > whole
        else:
            assert len(self.live()) <= whole
            assert set(self.live()).isdisjoint(
                address for start, end in layout.retired_ranges for address in range(start, end)
            )
            self.layout = layout
            self.capacity = whole

    @invariant()
    def no_address_is_given_twice(self) -> None:
        live = self.live()
        assert len(live) == len(set(live))

    @invariant()
    def every_extent_is_aligned_and_below_the_end(self) -> None:
        for _, extents in self.slots:
            for start, end in extents:
                assert start % UNIT == end % UNIT == 0
                assert 0 <= start < end <= self.layout.end

    @invariant()
    def live_and_free_are_the_capacity(self) -> None:
        assert self.layout.live_bytes == len(self.live())
        assert self.layout.live_bytes + self.layout.free_bytes == self.capacity

    @invariant()
    def a_dense_layout_ends_at_its_capacity(self) -> None:
        assert self.layout.is_dense == (self.layout.end == self.capacity)

    @invariant()
    def nothing_lives_in_the_tail(self) -> None:
        live = self.live()
        assert self.layout.tail_start >= (max(live) + 1 if live else 0)
        assert not self.slots or not live or self.layout.tail_start <= self.layout.end


TestLayout = LayoutMachine.TestCase
