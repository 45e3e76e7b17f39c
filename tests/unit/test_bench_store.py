"""The store's figures at a small scale: that they run, and that they catch wrong bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.command import Question, Settings
from bench.store import QUESTIONS, Shuttle, Traffic, check_equal


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_each_question_yields_its_figure_with_details(question: Question, tmp_path: Path) -> None:
    figure = question(Settings(tmp_path, repeats=1, warmups=0, scale=0.01))
    assert QUESTIONS[figure.name] is question
    assert figure.reached >= 0 or figure.name == "growth"  # a pool may give back more than it took
    assert figure.details


def test_a_wrong_byte_fails_the_run() -> None:
    with pytest.raises(AssertionError, match="'k'"):
        check_equal(torch.zeros(3), torch.tensor([0.0, 0.0, 1.0]), "k")


@pytest.mark.parametrize("in_crates", [False, True])
def test_every_round_trip_writes_and_reads_every_byte_again(tmp_path: Path, in_crates: bool) -> None:
    with Shuttle(tmp_path, 64 * 1024, 8, in_crates=in_crates) as shuttle:
        for _ in range(3):
            shuttle.round_trip()
        traffic = shuttle.store.stats().traffic
    directories = 1024 if in_crates else 0
    for way in (("host", "disk"), ("disk", "host")):
        assert 3 * shuttle.nbytes <= traffic[way].nbytes <= 3 * (shuttle.nbytes + directories)


def test_traffic_is_the_same_every_time(tmp_path: Path) -> None:
    keys = []
    for name in ("first", "second"):
        traffic = Traffic(tmp_path / name, 16 * 1024**2)
        with traffic.store:
            for _ in range(3):
                traffic.step()
            keys.append(sorted(traffic.store.keys()))
    assert keys[0] == keys[1]
