"""Criteo's lines: read as they are, counted over ranges, refused with file, line and fault."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from wide_deep_clicks import CriteoBatches, CriteoClicks, Vocabulary, shuffled
from wide_deep_criteo import MISSING, Scan, read_lines, scan

Line = tuple[int, list[int | None], list[int | None]]


def _with_some(base: Sequence[int | None], changed: Mapping[int, int | None]) -> list[int | None]:
    return [changed.get(field, value) for field, value in enumerate(base)]


# All fields are read in one way: a few of a line that differ say as much as all, and are drawn faster.
_numbers = st.dictionaries(st.integers(0, 12), st.none() | st.integers(-3, 10**6), max_size=5).map(
    partial(_with_some, range(13))
)
_categories = st.dictionaries(
    st.integers(0, 25), st.none() | st.sampled_from([0, 1, 2**32 - 1]), max_size=5
).map(partial(_with_some, [None, *range(24), None]))
_lines = st.lists(st.tuples(st.integers(0, 1), _numbers, _categories), min_size=1, max_size=30)


def text_of(line: Line) -> bytes:
    label, numbers, categories = line
    fields = [str(label), *("" if each is None else str(each) for each in numbers)]
    fields += ["" if each is None else f"{each:08x}" for each in categories]
    return "\t".join(fields).encode()


def some_lines(count: int, seed: int = 0) -> list[Line]:
    chance = np.random.default_rng(seed)
    return [
        (
            int(chance.integers(2)),
            [None if chance.random() < 0.2 else int(chance.integers(-2, 1000)) for _ in range(13)],
            [None if chance.random() < 0.1 else int(chance.zipf(1.5)) % 2**32 for _ in range(26)],
        )
        for _ in range(count)
    ]


def write(path: Path, lines: Sequence[Line], end: bytes = b"\n") -> Path:
    path.write_bytes(b"".join(text_of(line) + end for line in lines))
    return path


def same(first: Scan, second: Scan) -> bool:
    """Say whether two scans found the same, but for the records."""
    return np.array_equal(first.largest, second.largest) and all(
        np.array_equal(ours.values, theirs.values) and np.array_equal(ours.counts, theirs.counts)
        for ours, theirs in zip(first.counts, second.counts, strict=True)
    )


# ---------------------------------------------------------------------- what is read


@given(
    lines=_lines,
    in_record=st.integers(1, 7),
    ranges=st.integers(1, 24),
    end=st.sampled_from([b"\n", b"\r\n"]),
)
def test_every_line_is_in_one_record_and_counted_once_whatever_the_ranges(
    lines: list[Line], in_record: int, ranges: int, end: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write(tmp_path_factory.mktemp("criteo") / "train.txt", lines, end)
    found = scan([path], in_record, range_bytes=path.stat().st_size // ranges)
    assert all(1 <= record.lines <= in_record for record in found.records)
    read = [read_lines(path, record.offset, 0, record.lines) for record in found.records]
    expected = [
        [
            label,
            *(np.nan if n is None else n for n in numbers),
            *(MISSING if c is None else c for c in categories),
        ]
        for label, numbers, categories in lines
    ]
    rows = [np.column_stack([each.labels, each.numbers, each.categories]) for each in read]
    assert np.array_equal(np.concatenate(rows), np.array(expected, float), equal_nan=True)
    for field, counts in enumerate(found.counts):
        there = collections.Counter(row[14 + field] for row in expected)
        assert dict(zip(counts.values.tolist(), counts.counts.tolist(), strict=True)) == there
    for field, largest in enumerate(found.largest):
        assert largest == max(
            (n for _, numbers, _ in lines if (n := numbers[field]) is not None), default=-np.inf
        )


def test_the_number_of_processes_changes_nothing(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"day_{day}", some_lines(40, day)) for day in range(2)]
    alone, together = (scan(paths, 7, workers, range_bytes=2000) for workers in (0, 2))
    assert same(alone, together)
    assert alone.records == together.records
    assert {record.file for record in alone.records} == {0, 1}


def test_a_last_line_without_an_end_is_one(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join(map(text_of, some_lines(3))))
    assert [record.lines for record in scan([path], 2).records] == [2, 1]


# ---------------------------------------------------------------------- what is refused

GOOD = text_of(some_lines(1)[0])
FIELDS = GOOD.split(b"\t")


def _with(field: int, text: bytes) -> bytes:
    return b"\t".join([*FIELDS[:field], text, *FIELDS[field + 1 :]])


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (b"", "has 1 fields between tabs; Criteo's have 40"),
        (b"\t".join(FIELDS[1:]), "has 39 fields"),
        (GOOD + b"\t", "has 41 fields"),
        (_with(0, b"2"), "the label is '2'; accepted: 0 or 1"),
        (_with(0, b""), "the label is ''"),
        (_with(1, b"1.5"), "I1 is '1.5'; accepted: a whole number or nothing"),
        (_with(13, b"1_000"), "I13 is '1_000'"),
        (_with(2, b"9" * 19), "I2 is '9999999999999999999'"),
        (_with(3, " \u0661".encode()), "I3 is ' \\u0661'"),
        (_with(14, b"xyz"), "C1 is 'xyz'; accepted: 1 to 8 hexadecimal digits or nothing"),
        (_with(39, b"123456789"), "C26 is '123456789'"),
        (_with(20, b"\x00\xff"), "C7 is '\\x00\\ufffd'"),
        (b"1" * 100_000, "is longer than 4096 bytes"),
    ],
)  # fmt: skip
def test_a_hostile_line_is_named_with_file_number_and_fault(bad: bytes, fault: str, tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join([*[GOOD] * 9, bad, GOOD]))
    for range_bytes in (2**20, 300):
        with pytest.raises(ValueError, match=r"train\.txt, line 10: ") as caught:
            scan([path], 4, range_bytes=range_bytes)
        assert fault in str(caught.value)
    with pytest.raises(ValueError, match=r"train\.txt, line 10: "):
        read_lines(path, len(GOOD) + 1, 5, 5)


def test_a_hostile_line_is_named_from_another_process_as_well(tmp_path: Path) -> None:
    path = tmp_path / "train.txt"
    path.write_bytes(b"\n".join([*[GOOD] * 9, b"0\tx", GOOD]))
    with pytest.raises(ValueError, match=r"train\.txt, line 10: has 2 fields"):
        scan([path], 4, workers=1)


def test_a_file_that_shrinks_under_its_reader_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "train.txt", some_lines(5))
    with pytest.raises(ValueError, match=r"train\.txt has changed while it was used: 3 of 4 lines at 0"):
        read_lines(path, 0, 2, 4)


# ---------------------------------------------------------------------- ids and weights


def test_a_category_needs_more_than_the_threshold_to_have_an_id_of_its_own(tmp_path: Path) -> None:
    lines: list[Line] = [(0, [4, *[None] * 12], [7 if n < 5 else 9, *[1] * 25]) for n in range(9)]
    path = write(tmp_path / "train.txt", lines)
    vocabulary = Vocabulary(scan([path], 9), threshold=4)
    assert vocabulary.size == 39 + 1 + 25  # 7 occurs 5 times, 9 four times
    ids = vocabulary.batch(read_lines(path, 0, 0, 9)).ids
    assert ids[:, 13].tolist() == [39] * 5 + [13] * 4
    assert ids[0, 14:].tolist() == list(range(40, 65))
    assert ids[:, :13].tolist() == [list(range(13))] * 9
    never = Vocabulary(scan([path], 9), threshold=9)
    assert never.size == 39
    assert never.batch(read_lines(path, 0, 0, 1)).ids[0].tolist() == list(range(39))


def test_a_number_is_divided_by_the_largest_and_0_where_there_is_none(tmp_path: Path) -> None:
    numbers: list[list[int | None]] = [[8, None, -3, 0], [2, None, -4, 0], [None, None, None, 0]]
    lines: list[Line] = [(1, [*each, *[10] * 9], [None] * 26) for each in numbers]
    path = write(tmp_path / "train.txt", lines)
    batch = Vocabulary(scan([path], 9)).batch(read_lines(path, 0, 0, 3))
    assert batch.weights[:, :4].tolist() == [[1, 0, 0, 0], [0.25, 0, 0, 0], [0, 0, 0, 0]]
    assert batch.weights[:, 4:].unique().tolist() == [1]
    assert [each.dtype for each in batch] == [torch.int64, torch.float32, torch.float32]


# ---------------------------------------------------------------------- batches


def _clicks(tmp_path: Path, count: int = 95, in_record: int = 10) -> CriteoClicks:
    path = write(tmp_path / "train.txt", some_lines(count))
    return CriteoClicks.of([path], scan([path], in_record), threshold=2)


@pytest.mark.parametrize("batch_size", [1, 7, 10, 64, 1000])
def test_batches_hold_the_lines_of_their_records_in_order(batch_size: int, tmp_path: Path) -> None:
    clicks = _clicks(tmp_path)
    records = shuffled(clicks.trained, seed=1, epoch=1)
    expected = [
        clicks.vocabulary.batch(read_lines(clicks.paths[0], record.offset, 0, record.lines)).ids
        for record in records
    ]
    batches = CriteoBatches(clicks, records, batch_size, is_rest_left_out=False)
    found = [batches[number].ids for number in range(len(batches))]
    assert {len(ids) for ids in found[:-1]} <= {batch_size}
    assert torch.equal(torch.cat(found), torch.cat(expected))
    full = CriteoBatches(clicks, records, batch_size, is_rest_left_out=True)
    assert len(full) == len(torch.cat(expected)) // batch_size


def test_no_record_is_both_trained_and_tested_on(tmp_path: Path) -> None:
    clicks = _clicks(tmp_path)
    assert [len(clicks.trained), len(clicks.tested)] == [9, 1]
    assert set(clicks.trained).isdisjoint(clicks.tested)
    assert sum(record.lines for record in [*clicks.trained, *clicks.tested]) == 95


def test_an_epoch_has_an_order_of_its_own(tmp_path: Path) -> None:
    records = _clicks(tmp_path).trained
    first, again, other = (shuffled(records, seed=0, epoch=epoch) for epoch in (1, 1, 2))
    assert first == again != other
    assert sorted(first) == sorted(other) == sorted(records)


def test_one_record_is_too_few(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="95 lines in 1 records"):
        _clicks(tmp_path, in_record=1000)
