"""The training figures at a small scale, and the floor that one of them is held against."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import budget, processes, quotas, tables, training, watched
from bench.__main__ import MODULES
from bench.command import FIGURES, Question, Settings
from bench.training import Floor
from bench.workload import Trainee, Workload
from tests.sampling import too_long_for_ci, tried

QUESTIONS = training.QUESTIONS | quotas.QUESTIONS | budget.QUESTIONS | tables.QUESTIONS | watched.QUESTIONS


def test_every_figure_of_the_page_has_one_question() -> None:
    names = [name for module in MODULES for name in module.QUESTIONS]
    assert sorted(names) == sorted(FIGURES)


@pytest.mark.slow
@pytest.mark.parametrize("question", [pytest.param(QUESTIONS[name], id=name) for name in tried(QUESTIONS)])
def test_each_question_yields_its_figure_with_details(question: Question, tmp_path: Path) -> None:
    figure = question(Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    assert QUESTIONS[figure.name] is question
    assert figure.reached > 0
    assert figure.details


@pytest.mark.slow
@too_long_for_ci
def test_processes_train_by_turns_with_and_without_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "PROCESSES", 2)
    figure = processes.step_of_eight(Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    assert figure.reached > 0
    assert figure.details["losses"] == "18 of 18 equal, bit for bit"  # of 3 turns of 3 steps in both


@pytest.mark.parametrize("scale", [0.01, 0.1])
def test_the_workload_has_the_bytes_that_are_counted(scale: float) -> None:
    workload = Workload.scaled(scale)
    assert (
        sum(parameter.nbytes for parameter in workload.new_model().parameters()) == workload.parameter_bytes
    )
    assert workload.share == pytest.approx(scale, rel=0.7)


def test_the_full_workload_has_100_7_million_parameters() -> None:
    assert str(Workload.scaled(1.0)) == "the model of 100.7 M parameters"


def test_two_trainees_draw_the_same_batches() -> None:
    workload = Workload(64)
    with Trainee(workload) as first, Trainee(workload) as second:
        for _ in range(2):
            first.step()
            second.step()
        assert torch.equal(first.losses, second.losses)
        assert first.losses[0] != first.losses[1]


@pytest.mark.parametrize(
    ("kept_bytes", "read_bytes", "write_bytes"),
    [
        (0, 400, 300),  # parameters twice and two moments once; all three written
        (40, 320, 260),  # a parameter's byte saves two reads and a write
        (100, 200, 200),
        (150, 150, 150),  # a moment's byte saves one of each
        (300, 0, 0),
        (1000, 0, 0),
    ],
)
def test_the_floor_is_what_must_move_once_the_quota_keeps_the_best(
    kept_bytes: int, read_bytes: int, write_bytes: int
) -> None:
    floor = Floor.of(100, kept_bytes)
    assert (floor.read_bytes, floor.write_bytes) == (read_bytes, write_bytes)


def test_the_floor_takes_the_faster_of_mixing_and_taking_turns() -> None:
    floor = Floor(read_bytes=400, write_bytes=300)
    assert floor.seconds(read_rate=100, write_rate=100, mixed_rate=140) == 5
    assert floor.seconds(read_rate=100, write_rate=100, mixed_rate=70) == 7
    assert floor.read_share == pytest.approx(4 / 7)
