"""Clicks with a known cause: ids as frequent as in real data, and a planted model that draws the labels.

Each of 26 fields has ids of its own, drawn by Zipf's law; 13 more fields have one id each, with a weight.
Every id has an effect, which a hash of it decides, and a click has the probability

    sigmoid(BIAS + sum over fields of weight * effect(id)).

So the best that any model can reach is known: the AUC of these very probabilities.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from wide_deep_steps import Batch

Integers = NDArray[np.int64]
Floats = NDArray[np.float64]

DENSE_FIELDS, CATEGORICAL_FIELDS = 13, 26
MOST_IDS = 2**36  # the square of a field's has to fit into 64 bits
BIAS, EFFECT = -1.0, 0.3


class Stream(NamedTuple):
    """A part of the clicks that shares no line with another: number 0 is tested on, and epochs follow."""

    number: int
    batches: int


# ---------------------------------------------------------------------- Zipf's law


class Zipf:
    """Numbers from 1 to ``count``, the k-th with a probability in proportion to ``k ** -exponent``.

    By rejection from the inverse of an integral, which takes no table, however many numbers there are
    (Hörmann and Derflinger, Rejection-inversion to generate variates from monotone discrete distributions,
    1996).

    Args:
        count: the highest number, at least 1.
        exponent: at least 0, where all numbers are equally likely.
    """

    def __init__(self, count: int, exponent: float) -> None:
        self._count = count
        self._exponent = exponent
        least, most = (self._integral(np.array(x)) for x in (1.5, count + 0.5))
        self._low, self._high = float(least) - 1.0, float(most)
        self._sure = 2.0 - float(self._inverse(self._integral(np.array(2.5)) - 2.0**-exponent))

    def draw(self, chance: np.random.Generator, size: int) -> Integers:
        """Return ``size`` numbers."""
        drawn = np.empty(size, np.int64)
        open_places = np.arange(size)
        while len(open_places):
            area = chance.uniform(self._low, self._high, len(open_places))
            point = self._inverse(area)
            number = np.clip(np.rint(point), 1, self._count)
            is_taken = number - point <= self._sure
            is_taken |= area >= self._integral(number + 0.5) - number**-self._exponent
            drawn[open_places[is_taken]] = number[is_taken].astype(np.int64)
            open_places = open_places[~is_taken]
        return drawn

    def _integral(self, x: Floats) -> Floats:
        power = 1.0 - self._exponent
        return np.log(x) if power == 0 else np.expm1(power * np.log(x)) / power

    def _inverse(self, area: Floats) -> Floats:
        power = 1.0 - self._exponent
        return np.exp(area) if power == 0 else np.exp(np.log1p(power * area) / power)


def scattered(numbers: Integers, count: int) -> Integers:
    """Map numbers from 1 to ``count`` to 0 to ``count - 1``, one to one, so that neighbours are far apart."""
    stride = max(1, round(count * (math.sqrt(5) - 1) / 2))
    while math.gcd(stride, count) > 1:
        stride += 1
    return numbers * stride % count


# ---------------------------------------------------------------------- the planted model


def hashed(ids: Integers, seed: int) -> NDArray[np.uint64]:
    """Return 64 bits for each id (SplitMix64's finalizer, from a state that the seed and the id make)."""
    bits = (ids.astype(np.uint64) + np.uint64(seed % 2**32 << 32)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    return bits ^ (bits >> np.uint64(31))


def effects(ids: Integers, seed: int) -> Floats:
    """Return the effect of each id: as if drawn from a normal distribution, without a table (Box-Muller)."""
    bits = hashed(ids, seed)
    first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32
    second = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) / 2**32
    normal: Floats = EFFECT * np.sqrt(-2 * np.log(first)) * np.cos(2 * math.pi * second)
    return normal


@dataclass(frozen=True)
class PlantedClicks:
    """The clicks.

    Attributes:
        vocabulary: how many ids there are; the 26 fields share what the 13 leave.
        batch_size: lines in a batch.
        exponent: of Zipf's law; Criteo's fields have about 1.05.
        seed: of effects and lines.
    """

    vocabulary: int
    batch_size: int
    exponent: float = 1.05
    seed: int = 0

    def __post_init__(self) -> None:
        least = DENSE_FIELDS + CATEGORICAL_FIELDS
        if not least <= self.vocabulary <= MOST_IDS:
            raise ValueError(f"the vocabulary must be {least} to {MOST_IDS:,} ids, not {self.vocabulary:,}")
        if self.exponent < 0:
            raise ValueError(f"the exponent of Zipf's law must be at least 0, not {self.exponent:g}")

    @property
    def name(self) -> str:
        """What they are called in what is printed."""
        return f"generated clicks (Zipf {self.exponent:g}, seed {self.seed})"

    def batch(self, stream: int, number: int) -> Batch:
        """Return a batch: the same for the same numbers, whoever asks when."""
        chance = np.random.default_rng([self.seed, stream, number])
        ids = np.empty((self.batch_size, DENSE_FIELDS + CATEGORICAL_FIELDS), np.int64)
        ids[:, :DENSE_FIELDS] = np.arange(DENSE_FIELDS)
        weights = np.ones(ids.shape)
        weights[:, :DENSE_FIELDS] = chance.random((self.batch_size, DENSE_FIELDS))
        for field in range(CATEGORICAL_FIELDS):
            first, end = (self._first_of(each) for each in (field, field + 1))
            drawn = Zipf(end - first, self.exponent).draw(chance, self.batch_size)
            ids[:, DENSE_FIELDS + field] = first + scattered(drawn, end - first)
        probabilities = 1 / (1 + np.exp(-self._logits(ids, weights)))
        labels = chance.random(self.batch_size) < probabilities
        return Batch(
            torch.from_numpy(ids), torch.from_numpy(weights).float(), torch.from_numpy(labels).float()
        )

    def planted_logits(self, batch: Batch) -> Tensor:
        """Return what the planted model says of lines: nobody can do better."""
        return torch.from_numpy(self._logits(batch.ids.numpy(), batch.weights.double().numpy()))

    def _logits(self, ids: Integers, weights: Floats) -> Floats:
        logits: Floats = BIAS + (effects(ids, self.seed) * weights).sum(1)
        return logits

    def _first_of(self, field: int) -> int:
        return DENSE_FIELDS + (self.vocabulary - DENSE_FIELDS) * field // CATEGORICAL_FIELDS


class PlantedBatches(Dataset[Batch]):
    """Batches of a stream, by number; workers of a loader make the same ones.

    Args:
        clicks: what makes them.
        stream: which, and how many.
    """

    def __init__(self, clicks: PlantedClicks, stream: Stream) -> None:
        self._clicks = clicks
        self._stream = stream

    def __len__(self) -> int:
        return self._stream.batches

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        return self._clicks.batch(self._stream.number, number)
