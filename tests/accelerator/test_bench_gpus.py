"""The figures of a GPU, at a small scale, on the accelerator of these tests."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch

from bench import gpus
from bench.command import Settings, UnmeasurableError


@pytest.mark.parametrize("name", ["gpu-link", "gpu-swap-peak", "gpu-swap-step", "gpu-step"])
def test_each_question_yields_its_figure_with_details(name: str, tmp_path: Path) -> None:
    ask = inspect.unwrap(gpus.QUESTIONS[name])
    figure = ask(Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    assert figure.name == name
    assert figure.reached > 0
    assert len(figure.details) >= 5


def test_without_a_gpu_there_is_no_figure_of_one(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    for ask in gpus.QUESTIONS.values():
        with pytest.raises(UnmeasurableError, match="no CUDA device"):
            ask(Settings(tmp_path))
