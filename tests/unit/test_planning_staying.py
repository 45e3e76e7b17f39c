"""What stays in a tier where bundles are unequal, or gradients are used again and again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.planning import Trained, choose_residents, choose_staying

SIZES = {"p": 16, "s": 32}
"""Of the parameters and state of a bundle of one unit, with gradients as large as parameters."""


def trained(number: int, units: int = 1) -> Trained:
    return Trained((f"p{number}", f"s{number}"), (f"g{number}",), 48 * units, 16 * units)


def chosen(
    order: Sequence[Trained], quota_bytes: int, uses: int = 2, parameter_uses: int = 3
) -> frozenset[str]:
    accesses = [
        key
        for each in order
        for key in (*each.keys[:1] * parameter_uses, *each.keys[1:], *each.gradients * uses)
    ]
    units = {key: each.nbytes // 64 for each in order for key in each.keys}
    return choose_staying(order, accesses, {key: SIZES[key[0]] * n for key, n in units.items()}, quota_bytes)


def numbers(keys: frozenset[str], kind: str) -> list[int]:
    return sorted(int(key[1:]) for key in keys if key[0] == kind)


@given(st.integers(1, 30), st.integers(0, 2000))
def test_equal_bundles_stay_as_residents_do_or_more_where_all_but_a_few_fit(
    count: int, quota_bytes: int
) -> None:
    order = [trained(number) for number in range(count)]
    staying, residents = chosen(order, quota_bytes), choose_residents(order, quota_bytes)
    assert staying >= residents
    if len(staying) < 3 * (count - 2):
        assert staying == residents


@pytest.mark.parametrize("place", [0, 5, 10])
def test_a_bundle_as_large_as_all_others_stays_wherever_it_is_trained(place: int) -> None:
    order = [trained(number, 10 if number == place else 1) for number in range(11)]
    staying = chosen(order, 20 * 64 - 2 * 64)
    assert place in numbers(staying, "p")
    assert len(staying) >= 3 * 8  # of eleven bundles; two small ones and a half need room


def test_one_that_goes_needs_room_once_and_not_two_and_a_half_times() -> None:
    order = [trained(0, 20), *(trained(number) for number in range(1, 5)), trained(5, 20)]
    stay_bytes, goes_bytes = 21 * 48, 20 * 64 + 64 + 64 // 2
    assert numbers(chosen(order, stay_bytes + goes_bytes), "p") == [0, 1]


def test_all_stays_that_fits() -> None:
    order = [trained(number, 1 + number % 3) for number in range(7)]
    assert len(chosen(order, sum(each.nbytes for each in order))) == 21


def test_what_passes_by_has_room_beside_all_gradients() -> None:
    order = [trained(number) for number in range(4)]
    accesses = [key for each in order for key in (*each.keys, *each.gradients * 2)]
    sizes = {key: SIZES[key[0]] for each in order for key in each.keys}
    for quota_bytes in (4 * 64 + 99, 4 * 64 + 100):
        staying = choose_staying(order, accesses, sizes, quota_bytes, passing_bytes=40)
        assert (len(staying) == 12) == (quota_bytes == 4 * 64 + 100)


def test_gradients_that_are_used_again_stay_before_parameters_and_state_last() -> None:
    order = [trained(number) for number in range(16)]
    few, more, most = (chosen(order, quota_bytes, uses=3) for quota_bytes in (24 * 16, 28 * 16, 40 * 16))
    assert (len(numbers(few, "g")), len(numbers(few, "s"))) == (16, 0)
    assert len(numbers(few, "p")) < len(numbers(more, "p")) < 16
    assert (len(numbers(most, "g")), len(numbers(most, "p"))) == (16, 16)
    assert 0 < len(numbers(most, "s")) < 16


def test_parameters_that_are_used_more_often_still_stay_with_their_gradients() -> None:
    order = [trained(number) for number in range(16)]
    some = chosen(order, 20 * 16, uses=5, parameter_uses=9)
    assert numbers(some, "p") == numbers(some, "g") != []
    assert not numbers(some, "s")


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 4000), st.integers(1, 4))
def test_what_stays_fits_together(units: list[int], quota_bytes: int, uses: int) -> None:
    order = [trained(number, each) for number, each in enumerate(units)]
    staying = chosen(order, quota_bytes, uses)
    sizes = {"p": 16, "s": 32, "g": 16}
    assert sum(sizes[key[0]] * units[int(key[1:])] for key in staying) <= quota_bytes


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.data())
def test_a_larger_quota_keeps_no_less(units: list[int], data: st.DataObject) -> None:
    order = [trained(number, each) for number, each in enumerate(units)]
    less = data.draw(st.integers(0, 64 * sum(units)))
    more = data.draw(st.integers(less, 64 * sum(units)))
    sizes = {"p": 16, "s": 32, "g": 16}

    def kept(quota_bytes: int) -> int:
        return sum(sizes[key[0]] * units[int(key[1:])] for key in chosen(order, quota_bytes))

    assert kept(more) >= kept(less)
