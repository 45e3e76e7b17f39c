"""Processes that are killed at random moments, and what the next one finds: `tests.fault.crashes`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.forked_programs import run_program
from tests.sampling import IS_CI

_MOMENTS = {
    "flushing",
    "between",
    "put",
    "replace",
    "write",
    "evict",
    "get",
    "drop",
    "rename",
    "closed",
    "flush others",
}


def kill(
    trials: int, directory: Path, timeout_s: float, program: str = "tests.fault.crashes"
) -> dict[str, int]:
    """Kill so many workers; return what they were at."""
    words = ("--trials", str(trials), str(directory))
    ended = run_program(program, *words, timeout_s=timeout_s)
    assert ended.returncode == 0, ended.stderr[-4000:]
    moments: dict[str, int] = json.loads(ended.stdout.splitlines()[-1])
    assert sum(moments.values()) == trials
    assert set(moments) <= _MOMENTS | {"opening"}
    return moments


def test_a_killed_process_leaves_exactly_what_a_flush_left(tmp_path: Path) -> None:
    moments = kill(24 if IS_CI else 40, tmp_path, timeout_s=110)
    assert moments.get("flushing", 0) > 0, "no worker was killed in a flush: this shows little"


def test_a_killed_process_leaves_of_its_crates_what_a_flush_left(tmp_path: Path) -> None:
    moments = kill(16 if IS_CI else 40, tmp_path, timeout_s=110, program="tests.fault.crate_crashes")
    assert moments.get("flushing", 0) > 0, "no worker was killed in a flush: this shows little"


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_killed_processes_leave_of_their_crates_what_a_flush_left(tmp_path: Path) -> None:
    moments = kill(1000, tmp_path, timeout_s=1700, program="tests.fault.crate_crashes")
    assert set(moments) >= {"flushing", "put", "replace", "write", "evict", "drop", "closed"}


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_killed_processes_leave_exactly_what_a_flush_left(tmp_path: Path) -> None:
    moments = kill(1000, tmp_path, timeout_s=1700)
    assert set(moments) >= {"flushing", "put", "replace", "write", "evict", "closed"}
