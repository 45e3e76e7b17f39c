"""What keys cost beside others, at a small scale: that the figures can be measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.command import Question, Settings
from bench.keys import QUESTIONS


@pytest.mark.slow
@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS.keys())
def test_each_question_yields_its_figure_with_details(question: Question, tmp_path: Path) -> None:
    figure = question(Settings(tmp_path, repeats=1, warmups=0, scale=0.01))
    assert QUESTIONS[figure.name] is question
    assert figure.details
