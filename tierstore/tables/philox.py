"""Random numbers that are looked up and not drawn: Philox4x32-10.

A value is a function of a seed, a row and a column and of nothing else, so any row of a table can be made
at any
time: whatever rows are made beside it, in which order, and however many rows the table has.  The generator
is that of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011), with ten
rounds.

Rules:

1. The key is the seed: its lower 32 bits, its upper 32 bits.
2. The counter is (lower 32 bits of the row, upper 32 bits of the row, column // 4, 0); the column is word
   ``column % 4``.
3. A word w stands for the number (w + 0.5) / 2**32, which is neither 0 nor 1.
4. Normal values are made of words 0 and 1, and of 2 and 3, by Box and Muller's formula, in float64: first the
   cosine, then the sine.

The words are the same everywhere.  Logarithm and sine are NumPy's, which on another processor may differ in
the last bit of a float64.

Knows NumPy alone: no tensors and no tables.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
"""Words of 32 bits, each in 64: their products need no more."""
Floats = npt.NDArray[np.float64]
Rows = npt.NDArray[np.int64]

LARGEST_SEED: Final = 2**64 - 1

_ROUNDS = 10
_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = 0x9E3779B9, 0xBB67AE85  # of the golden ratio, and of the square root of 3 - 1
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_IN_A_COUNTER = 4
_IN_A_BLOCK = 1 << 14  # counters: what a block works on stays in a core's own cache


def philox4x32(counter: Words, seed: int) -> Words:
    """Return the four words of each counter.

    Args:
        counter: words of 32 bits, ``[4, ...]``; not changed.
        seed: 0 to 2**64 - 1.

    Returns:
        words of 32 bits, of the shape of ``counter``.
    """
    first, second, third, fourth = counter
    keys = [seed & 0xFFFFFFFF, seed >> 32]
    for _ in range(_ROUNDS):
        left, right = first * _MULTIPLIERS[0], third * _MULTIPLIERS[1]
        first, third = (
            (right >> _HALF) ^ second ^ np.uint64(keys[0]),
            (left >> _HALF) ^ fourth ^ np.uint64(keys[1]),
        )
        second, fourth = right & _LOW, left & _LOW
        keys = [(key + step) & 0xFFFFFFFF for key, step in zip(keys, _KEY_STEPS, strict=True)]
    return np.stack([first, second, third, fourth])


def normal(seed: int, rows: Rows, width: int) -> Floats:
    """Return values of the normal distribution with mean 0 and variance 1.

    Args:
        seed: 0 to 2**64 - 1.
        rows: 0 or more, ``[n]``; any order, repeats allowed.
        width: columns of a row.

    Returns:
        ``[n, width]``; at most 6.8 in size, as a word has 32 bits.
    """
    values = np.empty((len(rows), width))
    for begin, end in _blocks(len(rows), width):
        first, second, third, fourth = uniform_words(seed, rows[begin:end], width)
        made = [*_box_muller(first, second), *_box_muller(third, fourth)]
        values[begin:end] = _by_columns(made, width)
    return values


def uniform(seed: int, rows: Rows, width: int) -> Floats:
    """Return values spread evenly between 0 and 1, both left out; otherwise see `normal`."""
    values = np.empty((len(rows), width))
    for begin, end in _blocks(len(rows), width):
        values[begin:end] = _by_columns(list(uniform_words(seed, rows[begin:end], width)), width)
    return values


def uniform_words(seed: int, rows: Rows, width: int) -> Floats:
    """Return the four words of the counters of each row, as numbers between 0 and 1: ``[4, n, counters]``."""
    row = rows.astype(np.uint64)[:, None]
    group = np.arange(_counters(width), dtype=np.uint64)[None, :]
    shape = np.broadcast_shapes(row.shape, group.shape)
    counter = np.zeros((4, *shape), dtype=np.uint64)
    counter[0], counter[1], counter[2] = row & _LOW, row >> _HALF, group
    return (philox4x32(counter, seed).astype(np.float64) + 0.5) * 2.0**-32


def _box_muller(radius: Floats, angle: Floats) -> tuple[Floats, Floats]:
    """Return two independent normal values for each pair of uniform ones."""
    radius = np.sqrt(-2.0 * np.log(radius))
    angle = (2.0 * np.pi) * angle
    return radius * np.cos(angle), radius * np.sin(angle)


def _by_columns(words: list[Floats], width: int) -> Floats:
    """Return what four arrays ``[n, counters]`` say, as ``[n, width]``."""
    together = np.stack(words, axis=-1)
    return together.reshape(len(together), together.shape[1] * _IN_A_COUNTER)[:, :width]


def _counters(width: int) -> int:
    """Return how many counters a row has."""
    return -(-width // _IN_A_COUNTER)


def _blocks(rows: int, width: int) -> list[tuple[int, int]]:
    """Return spans of rows that are made at a time."""
    step = max(1, _IN_A_BLOCK // _counters(width))
    return [(begin, min(begin + step, rows)) for begin in range(0, rows, step)]
