"""Criteo's lines as ids and weights: which category has an id of its own, and what is trained and tested on.

Ids 0 to 12 are the 13 dense fields', whose numbers are the weights, divided by the field's largest; 0 where a
number is missing.  A category that occurs more than `THRESHOLD` times has an id of its own, and the others of
its field share one: 13 to 38.  A missing category is one like any other.  Their weight is 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from wide_deep_criteo import CATEGORICAL_FIELDS, DENSE_FIELDS, Lines, Record, Scan, read_lines
from wide_deep_steps import Batch

THRESHOLD = 100
TESTED = 0.1  # the share of records that are tested on and never trained on
SPLIT_SEED = 2020


class Vocabulary:
    """The ids of categories, and the weights of numbers.

    Args:
        scan: what there is.
        threshold: how often a category has to be exceeded to have an id of its own.

    Attributes:
        size: how many ids there are.
    """

    def __init__(self, scan: Scan, threshold: int = THRESHOLD) -> None:
        self._frequent = [each.values[each.counts > threshold] for each in scan.counts]
        shared = DENSE_FIELDS + CATEGORICAL_FIELDS
        *self._firsts, self.size = accumulate(map(len, self._frequent), initial=shared)
        self._largest = np.where(scan.largest > 0, scan.largest, np.inf)

    def batch(self, lines: Lines) -> Batch:
        """Return lines as ids and weights."""
        ids = np.empty((len(lines.labels), DENSE_FIELDS + CATEGORICAL_FIELDS), np.int64)
        weights = np.ones(ids.shape)
        ids[:, :DENSE_FIELDS] = np.arange(DENSE_FIELDS)
        weights[:, :DENSE_FIELDS] = np.nan_to_num(lines.numbers / self._largest)
        for field, (first, frequent) in enumerate(zip(self._firsts, self._frequent, strict=True)):
            ids[:, DENSE_FIELDS + field] = _ids(
                lines.categories[:, field], frequent, first, DENSE_FIELDS + field
            )
        return Batch(torch.from_numpy(ids), torch.from_numpy(weights).float(), torch.from_numpy(lines.labels))


def _ids(
    categories: NDArray[np.int64], frequent: NDArray[np.int64], first: int, shared: int
) -> NDArray[np.int64]:
    places = np.searchsorted(frequent, categories)
    is_there = np.append(frequent, -1)[places] == categories
    return np.where(is_there, first + places, shared)


@dataclass(frozen=True)
class CriteoClicks:
    """Records of files, of which a share is set aside to be tested on.

    Attributes:
        paths: the files.
        vocabulary: their ids.
        trained: records that are trained on.
        tested: records that are tested on.
    """

    paths: Sequence[Path]
    vocabulary: Vocabulary
    trained: Sequence[Record]
    tested: Sequence[Record]

    @classmethod
    def of(cls, paths: Sequence[Path], scan: Scan, threshold: int = THRESHOLD) -> CriteoClicks:
        """Set records aside, the same ones every time.

        Raises:
            ValueError: there are fewer than two records.
        """
        records = scan.records
        if len(records) < 2:
            lines = sum(record.lines for record in records)
            raise ValueError(
                f"{', '.join(map(str, paths))}: {lines} lines in {len(records)} records, of which none "
                "can be set aside to be tested on: make records smaller with --record-lines"
            )
        count = max(1, round(TESTED * len(records)))
        chosen = set(np.random.RandomState(SPLIT_SEED).permutation(len(records))[:count].tolist())
        parts = [
            [each for n, each in enumerate(records) if (n in chosen) is tested] for tested in (False, True)
        ]
        return cls(paths, Vocabulary(scan, threshold), *parts)


class CriteoBatches(Dataset[Batch]):
    """Batches of records, by number; whoever asks, and however many ask, gets the same ones.

    Args:
        clicks: where they are.
        records: which, in this order.
        batch_size: lines in a batch.
        is_rest_left_out: whether lines that fill no batch are left out.
    """

    def __init__(
        self, clicks: CriteoClicks, records: Sequence[Record], batch_size: int, *, is_rest_left_out: bool
    ) -> None:
        self._clicks = clicks
        self._records = records
        self._begins = np.cumsum([0, *(record.lines for record in records)])
        self._batch_size = batch_size
        self._lines = int(self._begins[-1])
        if is_rest_left_out:
            self._lines -= self._lines % batch_size

    def __len__(self) -> int:
        return math.ceil(self._lines / self._batch_size)

    def __getitem__(self, number: int) -> Batch:
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        begin = number * self._batch_size
        end = min(begin + self._batch_size, self._lines)
        first, last = np.searchsorted(self._begins, [begin, end - 1], side="right") - 1
        parts = [self._part(place, begin, end) for place in range(first, last + 1)]
        return Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))

    def _part(self, place: int, begin: int, end: int) -> Batch:
        """Read what a record has of the lines from ``begin`` to ``end``."""
        record, before = self._records[place], int(self._begins[place])
        skipped = max(0, begin - before)
        count = min(end - before, record.lines) - skipped
        lines = read_lines(self._clicks.paths[record.file], record.offset, skipped, count)
        return self._clicks.vocabulary.batch(lines)


def shuffled(records: Sequence[Record], seed: int, epoch: int) -> list[Record]:
    """Return records in an order of chance; lines of a record stay together."""
    order = np.random.default_rng([seed, epoch]).permutation(len(records))
    return [records[place] for place in order]
