"""Turns, medians and ratios, and the peer that moves raw bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from bench.measure import Spread, percentile, ratios, take_turns
from bench.rawdisk import RawDisk

PAGE = 4096


def run(name: str, log: list[str], seconds: float = 1.0) -> Callable[[], Mapping[str, float]]:
    def work() -> Mapping[str, float]:
        log.append(name)
        return {name: seconds}

    return work


def test_runs_take_turns_and_none_is_always_first() -> None:
    log: list[str] = []
    take_turns([run("a", log), run("b", log)], repeats=3, warmups=0)
    assert log == ["a", "b", "b", "a", "a", "b"]


def test_warm_ups_run_and_do_not_count() -> None:
    log: list[str] = []
    seconds = take_turns([run("a", log)], repeats=2, warmups=3)
    assert len(log) == 5
    assert seconds == {"a": [1.0, 1.0]}


@pytest.mark.parametrize(("repeats", "warmups"), [(0, 1), (1, -1)])
def test_rounds_that_cannot_be_are_refused_with_their_numbers(repeats: int, warmups: int) -> None:
    with pytest.raises(ValueError, match=f"{repeats} and {warmups}"):
        take_turns([], repeats=repeats, warmups=warmups)


def test_a_ratio_is_taken_round_by_round() -> None:
    # The third round was slow for both: medians of seconds would not show that ours takes half.
    assert ratios([1, 2, 50], [2, 4, 100]) == Spread(0.5, 0.5, 0.5, 3)


def test_rounds_without_a_partner_are_refused() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ratios([1, 2], [1])


def test_a_spread_prints_its_median_and_its_range() -> None:
    assert str(Spread.of([3.0, 1.0, 2.0])) == "2 (1-3, n=3)"
    assert str(Spread.of([2.0])) == "2"


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 5), (51, 6), (99, 10), (100, 10)])
def test_a_percentile_is_a_value_that_was_measured(percent: float, expected: float) -> None:
    assert percentile([10, 9, 8, 7, 6, 5, 4, 3, 2, 1], percent) == expected


def test_the_raw_disk_reads_back_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    with RawDisk(path, 8 * PAGE, threads=2, block_bytes=PAGE) as raw:
        written = path.read_bytes()
        assert len(set(written)) > 100  # noise, not zeros
        path.write_bytes(written[::-1])
        assert raw.read() > 0
        assert raw.write() > 0
    assert path.read_bytes() == written[::-1]


@pytest.mark.parametrize("share", [0.0, 0.25, 4 / 7, 1.0])
def test_a_mixed_run_reads_its_share_and_writes_the_rest(
    tmp_path: Path, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: dict[str, list[int]] = {"_read_block": [], "_write_block": []}
    with RawDisk(tmp_path / "raw", 28 * PAGE, threads=2, block_bytes=PAGE) as raw:
        for name, offsets in moved.items():
            monkeypatch.setattr(raw, name, offsets.append)
        raw.mix(share)
    assert len(moved["_read_block"]) == round(28 * share)
    assert sorted(moved["_read_block"] + moved["_write_block"]) == list(range(0, 28 * PAGE, PAGE))


def test_a_short_transfer_is_an_error_not_a_faster_disk(tmp_path: Path) -> None:
    path = tmp_path / "raw"
    with RawDisk(path, 4 * PAGE, threads=1, block_bytes=PAGE) as raw:
        path.write_bytes(b"short")
        with pytest.raises(OSError, match="read of 4096 bytes moved"):
            raw.read()


def test_bytes_that_are_not_whole_blocks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not whole blocks"):
        RawDisk(tmp_path / "raw", PAGE + 1, threads=1, block_bytes=PAGE)
