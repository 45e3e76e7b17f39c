"""The figures of steps on the host during backward, at a small scale."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import host_steps
from bench.command import Settings, UnmeasurableError
from tests.sampling import too_long_for_ci


@pytest.mark.slow
@pytest.mark.parametrize("name", host_steps.QUESTIONS)
@too_long_for_ci
def test_each_question_yields_its_figure_with_equal_losses(name: str, tmp_path: Path) -> None:
    try:
        figure = host_steps.QUESTIONS[name](Settings(tmp_path, repeats=1, warmups=0, scale=0.01))
    except UnmeasurableError as reason:
        assert os.environ.get("TIERSTORE_REQUIRE_ACCELERATOR") != "1"
        pytest.skip(str(reason))
    assert figure.name == name
    assert figure.reached > 0
    assert any("bit for bit" in each for each in figure.details.values())
