"""Where bytes live in scratch files."""

from __future__ import annotations

import pytest

from tierstore.errors import CapacityError
from tierstore_backends.files.extents import Layout, RangeSet


def test_slots_reserved_one_after_another_lie_one_after_another() -> None:
    layout = Layout(100, 10)
    assert [layout.reserve(n) for n in (10, 11, 1)] == [((0, 10),), ((10, 30),), ((30, 40),)]


def test_the_smallest_range_that_fits_is_used_and_the_lowest_among_equals() -> None:
    layout = Layout(100, 1)
    slots = [layout.reserve(n) for n in (30, 1, 10, 1, 20, 1, 10, 1)]
    for index in (0, 2, 4, 6):
        layout.free(slots[index])
    assert layout.reserve(10) == ((31, 41),)
    assert layout.reserve(15) == ((42, 57),)


def test_freed_neighbours_become_one_range() -> None:
    layout = Layout(30, 1)
    slots = [layout.reserve(10) for _ in range(3)]
    for index in (0, 2, 1):
        layout.free(slots[index])
    assert layout.reserve(30) == ((0, 30),)


def test_what_fits_in_no_single_range_gets_several() -> None:
    layout = Layout(50, 1)
    slots = [layout.reserve(n) for n in (10, 5, 20, 5, 10)]
    for index in (0, 2, 4):
        layout.free(slots[index])
    assert layout.reserve(36) == ((15, 35), (40, 50), (0, 6))
    assert layout.free_bytes == 4


def test_more_than_is_free_is_refused_with_numbers_and_changes_nothing() -> None:
    layout = Layout(100, 10)
    layout.reserve(75)
    with pytest.raises(CapacityError, match=r"30 B .* 20 B free of 100 B") as caught:
        layout.reserve(21)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (30, 20)
    assert layout.reserve(20) == ((80, 100),)


def test_nothing_takes_no_room() -> None:
    layout = Layout(0, 512)
    assert layout.reserve(0) == ()
    layout.free(())
    assert layout.free_bytes == 0


def test_a_capacity_counts_whole_units_only() -> None:
    assert Layout(1023, 512).free_bytes == 512


def test_shrinking_retires_the_highest_free_addresses() -> None:
    layout = Layout(100, 1)
    low, high = layout.reserve(10), layout.reserve(80)
    layout.free(low)
    assert layout.resize(85) == [(90, 100), (5, 10)]
    assert (layout.end, layout.is_dense, layout.free_bytes) == (90, False, 5)
    layout.free(high)
    assert layout.free_bytes == 85


def test_growing_uses_retired_addresses_before_new_ones() -> None:
    layout = Layout(100, 1)
    low = layout.reserve(10)
    layout.reserve(90)
    layout.free(low)
    layout.resize(90)
    assert layout.resize(105) == []
    assert (layout.end, layout.is_dense, layout.free_bytes) == (105, True, 15)


def test_shrinking_below_what_is_live_is_refused_and_changes_nothing() -> None:
    layout = Layout(100, 1)
    layout.reserve(50)
    with pytest.raises(CapacityError, match="50 B are in use"):
        layout.resize(49)
    assert layout.free_bytes == 50


def test_the_tail_begins_where_everything_above_is_free() -> None:
    layout = Layout(100, 1)
    first, second = layout.reserve(40), layout.reserve(60)
    assert layout.tail_start == 100
    layout.free(first)
    assert layout.tail_start == 100
    layout.free(second)
    assert layout.tail_start == 0


@pytest.mark.parametrize("overlap", [(5, 15), (15, 25), (12, 18), (0, 30), (10, 20)])
def test_a_range_is_never_free_twice(overlap: tuple[int, int]) -> None:
    ranges = RangeSet()
    ranges.add(10, 20)
    with pytest.raises(ValueError, match="there already"):
        ranges.add(*overlap)
    assert list(ranges) == [(10, 20)]
