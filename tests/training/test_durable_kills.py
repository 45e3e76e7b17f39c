"""Training that is killed at any moment goes on from its last checkpoint and ends as if nothing had been."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from tests.training.durable_victim import OUTCOME
from tests.training.twins import same

ROOT = Path(__file__).parents[2]


def kill(folder: Path, seed: int, kills: int, *layouts: str, subject: str = "dense") -> Counter[str]:
    """Let trainings be killed; check how each of them ended; return what the kills hit, by phase."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    victim = [
        sys.executable,
        "-m",
        "tests.training.durable_victim",
        subject,
        str(folder),
        str(seed),
        str(kills),
    ]
    done = subprocess.run([*victim, *layouts], check=False, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    expected = torch.load(folder / "expected.pt")
    outcomes = sorted(folder.glob(f"*/{OUTCOME}"))
    assert len(outcomes) == len(list(folder.glob("training-*")))
    for outcome in outcomes:
        assert_same(expected, torch.load(outcome), outcome.parent.name)
    hits = Counter(line.split()[1] for line in (folder / "kills.txt").read_text().splitlines())
    assert hits.total() == kills
    return hits


def assert_same(expected: object, found: object, where: str) -> None:
    """Compare nested lists and dicts of tensors and numbers, bit for bit."""
    assert type(expected) is type(found), where
    if isinstance(expected, dict):
        assert isinstance(found, dict)
        assert expected.keys() == found.keys(), where
        for key, value in expected.items():
            assert_same(value, found[key], f"{where}/{key}")
    elif isinstance(expected, list | tuple):
        assert isinstance(found, list | tuple)
        assert len(expected) == len(found), where
        for number, (one, other) in enumerate(zip(expected, found, strict=True)):
            assert_same(one, other, f"{where}/{number}")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(found, torch.Tensor)
        assert same(expected, found), where
    else:
        assert expected == found, where


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["disk", "three"])
def test_twenty_kills_leave_no_trace(layout: str, tmp_path: Path) -> None:
    kill(tmp_path, 1, 20, layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "subject"), [("disk", "tables"), ("three", "tables"), ("three", "hot tables")]
)
def test_twenty_kills_leave_no_trace_in_tables(layout: str, subject: str, tmp_path: Path) -> None:
    kill(tmp_path, 2, 20, layout, subject=subject)


@pytest.mark.slow
def test_kills_leave_no_trace_where_the_host_steps_during_backward(tmp_path: Path) -> None:
    kill(tmp_path, 3, 6, "three", subject="stepped on the host")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", ["tables", "hot tables"])
@pytest.mark.parametrize("layouts", [("disk",), ("disk", "three")], ids="-".join)
def test_hundreds_of_kills_leave_no_trace_in_tables(
    layouts: tuple[str, ...], subject: str, tmp_path: Path
) -> None:
    hits = kill(tmp_path, 200, 200, *layouts, subject=subject)
    assert set(hits) >= {"opening", "forward", "backward", "step", "checkpoint", "evict"}


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layouts", [("disk",), ("three",), ("disk", "three")], ids="-".join)
def test_hundreds_of_kills_leave_no_trace(layouts: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    hits = kill(tmp_path, 100 + seed, 200, *layouts)
    assert set(hits) >= {"opening", "forward", "backward", "step", "checkpoint", "evict"}
