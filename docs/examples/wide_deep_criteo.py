"""The display advertising data of Criteo, as it is published: lines of text, read as they are needed.

A line is a label, 13 whole numbers and 26 categories of 8 hexadecimal digits, between tabs; any but the label
may be missing.  `scan` reads a file once, and says where its records of some lines begin, how often there is
which category, and the largest number of each field.  `read_lines` reads lines of a record.

Knows nothing of ids or batches: `wide_deep_clicks` does.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

DENSE_FIELDS, CATEGORICAL_FIELDS = 13, 26
MISSING = 2**32
"""The category of what is missing: one above all that 8 digits can say."""

RANGE_BYTES = 2**26  # what one worker scans at a time
LONGEST_LINE = 4096
_LINE = re.compile(
    rb"([01])" + rb"\t(-?[0-9]{1,18})?" * DENSE_FIELDS + rb"\t([0-9a-fA-F]{1,8})?" * CATEGORICAL_FIELDS
)
_NUMBER, _CATEGORY = re.compile(rb"(-?[0-9]{1,18})?"), re.compile(rb"([0-9a-fA-F]{1,8})?")
_FIELDS = (
    ("the label", re.compile(rb"[01]"), "0 or 1"),
    *((f"I{field + 1}", _NUMBER, "a whole number or nothing") for field in range(DENSE_FIELDS)),
    *(
        (f"C{field + 1}", _CATEGORY, "1 to 8 hexadecimal digits or nothing")
        for field in range(CATEGORICAL_FIELDS)
    ),
)
"""Name, pattern and description of each field, for messages: one that does not match is at fault."""


class Lines(NamedTuple):
    """Lines of a file.

    Attributes:
        labels: ``(lines,)``, 0 or 1.
        numbers: ``(lines, 13)``; ``nan`` is missing.
        categories: ``(lines, 26)``; `MISSING` is missing.
    """

    labels: NDArray[np.float32]
    numbers: NDArray[np.float64]
    categories: NDArray[np.int64]


class Record(NamedTuple):
    """Lines of a file that lie one after another.

    Attributes:
        file: number of the file.
        offset: of its first byte.
        lines: how many.
    """

    file: int
    offset: int
    lines: int


class Counts(NamedTuple):
    """Categories of one field.

    Attributes:
        values: ascending.
        counts: how often there is each.
    """

    values: NDArray[np.int64]
    counts: NDArray[np.int64]


@dataclass(frozen=True)
class Scan:
    """What files hold.

    Attributes:
        records: in the order of the files.
        counts: of each categorical field.
        largest: number of each dense field; ``-inf`` where there is none.
    """

    records: Sequence[Record]
    counts: Sequence[Counts]
    largest: NDArray[np.float64]


# ---------------------------------------------------------------------- lines


def read_lines(path: Path, offset: int, skipped: int, count: int) -> Lines:
    """Read lines of a record.

    Args:
        path: of the file.
        offset: where the record begins.
        skipped: its lines before the first that is wanted.
        count: how many are wanted.

    Raises:
        OSError: the file cannot be read.
        ValueError: a line is not one of Criteo's, or there are no more; names file, line and fault.
    """
    with path.open("rb") as file:
        file.seek(offset)
        texts = list(itertools.islice(_texts(file), skipped + count))[skipped:]
    if len(texts) < count:
        raise ValueError(f"{path} has changed while it was used: {len(texts)} of {count} lines at {offset}")
    return _parsed(path, offset, skipped, texts)


def _texts(file: BinaryIO) -> Iterator[bytes]:
    while text := file.readline(LONGEST_LINE + 1):
        yield text


def _parsed(path: Path, offset: int, before: int, texts: Sequence[bytes]) -> Lines:
    """Read lines, of which the first is ``before`` lines behind ``offset``."""
    labels = np.empty(len(texts), np.float32)
    numbers = np.empty((len(texts), DENSE_FIELDS))
    categories = np.empty((len(texts), CATEGORICAL_FIELDS), np.int64)
    for row, text in enumerate(texts):
        found = _LINE.fullmatch(text.rstrip(b"\r\n"))
        if found is None or len(text) > LONGEST_LINE:
            number = _line_number(path, offset) + before + row
            raise ValueError(f"{path}, line {number}: {_fault(text)}")
        label, *fields = found.groups()
        labels[row] = int(label)
        numbers[row] = [np.nan if each is None else int(each) for each in fields[:DENSE_FIELDS]]
        categories[row] = [MISSING if each is None else int(each, 16) for each in fields[DENSE_FIELDS:]]
    return Lines(labels, numbers, categories)


def _line_number(path: Path, offset: int) -> int:
    with path.open("rb") as file:
        chunks = iter(lambda: file.read(min(2**20, offset - file.tell())), b"")
        return 1 + sum(chunk.count(b"\n") for chunk in chunks)


def _fault(text: bytes) -> str:
    """Say what is wrong with a line."""
    if len(text) > LONGEST_LINE:
        return f"is longer than {LONGEST_LINE} bytes"
    fields = text.rstrip(b"\r\n").split(b"\t")
    if len(fields) != len(_FIELDS):
        return f"has {len(fields)} fields between tabs; Criteo's have {len(_FIELDS)}, the label first"
    for field, (name, pattern, accepted) in zip(fields, _FIELDS, strict=True):
        if not pattern.fullmatch(field):
            return f"{name} is {ascii(field.decode('utf-8', 'replace'))[:60]}; accepted: {accepted}"
    raise AssertionError(text)


# ---------------------------------------------------------------------- files


def scan(
    paths: Sequence[Path], lines_in_record: int, workers: int = 0, range_bytes: int = RANGE_BYTES
) -> Scan:
    """Read files from end to end; the result does not depend on the number of workers.

    Args:
        paths: the files.
        lines_in_record: a record has so many lines, but where a range of bytes ends.
        workers: processes that read ranges; 0: this one does.
        range_bytes: what is read at a time.

    Raises:
        OSError: a file cannot be read.
        ValueError: a line is not one of Criteo's; names file, line and fault.
    """
    ranges = [
        (path, number, begin, range_bytes, lines_in_record)
        for number, path in enumerate(paths)
        for begin in range(0, path.stat().st_size, range_bytes)
    ]
    if workers == 0:
        return _joined(map(_scan_range, ranges))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return _joined(pool.map(_scan_range, ranges))


def _scan_range(task: tuple[Path, int, int, int, int]) -> Scan:
    """Scan the lines that begin within a range of bytes."""
    path, number, begin, range_bytes, lines_in_record = task
    records: list[Record] = []
    parts: list[Lines] = []
    with path.open("rb") as file:
        if begin:
            file.seek(begin - 1)
            while (skipped := file.readline(LONGEST_LINE)) and not skipped.endswith(b"\n"):
                pass
        while (offset := file.tell()) < begin + range_bytes:
            texts = _record_texts(file, begin + range_bytes, lines_in_record)
            if not texts:
                break
            parts.append(_parsed(path, offset, 0, texts))
            records.append(Record(number, offset, len(texts)))
    categories = np.concatenate(
        [np.empty((0, CATEGORICAL_FIELDS), np.int64), *(part.categories for part in parts)]
    )
    counts = [Counts(*np.unique(column, return_counts=True)) for column in categories.T]
    numbers = np.concatenate([np.full((1, DENSE_FIELDS), -np.inf), *(part.numbers for part in parts)])
    return Scan(records, counts, np.fmax.reduce(numbers))


def _record_texts(file: BinaryIO, end: int, count: int) -> list[bytes]:
    texts: list[bytes] = []
    while len(texts) < count and file.tell() < end and (text := file.readline(LONGEST_LINE + 1)):
        texts.append(text)
    return texts


def _joined(scans: Iterable[Scan]) -> Scan:
    records: list[Record] = []
    counts = [Counts(np.empty(0, np.int64), np.empty(0, np.int64))] * CATEGORICAL_FIELDS
    largest = np.full(DENSE_FIELDS, -np.inf)
    for each in scans:
        records += each.records
        counts = [_sum(ours, theirs) for ours, theirs in zip(counts, each.counts, strict=True)]
        largest = np.maximum(largest, each.largest)
    return Scan(records, counts, largest)


def _sum(first: Counts, second: Counts) -> Counts:
    values, places = np.unique(np.concatenate([first.values, second.values]), return_inverse=True)
    counts = np.zeros(len(values), np.int64)
    np.add.at(counts, places, np.concatenate([first.counts, second.counts]))
    return Counts(values, counts)
