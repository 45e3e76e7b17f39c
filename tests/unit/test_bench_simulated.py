"""The figures on the simulated accelerator, at a small scale, and the rates that it has for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench import simulated
from bench.command import Settings, UnmeasurableError
from bench.links import A100, LLAMA_7B
from bench.llamas import Size
from bench.rates import STEP_S, for_llama, for_workload
from bench.record import Figure
from bench.workload import BATCH, Workload
from tests.sampling import too_long_for_ci, tried

NAMES = tried(simulated.NAMES, always=1)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Figure]:
    settings = Settings(tmp_path_factory.mktemp("figures"), repeats=1, warmups=0, scale=0.02)
    try:
        return simulated.measure_all(NAMES, settings)
    except UnmeasurableError as reason:
        assert os.environ.get("TIERSTORE_REQUIRE_ACCELERATOR") != "1"
        pytest.skip(str(reason))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
@too_long_for_ci
def test_each_question_yields_its_figure_with_details(name: str, figures: dict[str, Figure]) -> None:
    figure = figures[name]
    assert figure.name == name
    assert figure.reached > 0
    assert "bit for bit" in figure.details["losses of computed steps"]
    assert sum("idle" in each and "floor" in each for each in figure.details.values()) >= 2


def test_a_process_that_fails_is_told_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="KeyError: 'no such figure'"):
        simulated.measure("no such figure", Settings(tmp_path))


def test_a_layer_s_products_take_as_long_as_a_large_one_s_on_a_gpu() -> None:
    size = Size()
    rates = for_llama(size, A100.share(LLAMA_7B))
    weights = size.layers * (4 * size.dim**2 + 3 * size.dim * size.config.hidden)
    attention = size.layers * 2 * size.dim * size.length
    seconds = 6 * (weights + attention) * size.tokens / rates.operations
    assert seconds == pytest.approx(size.layers * 0.0373, rel=0.01)
    assert size.marked_bytes / rates.link == pytest.approx(A100.share(LLAMA_7B) * seconds, rel=0.01)


def test_the_workload_s_products_take_as_long_as_what_is_read() -> None:
    workload = Workload()
    rates = for_workload(workload)
    assert 6 * workload.parameter_bytes / 4 * BATCH / rates.operations == pytest.approx(STEP_S)
    assert 4 * workload.parameter_bytes / rates.link == pytest.approx(STEP_S)
