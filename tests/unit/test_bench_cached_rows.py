"""Figures of rows that are kept on the device, at a small scale."""

from __future__ import annotations

from pathlib import Path

import pytest

import bench.cached_rows
from bench.cached_rows import QUESTIONS, Work, train
from bench.command import Question, Settings


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_each_question_yields_its_figure_with_details(
    question: Question, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.cached_rows, "BATCHES", 24)
    monkeypatch.setattr(bench.cached_rows, "WARM", 8)
    figure = question(Settings(tmp_path, scale=0.004))
    assert QUESTIONS[figure.name] is question
    if figure.name == "cached-row-hits":
        assert 0.3 < figure.reached <= 1
    else:
        assert figure.reached >= 1
    assert any("Zipf 1.2" in name for name in figure.details)


def test_rows_that_differ_from_pytorchs_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.cached_rows, "BATCHES", 3)
    work = Work.of(Settings(tmp_path, scale=0.004), 1.05)
    steps = iter([2e-2, 1e-2])  # ours another one than theirs
    monkeypatch.setattr(bench.cached_rows, "learning_rate", lambda: next(steps))
    with pytest.raises(RuntimeError, match=r"rows differ from those of nn\.Embedding"):
        train(work, tmp_path)
