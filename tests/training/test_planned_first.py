"""Runs are planned before their first step where a copy can tell what it does; bits never depend on it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests import target
from tests.run_planners import noted_planners
from tests.training.traced_models import BUILDS
from tests.training.twins import assert_equal_lists
from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, UsageError
from tierstore.planning import Machine, Placement, Program
from tierstore.planning.searching import Choice
from tierstore.planning.simulating import Conditions
from tierstore.store import Store
from tierstore.training import first_call, first_plan, offload, planned, run_machine
from tierstore.training.first_plan import assumed_of, first_choice
from tierstore.training.planned import RunPlanner, Stage
from tierstore.training.run_machine import machine_of
from tierstore.training.tracing import Grouping, trace_model

pytestmark = pytest.mark.skipif(target.accelerator is not None, reason="tests/accelerator has its own")

KIB = 1024
STEPS = 3
FIRST = "planned before the first step: "
LATER = "planned after step "
UNKNOWN = "is not known before"
LEFT = "planning is left to the steps"
_BOUNDS = first_call.MOST_BUNDLES, first_plan.MOST_MOMENTS  # before a fixture sets them


@pytest.fixture(autouse=True)
def _planned_first(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(first_call, "MOST_BUNDLES", _BOUNDS[0])
    monkeypatch.setattr(first_plan, "MOST_MOMENTS", _BOUNDS[1])
    caplog.set_level(logging.DEBUG, "tierstore")


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[RunPlanner]:
    """Return the planners of runs that are opened in a test."""
    return noted_planners(monkeypatch)


def config_of(
    path: Path, quota_bytes: int, more: dict[str, object] | None = None, device: str = "emulated"
) -> dict[str, object]:
    by_device: dict[str, dict[str, object]] = {
        "emulated": {"max_device_memory": quota_bytes, "offload_cpu_size": "64MB", "offload_disk_size": 0},
        "cpu": {"offload_cpu_size": quota_bytes, "offload_disk_size": "64MB"},
    }
    return {
        "device": device,
        "host_mem_block_size": "64KB",
        "offload_path": str(path / "files"),
        **by_device[device],
        **(more or {}),
    }


class Outcome(NamedTuple):
    """What became of a run: losses and parameters, and the placement after its first step."""

    logged: list[Tensor]
    placement: Placement | None


def outcome(name: str, config: dict[str, object] | None, *, steps: int = STEPS) -> Outcome:
    torch.manual_seed(0)
    model, inputs, optimizer = BUILDS[name]()
    logged: list[Tensor] = []
    placement = None
    with offload(model, optimizer, config or {"memory_offload": "OFF"}, on_close="restore") as run:
        for _ in range(steps):
            loss = model(*inputs).square().mean()
            if placement is None and config is not None:
                placement = run.placement
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            logged.append(loss.detach())
    return Outcome([*logged, *(each.detach() for each in model.parameters())], placement)


def said(caplog: pytest.LogCaptureFixture, begin: str) -> list[str]:
    return [line for line in caplog.messages if line.startswith(begin)]


GRID = [
    ("mlp", "emulated", 500_000),
    ("mlp", "emulated", 1_400_000),
    ("mlp", "cpu", 700_000),
    ("mlp", "cpu", 1_300_000),
    ("deep", "emulated", 260_000),
    ("deep", "cpu", 200_000),
    ("adapted", "emulated", 800_000),
    ("adapted", "cpu", 400_000),
    ("encoder", "cpu", 960_000),
    ("skips", "cpu", 200_000),
]


@pytest.mark.parametrize(("name", "device", "quota_bytes"), GRID)
def test_a_run_planned_before_its_first_step_has_the_bits_of_plain_pytorch_and_says_so(
    name: str, device: str, quota_bytes: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = outcome(name, config_of(tmp_path, quota_bytes, device=device))
    assert_equal_lists(outcome(name, None).logged, found.logged)
    (line,) = said(caplog, FIRST)
    assert "s a step" in line
    assert "assumed: how fast it computes" in line


class _Chosen:
    """A first choice that is what a test wants, or an error."""

    def __init__(self, changes: Mapping[str, object] | None = None, error: Exception | None = None) -> None:
        self._changes = changes or {}
        self._error = error

    def __call__(
        self, program: Program, machine: Machine, given: Placement, conditions: Conditions
    ) -> Choice:
        if self._error is not None:
            raise self._error
        found = first_choice(program, machine, given, conditions)
        rejected = tuple(replace(each, step_s=math.inf) for each in found.rejected)
        wanted = replace(given, **self._changes)  # type: ignore[arg-type]
        first = replace(rejected[0], placement=given)
        return replace(found, placement=wanted, rejected=(first, *rejected))


CHANGES: list[dict[str, object]] = [
    {"high": {"device": 0.5}},
    {"ahead": {"device": 0.0625, "host": 0.5}},
    {"high": {"device": 0.75, "host": 0.5}, "ahead": {"device": 0.5}},
]


@pytest.mark.parametrize("changes", CHANGES)
@pytest.mark.parametrize(("name", "quota_bytes"), [("mlp", 500_000), ("deep", 260_000)])
def test_whatever_is_chosen_holds_in_the_first_step_and_bits_are_the_same(
    changes: dict[str, object],
    name: str,
    quota_bytes: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(planned, "first_choice", _Chosen(changes))
    found = outcome(name, config_of(tmp_path, quota_bytes), steps=5)
    assert_equal_lists(outcome(name, None, steps=5).logged, found.logged)
    assert found.placement is not None
    for part, value in changes.items():
        assert dict(getattr(found.placement, part)) == value


@pytest.mark.parametrize(
    "more",
    [
        {"auto_offload": False},
        {"placement": {"ahead": {"device": 0.25}}},
        {"foresee": False},
        {"max_device_memory": "64MB"},
    ],
)
def test_what_is_given_or_need_not_move_is_not_planned_before_the_first_step(
    more: dict[str, object], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    outcome("deep", config_of(tmp_path, 260_000, more))
    assert said(caplog, FIRST) == []


# ---------------------------------------------------------------------- what steps show


def test_what_was_planned_before_the_first_step_is_planned_anew_where_steps_take_longer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)
    found = outcome("deep", config_of(tmp_path, 260_000), steps=8)
    assert_equal_lists(outcome("deep", None, steps=8).logged, found.logged)
    assert len(said(caplog, FIRST)) == 1
    assert said(caplog, LATER)[0].startswith(f"{LATER}5: ")  # two after those that are recorded


def test_what_was_planned_before_the_first_step_holds_where_it_was_right(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    planners: list[RunPlanner],
) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)
    monkeypatch.setattr(planned, "DRIFT", math.inf)
    stages: list[Stage] = []
    torch.manual_seed(0)
    model, inputs, optimizer = BUILDS["deep"]()
    with offload(model, optimizer, config_of(tmp_path, 260_000)):
        for _ in range(8):
            model(*inputs).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            stages.append(planners[0].stage)
    assert said(caplog, LATER) == []
    assert stages == [Stage.LEARNING] * 3 + [Stage.FOLLOWING] * 5


def test_correcting_it_waits_until_it_is_worth_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    outcome("deep", config_of(tmp_path, 260_000), steps=8)  # no share of the time is for it here
    assert said(caplog, FIRST)
    assert said(caplog, LATER) == []


# ---------------------------------------------------------------------- what is not known, and errors


def test_an_error_in_planning_ends_it_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planners: list[RunPlanner]
) -> None:
    monkeypatch.setattr(planned, "first_choice", _Chosen(error=ArithmeticError("a fault of the search")))
    found = outcome("deep", config_of(tmp_path, 260_000), steps=6)
    assert_equal_lists(outcome("deep", None, steps=6).logged, found.logged)
    assert planners[0].stage is Stage.RESTING
    assert planners[0].choice is None


@pytest.mark.parametrize("error", [CapacityError("nothing fits"), UsageError("too long")])
def test_what_cannot_be_planned_before_the_first_step_is_planned_by_what_steps_show(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)
    monkeypatch.setattr(planned, "first_choice", _Chosen(error=error))
    outcome("deep", config_of(tmp_path, 260_000), steps=5)
    assert said(caplog, FIRST) == []
    assert len(said(caplog, LEFT)) == 1
    assert said(caplog, LATER)[0].startswith(f"{LATER}3: ")


@pytest.mark.parametrize(
    ("bound", "device", "quota_bytes", "reason"),
    [
        ((first_call, "MOST_BUNDLES"), "cpu", 200_000, "too many bundles"),
        ((first_call, "MOST_FUNCTIONS"), "cpu", 200_000, "too many functions"),
        ((first_plan, "MOST_MOMENTS"), "emulated", 260_000, "moments"),
        ((first_call, "MOST_USES"), "emulated", 260_000, "too long"),
    ],
)
def test_what_would_take_long_is_left_to_the_steps(
    bound: tuple[object, str],
    device: str,
    quota_bytes: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)
    monkeypatch.setattr(*bound, 3)
    outcome("deep", config_of(tmp_path, quota_bytes, device=device), steps=5)
    assert said(caplog, FIRST) == []
    (told,) = [line for line in caplog.messages if UNKNOWN in line or LEFT in line]
    assert reason in told
    assert said(caplog, LATER)


class Branching(nn.Module):
    """Asks for a value."""

    def forward(self, x: Tensor) -> Tensor:
        """Return what it is given, if it is large."""
        return x if x.sum() > -1e9 else x + 1


class Casting(nn.Module):
    """Computes in half precision inside."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(rows, 48)``."""
        with torch.autocast("cpu", torch.bfloat16):
            return (x @ x.T @ x).float()


class Pair(nn.Module):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return what it is given, and something beside it."""
        return x, x + 1


UNTOLD: dict[str, Callable[[nn.Sequential], object]] = {
    "depends on values": lambda model: model.append(Branching()),
    "numbers are cast": lambda model: model.append(Casting()),
    "which part of a tuple": lambda model: model.append(Pair()),
    "has hooks": lambda model: model[1].register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("device", ["emulated", "cpu"])
@pytest.mark.parametrize("reason", UNTOLD)
def test_what_a_copy_cannot_tell_is_left_to_the_steps(
    reason: str, device: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, inputs, _ = BUILDS["deep"]()
    assert isinstance(model, nn.Sequential)
    UNTOLD[reason](model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    quota_bytes = 400_000 if device == "emulated" else 200_000
    with offload(model, optimizer, config_of(tmp_path, quota_bytes, device=device)):
        for _ in range(2):
            made = model(*inputs)
            (made if isinstance(made, Tensor) else made[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert said(caplog, FIRST) == []
    (told,) = [line for line in caplog.messages if UNKNOWN in line]
    assert reason in told


def test_calls_that_train_nothing_are_not_planned_for_and_the_first_that_does_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.manual_seed(0)
    model, inputs, optimizer = BUILDS["deep"]()
    with offload(model, optimizer, config_of(tmp_path, 260_000)):
        with torch.no_grad():
            model(*inputs)
        model.eval()
        model(*inputs).sum().backward()
        optimizer.step()
        model.train()
        assert said(caplog, "planned") == []
        model(*inputs).sum().backward()
        optimizer.step()
    (line,) = said(caplog, "planned")
    assert line.startswith("planned before step 2: ")


# ---------------------------------------------------------------------- the choice itself


def _deep(layers: int) -> Program:
    def build() -> tuple[nn.Module, Tensor, torch.optim.Optimizer]:
        model = nn.Sequential(
            *(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Tanh()) for _ in range(layers))
        )
        return model, torch.zeros(4, 32), torch.optim.Adam(model.parameters())

    return trace_model(build, grouping=Grouping(0, None))


def _machine(tmp_path: Path, quota_bytes: int, more: dict[str, object] | None = None) -> Machine:
    config = OffloadConfig.from_mapping(config_of(tmp_path, quota_bytes, more))
    with Store(config.store_config()) as store:
        return machine_of(store, config)


def test_a_long_program_is_looked_at_with_fewer_moments_and_the_choice_holds_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = _deep(6)
    machine = _machine(tmp_path, 120_000)
    given = Placement(ahead={"device": 0.25, "host": 0.25})
    conditions = Conditions(is_enforced=False)
    whole = first_choice(program, machine, given, conditions)
    monkeypatch.setattr(first_plan, "MOST_MOMENTS", len(program.moments) - 1)
    joint = first_choice(program, machine, given, conditions)
    for found in (whole, joint):
        assert replace(found.placement, high={}, ahead={}) == replace(given, high={}, ahead={})
        slower = [each.step_s for each in found.rejected if each.placement == given]
        assert found.placement == given or (slower and slower[0] is not None)
    assert len(joint.timeline.steps) > 0
    assert len(joint.rejected) <= len(whole.rejected) + 2
    monkeypatch.setattr(first_plan, "MOST_MOMENTS", 10)
    with pytest.raises(UsageError, match="10 are looked at"):
        first_choice(program, machine, given, conditions)


def test_what_is_assumed_is_told_and_what_is_configured_is_not(tmp_path: Path) -> None:
    assert assumed_of(_machine(tmp_path, 2**20)) == "how fast it computes, device->host, host->device"
    limited = _machine(tmp_path, 2**20, {"device_options": {"link_bandwidth": "80MB"}})
    assert assumed_of(limited) == "how fast it computes"
    assert assumed_of(replace(limited, sources={})) == ""


def test_a_fault_of_what_refuses_ends_the_matter_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("a fault of the simulator")

    monkeypatch.setattr(first_call, "refusal", fail)
    found = outcome("deep", config_of(tmp_path, 260_000))
    assert_equal_lists(outcome("deep", None).logged, found.logged)
    assert said(caplog, FIRST) == []
    assert any(UNKNOWN in line and "a fault of the simulator" in line for line in caplog.messages)


@pytest.mark.parametrize("device", ["cpu", "emulated"])
def test_a_machine_that_cannot_be_told_ends_planning_and_not_the_run(
    device: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    planners: list[RunPlanner],
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(store: object, config: object) -> Machine:
        raise ValueError("a backend of others says odd things")

    monkeypatch.setattr(run_machine, "machine_of", broken)
    found = outcome("mlp", config_of(tmp_path, 700_000, device=device))
    assert_equal_lists(outcome("mlp", None).logged, found.logged)
    assert planners == []
    assert said(caplog, "the run is neither foreseen nor planned")
