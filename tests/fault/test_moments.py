"""What threads leave that change and flush a store, when their process is killed: `tests.fault.moments`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.fault import crashes
from tests.fault.moments import NEVER, Step, judge, steps_of
from tests.forked_programs import run_program


def kill(trials: int, directory: Path, timeout_s: float, seed: int = 0) -> dict[str, int]:
    """Kill so many workers; return what they were at."""
    words = ("--trials", str(trials), "--seed", str(seed), str(directory))
    ended = run_program("tests.fault.moments", *words, timeout_s=timeout_s)
    assert ended.returncode == 0, ended.stderr[-4000:]
    moments: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    assert sum(moments.values()) == trials
    return moments


def test_what_threads_left_when_they_were_killed_was_there_at_one_moment(tmp_path: Path) -> None:
    moments = kill(20, tmp_path, timeout_s=110)
    assert moments.get("flushing, some flush before", 0) > 0, (
        "nobody was killed in a flush: this shows little"
    )


@pytest.mark.long
@pytest.mark.timeout(20_000)
def test_ten_thousand_times(tmp_path: Path) -> None:
    kill(10_000, tmp_path, timeout_s=19_000, seed=1000)


# ---------------------------------------------------------------------- the oracle itself


def test_a_line_that_a_kill_cut_off_has_not_been_said(tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    assert steps_of(journal) == [Step(0, 0, {})]
    put = '[1, {"0 a": 1}, ""]\n[2]\n'
    for text in ("", "[3, {", '[3, {"0 a": 2}, ""]'):
        journal.write_text(put + text)
        assert steps_of(journal) == [Step(0, 0, {}), Step(1, 2, {"0 a": 1})]
    journal.write_text(put + '[3, {"0 a": 2}, ""]\n[4')
    assert steps_of(journal)[2:] == [Step(3, NEVER, {"0 a": 2})]


def test_a_worker_goes_on_after_the_last_whole_line_of_its_journal(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('["flushing", {"a": 1}]\n["flu')
    assert crashes.read_journal(path) == ([{}, {"a": 1}], "flushing")
    journal = crashes.Journal(path)
    journal.say("found", {"a": 1})
    journal.close()
    assert crashes.read_journal(path) == ([{"a": 1}], "between")


_WRITES = [Step(0, 0, {}, ""), Step(10, 20, {"0 a": 1}, ""), Step(30, 40, {"0 a": 2}, "")]


def test_what_was_never_there_is_wrong() -> None:
    judge([_WRITES], {"0 a": 1}, is_one_moment=True)
    judge([_WRITES], {}, is_one_moment=True)
    for found in ({"0 a": 3}, {"0 b": 1}, {"0 a": 2, "0 b": 1}):
        with pytest.raises(AssertionError, match="had not left"):
            judge([_WRITES], found, is_one_moment=True)


@pytest.mark.parametrize("flush", ["all", "own"])
def test_what_was_there_before_a_flush_that_has_ended_is_wrong(flush: str) -> None:
    flushed = [*_WRITES, Step(50, 60, {"0 a": 2}, flush)]
    judge([flushed], {"0 a": 2}, is_one_moment=flush == "all")
    with pytest.raises(AssertionError, match="since its keys were flushed"):
        judge([flushed], {"0 a": 1}, is_one_moment=flush == "all")
    under_way = [*_WRITES, Step(50, NEVER, {"0 a": 2}, flush)]
    judge([under_way], {"0 a": 1}, is_one_moment=flush == "all")


def test_a_call_under_way_may_have_changed_something() -> None:
    life = [*_WRITES, Step(50, NEVER, {"0 a": 3}, "")]
    for value in (2, 3):
        judge([life], {"0 a": value}, is_one_moment=True)


def test_what_was_never_there_together_is_wrong() -> None:
    other = [Step(0, 0, {}, ""), Step(50, 60, {"1 a": 1}, ""), Step(70, 80, {"1 a": 2}, "")]
    judge([_WRITES, other], {"0 a": 2, "1 a": 2}, is_one_moment=True)
    judge([_WRITES, other], {"0 a": 1, "1 a": 2}, is_one_moment=False)
    with pytest.raises(AssertionError, match="together"):
        judge([_WRITES, other], {"0 a": 1, "1 a": 2}, is_one_moment=True)


def test_a_key_that_was_gone_later_may_be_gone_before_others_of_its_thread_were_flushed() -> None:
    both = {"0 a": 1, "0 b": 9}
    life = [Step(0, 0, {}), Step(10, 20, both, "own"), Step(30, 40, {"0 a": 1, "0 b": 2})]
    dropping = [*life, Step(50, 60, {"0 b": 2})]
    judge([dropping], {"0 b": 9}, is_one_moment=False)
    renaming = [*life, Step(50, 60, {"0 c": 1, "0 b": 2})]
    for steps, is_one_moment in ((dropping, True), (life, False), (renaming, False)):
        with pytest.raises(AssertionError, match="had not left"):
            judge([steps], {"0 b": 9}, is_one_moment=is_one_moment)
