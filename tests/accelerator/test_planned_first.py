"""A run on an accelerator is planned before its first step, which takes no clock; bits never depend on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE, late
from tests.run_planners import noted_planners
from tests.training.twins import Trial, adam, assert_equal_lists, blocks, like_blocks, steps
from tierstore.planning import Machine, Placement, Program
from tierstore.planning.searching import Choice
from tierstore.planning.simulating import Conditions
from tierstore.training import offload, planned
from tierstore.training.first_plan import first_choice
from tierstore.training.planned import RunPlanner

STEPS = 4
MODELS: dict[str, Callable[[], nn.Module]] = {"blocks": lambda: blocks(2), "like": like_blocks}
QUOTAS = ("300KB", "400KB")


def _config(quota: str) -> dict[str, object]:
    return {
        "device": "openreg",
        "offload_disk_size": 0,
        "host_mem_block_size": "1MB",
        "offload_cpu_size": "64MB",
        "max_device_memory": quota,
    }


def _logged(name: str, config: Mapping[str, object] | None) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    with DEVICE:
        model = MODELS[name]()
        trial = Trial(model, adam(model))
        if config is None:
            steps(STEPS)(trial)
        else:
            with offload(model, trial.optimizers[0], config):
                steps(STEPS)(trial)
    return trial.logged


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[RunPlanner]:
    return noted_planners(monkeypatch)


@pytest.mark.parametrize("quota", QUOTAS)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_planned_before_the_first_step(
    name: str, quota: str, planners: list[RunPlanner], caplog: pytest.LogCaptureFixture
) -> None:
    expected = _logged(name, None)
    with late(kernel_us=20, copy_us=500), caplog.at_level(logging.INFO, "tierstore"):
        assert_equal_lists(expected, _logged(name, _config(quota)))
    line, *later = [each for each in caplog.messages if each.startswith("planned")]
    assert line.startswith("planned before the first step: ")
    assert all(each.startswith("planned after step ") for each in later)
    assert "assumed: how fast it computes, device->host, host->device" in line
    assert planners[0].choice is not None


@pytest.mark.parametrize(
    "changes",
    [{"high": {"device": 0.5}}, {"ahead": {"device": 0.0625, "host": 0.5}}],
)
@pytest.mark.parametrize("name", MODELS)
def test_whatever_is_chosen_its_bits_are_the_same(
    name: str, changes: Mapping[str, object], monkeypatch: pytest.MonkeyPatch, planners: list[RunPlanner]
) -> None:
    def chosen(program: Program, machine: Machine, given: Placement, conditions: Conditions) -> Choice:
        found = first_choice(program, machine, given, conditions)
        wanted = replace(given, **changes)  # type: ignore[arg-type]
        slow = [replace(each, placement=given, step_s=math.inf) for each in found.rejected[:1]]
        return replace(found, placement=wanted, rejected=(*slow, *found.rejected))

    monkeypatch.setattr(planned, "first_choice", chosen)
    expected = _logged(name, None)
    with late(kernel_us=20, copy_us=500):
        assert_equal_lists(expected, _logged(name, _config("400KB")))
    choice = planners[0].choice
    assert choice is not None
    for part, value in changes.items():
        assert getattr(choice.placement, part) == value


def test_without_a_copy_nothing_is_planned_before_the_first_step(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        _logged("like", _config("400KB") | {"foresee": False})
    assert [each for each in caplog.messages if each.startswith("planned before")] == []
