"""Random numbers that are looked up: the published words, and independence of what is made beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.tables import ConstantRows, InitialRows, NormalRows, UniformRows
from tierstore.tables.philox import normal, philox4x32, uniform

Maker = Callable[[int, npt.NDArray[np.int64], int], npt.NDArray[np.float64]]

# Lines "philox4x32 10" of tests/kat_vectors in Random123, the authors' own: counter, key, words.
_KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

_seeds = st.integers(0, 2**64 - 1)
_ids = st.lists(st.integers(0, 2**40 - 1), max_size=20).map(lambda ids: np.array(ids, dtype=np.int64))


def _words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


def _plainly(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it, in integers of Python."""
    first, second, third, fourth = counter
    for number in range(10):
        left, right = first * 0xD2511F53, third * 0xCD9E8D57
        keys = [
            (start + number * step) % 2**32 for start, step in zip(key, (0x9E3779B9, 0xBB67AE85), strict=True)
        ]
        first, second, third, fourth = (
            (right >> 32) ^ second ^ keys[0],
            right % 2**32,
            (left >> 32) ^ fourth ^ keys[1],
            left % 2**32,
        )
    return [first, second, third, fourth]


@pytest.mark.parametrize(("counter", "key", "words"), _KNOWN)
def test_the_words_are_those_that_its_authors_published(counter: str, key: str, words: str) -> None:
    low, high = _words(key)
    assert philox4x32(np.array(_words(counter), dtype=np.uint64), low | high << 32).tolist() == _words(words)
    assert _plainly(_words(counter), _words(key)) == _words(words)


@given(_seeds, st.integers(0, 2**62), st.integers(1, 9))
def test_a_value_is_that_of_the_counter_of_its_row_and_column(seed: int, row: int, width: int) -> None:
    made = uniform(seed, np.array([row]), width)[0]
    for column, value in enumerate(made):
        words = _plainly([row % 2**32, row >> 32, column // 4, 0], [seed % 2**32, seed >> 32])
        assert value == (words[column % 4] + 0.5) / 2**32


@given(_seeds, st.integers(0, 2**40), st.integers(1, 9))
def test_normal_values_are_those_of_box_and_muller(seed: int, row: int, width: int) -> None:
    even = uniform(seed, np.array([row]), -(-width // 4) * 4)[0]
    for column, value in enumerate(normal(seed, np.array([row]), width)[0]):
        radius, angle = even[column // 2 * 2 : column // 2 * 2 + 2]
        turned = math.sin(2 * math.pi * angle) if column % 2 else math.cos(2 * math.pi * angle)
        assert math.isclose(value, math.sqrt(-2 * math.log(radius)) * turned, rel_tol=1e-12, abs_tol=1e-15)


@pytest.mark.parametrize("make", [normal, uniform])
@given(seed=_seeds, ids=_ids, width=st.integers(1, 70))
def test_a_row_is_the_same_bits_alone_and_among_others(
    make: Maker, seed: int, ids: npt.NDArray[np.int64], width: int
) -> None:
    together = make(seed, ids, width)
    assert together.shape == (len(ids), width)
    for place in range(len(ids)):
        alone = make(seed, ids[place : place + 1], width)
        assert alone.tobytes() == together[place].tobytes()


@pytest.mark.parametrize("make", [normal, uniform])
def test_more_rows_than_one_block_are_the_same_bits(make: Maker) -> None:
    ids = np.arange(40_000)
    together = make(7, ids, 5)
    apart = np.concatenate([make(7, part, 5) for part in np.split(ids, [1, 3, 20_000, 39_999])])
    assert together.tobytes() == apart.tobytes()


@pytest.mark.parametrize("width", [3, 64])
def test_narrower_tables_of_a_seed_begin_like_wider_ones(width: int) -> None:
    ids = np.arange(50)
    assert np.array_equal(normal(1, ids, width), normal(1, ids, 100)[:, :width])


def test_normal_values_have_the_moments_of_their_distribution() -> None:
    values = normal(5, np.arange(20_000), 10)
    deviations = 1 / math.sqrt(values.size)
    assert abs(values.mean()) < 5 * deviations
    assert abs((values**2).mean() - 1) < 5 * math.sqrt(2) * deviations
    assert abs((values**4).mean() - 3) < 5 * math.sqrt(96) * deviations
    assert np.abs(values).max() < 6.8
    correlations = np.corrcoef(values, rowvar=False) - np.eye(10)
    assert np.abs(correlations).max() < 6 / math.sqrt(20_000)


def test_uniform_values_have_the_moments_of_theirs() -> None:
    values = uniform(6, np.arange(20_000), 10)
    assert values.min() > 0
    assert values.max() < 1
    assert abs(values.mean() - 0.5) < 5 * math.sqrt(1 / 12 / values.size)
    assert abs(((values - 0.5) ** 2).mean() - 1 / 12) < 5 * math.sqrt(1 / 180 / values.size)


@pytest.mark.parametrize(
    ("rows", "double"),
    [
        (NormalRows(6, torch.float32, 9), NormalRows(6, torch.float64, 9)),
        (NormalRows(6, torch.float32, 9, 3.0, 0.01), NormalRows(6, torch.float64, 9, 3.0, 0.01)),
        (UniformRows(6, torch.float32, 9, -2.0, 5.0), UniformRows(6, torch.float64, 9, -2.0, 5.0)),
    ],
)
def test_rows_are_rounded_once(rows: InitialRows, double: InitialRows) -> None:
    ids = torch.arange(500)
    assert torch.equal(rows(ids), double(ids).float())
    assert len(torch.unique(rows(ids))) > 2900


def test_rows_have_the_mean_and_the_spread_that_were_asked_for() -> None:
    ids = torch.arange(20_000)
    normals = NormalRows(10, torch.float64, 9, 3.0, 0.01)(ids)
    assert abs(normals.mean().item() - 3) < 5 * 0.01 / math.sqrt(200_000)
    assert abs(normals.std().item() - 0.01) < 5 * 0.01 / math.sqrt(400_000)
    evens = UniformRows(10, torch.float64, 9, -2.0, 5.0)(ids)
    assert -2 < evens.min() < -1.99
    assert 4.99 < evens.max() < 5


def test_constant_rows_are_their_value() -> None:
    made = ConstantRows(3, torch.bfloat16, 0.25)(torch.tensor([7, 2**39]))
    assert made.dtype == torch.bfloat16
    assert made.tolist() == [[0.25] * 3] * 2
