"""Training that is killed at any moment goes on from its last checkpoint and ends as if nothing had been."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.forked_programs import run_program
from tests.sampling import tried
from tests.training.durable_victim import OUTCOME
from tests.training.twins import same

ROOT = Path(__file__).parents[2]
PHASES = {"opening", "forward", "backward", "step", "checkpoint", "evict", "closing"}


@dataclass(frozen=True)
class Job:
    """Trainings that are killed.

    Attributes:
        subject: of `tests.training.durable_victim`.
        layouts: of which each life has one.
        seed: of what chooses.
        kills: how many.
    """

    subject: str
    layouts: tuple[str, ...]
    seed: int
    kills: int = len(PHASES)


def kill(jobs: Mapping[Path, Job]) -> None:
    """Let trainings be killed, each job's in its folder: in one process, as importing takes it seconds."""
    told = [[each.subject, str(at), each.seed, each.kills, each.layouts] for at, each in jobs.items()]
    done = run_program("tests.training.durable_victim", json.dumps(told), timeout_s=3600)
    assert done.returncode == 0, done.stderr


def hits_of(folder: Path, job: Job) -> set[str]:
    """Check how each training in a folder ended; return the phases that the kills hit."""
    expected = torch.load(folder / "expected.pt")
    outcomes = sorted(folder.glob(f"*/{OUTCOME}"))
    assert len(outcomes) == len(list(folder.glob("training-*")))
    for outcome in outcomes:
        assert_same(expected, torch.load(outcome), outcome.parent.name)
    hits = [line.split()[1] for line in (folder / "kills.txt").read_text().splitlines()]
    assert len(hits) == job.kills
    return set(hits)


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


ALL_JOBS = {
    "dense on disk": Job("dense", ("disk",), 1),
    "dense": Job("dense", ("three",), 1),
    "dense, stepped on the host": Job("stepped on the host", ("three",), 3),
    "tables on disk": Job("tables", ("disk",), 2),
    "tables": Job("tables", ("three",), 2),
    "hot tables": Job("hot tables", ("three",), 2),
}
JOBS = {name: ALL_JOBS[name] for name in tried(ALL_JOBS, always=1, of=5)}


@pytest.fixture(scope="module", name="killed")
def _killed(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Let all of them be killed; return their folders."""
    folders = {name: tmp_path_factory.mktemp("killed") for name in JOBS}
    kill({folders[name]: job for name, job in JOBS.items()})
    return folders


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_a_kill_in_any_phase_leaves_no_trace(name: str, killed: Mapping[str, Path]) -> None:
    assert hits_of(killed[name], JOBS[name]) == PHASES


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", ["tables", "hot tables"])
@pytest.mark.parametrize("layouts", [("disk",), ("disk", "three")], ids="-".join)
def test_hundreds_of_kills_leave_no_trace_in_tables(
    layouts: tuple[str, ...], subject: str, tmp_path: Path
) -> None:
    job = Job(subject, layouts, 200, kills=200)
    kill({tmp_path: job})
    assert hits_of(tmp_path, job) == PHASES


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("layouts", [("disk",), ("three",), ("disk", "three")], ids="-".join)
def test_hundreds_of_kills_leave_no_trace(layouts: tuple[str, ...], seed: int, tmp_path: Path) -> None:
    job = Job("dense", layouts, 100 + seed, kills=200)
    kill({tmp_path: job})
    assert hits_of(tmp_path, job) == PHASES
