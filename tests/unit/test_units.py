"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierstore.errors import ConfigError
from tierstore.units import GIB, KIB, MIB, TIB, align_up, format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("512GB", 512 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("300MB", 300 * 2**20),
        ("64KiB", 2**16),
        ("0.5GB", 2**29),
        ("2TB", 2**41),
        ("2TiB", 2**41),
        ("1KB", 2**10),
        ("7B", 7),
        ("5.GB", 5 * 2**30),
        (".5KB", 512),
        ("10.0GB", 10 * 2**30),
        ("3 MiB", 3 * 2**20),
        ("0GB", 0),
        (0, 0),
        (123, 123),
    ],
)
def test_a_size_is_an_int_of_bytes_or_a_number_with_a_unit(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("unit", ["K", "M", "G", "T"])
def test_decimal_and_binary_units_mean_the_same(unit: str) -> None:
    assert parse_bytes(f"3{unit}B") == parse_bytes(f"3{unit}iB")


@pytest.mark.parametrize(
    "wrong",
    ["", " ", "1", "GB", "-1GB", "5GBfoo", "foo5GB", "5gb", "1e3GB", "nanGB", "infGB", "1..5GB", "1PB",
     "5GB\n", "\u0665GB", -1, True, False, 1.5, None, b"5GB", [1], "9" * 400 + "GB"],
)  # fmt: skip
def test_anything_else_is_refused_quoting_it_and_saying_what_is_accepted(wrong: object) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_bytes(wrong)  # type: ignore[arg-type]
    assert repr(wrong)[:120] in str(refused.value)
    assert "'1.5GiB'" in str(refused.value)
    assert isinstance(refused.value, ValueError)


@given(st.integers(min_value=0, max_value=2**70))
def test_an_int_of_bytes_is_that_many_bytes(nbytes: int) -> None:
    assert parse_bytes(nbytes) == nbytes


@given(st.integers(min_value=0, max_value=4095), st.sampled_from("KMGT"))
def test_quarters_of_a_unit_are_exact(quarters: int, unit: str) -> None:
    factor = {"K": KIB, "M": MIB, "G": GIB, "T": TIB}[unit]
    assert parse_bytes(f"{quarters / 4}{unit}B") == quarters * factor // 4


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (336 * 2**20, "336.0 MiB"),
        (80 * 2**30, "80.0 GiB"),
        (3 * 2**39, "1.5 TiB"),
        (-2048, "-2.0 KiB"),
    ],
)
def test_bytes_are_printed_with_the_largest_unit_that_leaves_one_or_more(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(min_value=0, max_value=2**60))
def test_a_printed_size_can_be_read_back_to_within_its_digits(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.06)


@given(st.integers(min_value=0, max_value=2**60), st.integers(min_value=1, max_value=2**20))
def test_aligning_up_gives_the_next_multiple(nbytes: int, alignment_bytes: int) -> None:
    aligned = align_up(nbytes, alignment_bytes)
    assert aligned % alignment_bytes == 0
    assert 0 <= aligned - nbytes < alignment_bytes
