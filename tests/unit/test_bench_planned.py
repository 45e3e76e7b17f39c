"""The planner's figures: what of them is arithmetic, and each of them at a small scale."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import planned, planned_command
from bench.command import Settings, UnmeasurableError
from bench.planned_cells import (
    MOST_LINK_BYTES_PER_S,
    SHARES,
    SPILLING_SHARE,
    PlainRun,
    PlannedTrainee,
    Quotas,
    by_direction,
    moved_in_all,
    worst_error,
)
from bench.planned_command import Ended, ended, llama_config, seconds_within
from bench.planned_models import MODELS, SMALL_MODELS, PlannedModel
from tests.sampling import too_long_for_ci
from tierstore.planning.machine import ComputeFigures, LinkFigures, Machine, TierFigures, TierMedium
from tierstore.planning.searching import todays

MIB = 1024**2
PLAIN = PlainRun(peak_bytes=100 * MIB, stored_bytes=80 * MIB, step_s=1.0)


def test_bytes_of_steps_are_added_up_by_link() -> None:
    steps = [{"host->device": 3, "device->host": 0}, {"host->device": 4}, {"host->disk": 1}]
    assert moved_in_all(steps) == {"host->device": 7, "host->disk": 1}


def test_a_direction_counts_all_that_passes_a_medium() -> None:
    moved = {"device->host": 5, "device->disk": 2, "host->disk": 1, "disk->host": 4, "host->device": 8}
    assert by_direction(moved) == {"from device": 7, "to device": 8, "to disk": 3, "from disk": 4}
    in_two = {"device->host": 7, "host->disk": 3, "disk->host": 4, "host->device": 8}
    assert by_direction(in_two) == by_direction(moved)


@pytest.mark.parametrize(
    ("predicted", "measured", "error"),
    [
        ({"up": 100}, {"up": 100}, 0.0),
        ({"up": 90, "down": 100}, {"up": 100, "down": 100}, 0.1),
        ({"up": 110, "down": 60}, {"up": 100, "down": 100}, 0.4),
        ({"up": 1000}, {"up": 1000, "down": 5}, 0.0),  # it carries less than a hundredth
        ({"up": 1000, "down": 5}, {"up": 1000}, 0.0),
        ({"up": 1000, "down": 100}, {"up": 1000}, 10.0),  # of a hundredth
        ({"up": 1000}, {"up": 1000, "down": 100}, 1.0),
        ({}, {}, 0.0),
        ({"up": 1}, {}, math.inf),
    ],
)
def test_the_worst_direction_that_carries_something_counts(
    predicted: dict[str, float], measured: dict[str, float], error: float
) -> None:
    assert worst_error(predicted, measured, 0.01) == pytest.approx(error)


def test_moving_takes_about_a_step_but_on_a_link_that_is_slower_than_the_machine() -> None:
    assert Quotas.of(PLAIN, 0.7).link_bytes_per_s == PLAIN.stored_bytes
    quick = replace(PLAIN, step_s=0.01)
    assert Quotas.of(quick, 0.7).link_bytes_per_s == MOST_LINK_BYTES_PER_S


def test_one_of_three_quotas_spills_to_a_disk_of_limited_rate(tmp_path: Path) -> None:
    spilling = [share for share in SHARES if Quotas.of(PLAIN, share).disk_bytes]
    assert spilling == [SPILLING_SHARE]
    quotas = Quotas.of(PLAIN, SPILLING_SHARE)
    assert quotas.host_bytes + quotas.device_bytes < PLAIN.stored_bytes + PLAIN.peak_bytes / 2
    assert quotas.config(tmp_path).disk_options == {"max_bandwidth": quotas.disk_bytes_per_s}
    assert Quotas.of(PLAIN, 0.25).host_bytes > PLAIN.stored_bytes


def test_a_grid_has_ten_models_and_three_quotas_at_full_scale(tmp_path: Path) -> None:
    assert len(planned.names_of(Settings(tmp_path))) == len(MODELS) == 10
    assert len(SHARES) == 3
    assert planned.names_of(Settings(tmp_path, scale=0.01)) == ["mlp"]


@pytest.mark.parametrize("name", [*MODELS, *SMALL_MODELS])
def test_each_model_can_be_made_of_nothing(name: str) -> None:
    with torch.device("meta"):
        model, inputs, optimizer = {**MODELS, **SMALL_MODELS}[name].build()
    assert all(each.is_meta for each in (*model.parameters(), *inputs))
    assert 2 * MIB <= sum(each.nbytes for each in model.parameters()) <= 32 * MIB
    trained = [each for each in model.parameters() if each.requires_grad]
    assert {id(each) for group in optimizer.param_groups for each in group["params"]} == set(map(id, trained))


def _tiny() -> PlannedModel:
    def make() -> torch.nn.Module:
        return torch.nn.Linear(64, 64)

    return PlannedModel(make, lambda: (torch.ones(2, 64),))


def test_a_meter_sees_inputs_and_what_a_step_makes() -> None:
    plain = PlainRun.of(_tiny(), steps=1)
    parameters = 4 * 64 * 65
    assert plain.stored_bytes == 4 * parameters + 2 * 4  # AdamW counts its steps, too
    assert plain.stored_bytes < plain.peak_bytes < 3 * plain.stored_bytes


def test_two_trainees_are_the_same_in_each_step() -> None:
    ours, theirs = PlannedTrainee(_tiny()), PlannedTrainee(_tiny())
    for _ in range(2):
        ours.step()
        theirs.step()
    assert torch.equal(torch.stack(ours.losses), torch.stack(theirs.losses))
    assert ours.losses[0] != ours.losses[1]


def test_a_machine_whose_pace_changes_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tries: list[PlannedTrainee] = []

    def measure(plain: PlainRun, beside: PlannedTrainee) -> float:
        beside.seconds += [2 * plain.step_s, 2 * plain.step_s]
        tries.append(beside)
        return 0.5

    monkeypatch.setattr(PlainRun, "of", lambda model: PLAIN)
    with pytest.raises(
        UnmeasurableError, match=r"a plain step had changed by 100% after the last of 3 tries"
    ):
        planned.at_its_pace(_tiny(), Settings(tmp_path), measure)
    assert len(tries) == 3
    assert planned.at_its_pace(_tiny(), Settings(tmp_path, scale=0.5), measure) == 0.5


def test_the_sizes_of_llamas_are_those_of_their_names() -> None:
    def parameters(config: dict[str, object]) -> float:
        hidden, wide, layers, heads, kept, words = (
            int(str(config[name]))
            for name in (
                "hidden_size",
                "intermediate_size",
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "vocab_size",
            )
        )
        layer = 2 * hidden**2 * (1 + kept / heads) + 3 * hidden * wide
        return layers * layer + 2 * words * hidden

    assert parameters(planned_command.LLAMA_70B) == pytest.approx(70.6e9, rel=0.005)
    assert parameters(planned_command.LLAMA_405B) == pytest.approx(405.9e9, rel=0.005)


def test_a_process_is_told_with_its_seconds_and_its_memory(tmp_path: Path) -> None:
    code = "import sys; kept = b'x' * (64 << 20); print('said'); sys.exit('wrong')"
    found = ended([sys.executable, "-c", code], tmp_path)
    assert (found.code, found.output, found.errors) == (1, "said\n", "wrong\n")
    assert found.seconds > 0
    assert 64 * MIB < found.resident_bytes < 128 * MIB


def test_more_memory_than_allowed_counts_as_endless() -> None:
    found = Ended(0, 3.0, 3.0, 2 * MIB, "", "")
    assert seconds_within(found, 2 * MIB) == 3.0
    assert seconds_within(found, MIB) == math.inf


@pytest.mark.parametrize(
    ("errors", "kind", "words"),
    [
        (
            "usage\ntierstore: error: unrecognized arguments: --world-size 8\n",
            UnmeasurableError,
            "world-size",
        ),
        ("tierstore plan: it is broken\n", RuntimeError, "ended with 2:\ntierstore plan: it is broken"),
    ],
)
def test_what_a_command_cannot_do_is_not_measured(
    errors: str, kind: type[Exception], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned_command, "ended", lambda command, folder: Ended(2, 1.0, 1.0, 1, "", errors))
    with pytest.raises(kind, match=words):
        planned_command.planned(llama_config(8, 8, 1, 1), ["--world-size", "8"], tmp_path / "there")
    assert json.loads((tmp_path / "there" / "config.json").read_text())["hidden_size"] == 8


def test_every_combination_of_two_levers_is_tried_once() -> None:
    model = SMALL_MODELS["small-mlp"]
    program = planned.traced(model, 8 * MIB)
    placements = planned.all_placements(program, _machine())
    assert len(placements) == 4 * 4
    assert len({repr(each) for each in placements.values()}) == len(placements)
    assert placements["high 1, ahead 0.25"] == replace(todays(program, _machine()), high={"device": 1.0})


def _machine() -> Machine:
    tiers = (
        TierFigures("device", 8 * MIB, TierMedium.DEVICE, 512),
        TierFigures("host", 64 * MIB, TierMedium.HOST),
    )
    links = (LinkFigures("device", "host", 1e9), LinkFigures("host", "device", 1e9))
    compute = ComputeFigures({"float32": 1e12}, 1e10)
    return Machine("small", tiers, links, compute, compute, has_streams=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        name if name == "planned-step" else pytest.param(name, marks=pytest.mark.long)
        for name in planned.QUESTIONS
    ],
)
@too_long_for_ci
def test_each_question_yields_its_figure_with_details(name: str, tmp_path: Path) -> None:
    try:
        figure = planned.QUESTIONS[name](Settings(tmp_path, repeats=1, warmups=0, scale=0.02))
    except UnmeasurableError as reason:
        pytest.skip(str(reason))
    assert figure.name == name
    assert figure.reached >= 0
    assert figure.details
