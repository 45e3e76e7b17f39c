"""Runs that are planned while they go on: bits never depend on it, and a wrong plan is made again."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.run_planners import noted_planners
from tests.training.twins import adam, batch, is_on_accelerator, like_blocks, loss_of
from tierstore.planning import Machine, Placement, Program
from tierstore.planning.searching import Choice, Levers, Rejected, search
from tierstore.planning.simulating import Conditions
from tierstore.training import Offload, offload, planned
from tierstore.training.planned import MOST_PLANS, RunPlanner, Stage

KIB = 1024
PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(is_on_accelerator, reason="tests.accelerator.test_device_times is for those")


@pytest.fixture(autouse=True)
def _planning_is_always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[RunPlanner]:
    """Return the planners of runs that are opened in a test."""
    return noted_planners(monkeypatch)


def _config(**more: object) -> ts.OffloadConfig:
    given: dict[str, object] = {
        "device": "emulated",
        "max_device_memory": 96 * KIB,
        "offload_cpu_size": 4096 * KIB,
        "offload_disk_size": 0,
        "device_options": {"link_bandwidth": "80MB"},
    }
    return ts.OffloadConfig.from_mapping(given | more)


def _trained(config: ts.OffloadConfig | None, steps: int) -> tuple[list[torch.Tensor], Placement | None]:
    """Train the same model; return its losses and parameters, and where everything lived in the end."""
    torch.manual_seed(0)
    model = like_blocks(2)
    optimizers = adam(model)
    losses: list[torch.Tensor] = []
    if config is None:
        _train(model, optimizers[0], losses, steps)
        return [*losses, *(each.detach().clone() for each in model.parameters())], None
    with offload(model, optimizers, config, on_close="restore") as run:
        _train(model, optimizers[0], losses, steps)
        placement = run.placement
    return [*losses, *(each.detach().clone() for each in model.parameters())], placement


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[torch.Tensor], steps: int
) -> None:
    inputs, classes = batch()
    for _ in range(steps):
        loss = loss_of(model, inputs, classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())


def _assert_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


class _Chosen:
    """A search that comes to what a test wants: what a real one found the first time, changed."""

    def __init__(self, changes: Mapping[str, object] | None = None, *, times: float = 1.0) -> None:
        self.calls = 0
        self._times = times
        self._changes = changes or {}
        self._found: Choice | None = None

    def __call__(
        self,
        program: Program,
        machine: Machine,
        *,
        given: Placement,
        levers: Levers,
        conditions: Conditions,
        spare: float,
    ) -> Choice:
        self.calls += 1
        if self._found is None:
            self._found = search(
                program, machine, given=given, levers=levers, conditions=conditions, spare=spare
            )
        found = self._found
        timeline = found.timeline
        steps = tuple(
            replace(step, end_s=step.begin_s + self._times * step.seconds) for step in timeline.steps
        )
        placement = replace(given, **self._changes) if self._changes else found.placement  # type: ignore[arg-type]
        rejected = tuple(
            replace(each, step_s=math.inf) if each.placement == given else each for each in found.rejected
        )
        if found.placement == given:
            rejected = (*rejected, _as_slow_as_can_be(given))
        return replace(found, placement=placement, timeline=replace(timeline, steps=steps), rejected=rejected)


def _as_slow_as_can_be(given: Placement) -> Rejected:
    """Return what was given, as if it took for ever."""
    return Rejected(given, math.inf, "a test's")


def test_a_planned_run_has_the_bits_of_plain_pytorch_and_says_what_it_chose(
    planners: list[RunPlanner], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tierstore"):
        found, placement = _trained(_config(), steps=8)
    _assert_equal(_trained(None, steps=8)[0], found)
    (planner,) = planners
    assert planner.choice is not None
    assert placement is not None
    lines = [line for line in caplog.messages if line.startswith("planned after step")]
    assert lines[0].startswith("planned after step 3: ")
    assert lines[-1].endswith(planner.choice.why)
    chosen = planner.choice.placement
    is_changed = (placement.high, placement.ahead) == (chosen.high, chosen.ahead)
    assert is_changed is not ("nothing is changed" in lines[-1])


@pytest.mark.parametrize(
    "changes",
    [
        {"high": {"device": 0.5}},
        {"ahead": {"device": 0.0625, "host": 0.5}},
        {"high": {"device": 0.75, "host": 0.5}, "ahead": {"device": 0.5}},
    ],
)
def test_whatever_is_chosen_while_a_run_goes_on_its_bits_are_the_same(
    changes: dict[str, object], planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "search", _Chosen(changes))
    found, placement = _trained(_config(), steps=8)
    _assert_equal(_trained(None, steps=8)[0], found)
    assert placement is not None
    for name, value in changes.items():
        assert dict(getattr(placement, name)) == value
    assert planners[0].choice is not None


def test_a_tier_writes_back_above_the_share_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "search", _Chosen({"high": {"device": 0.25}}))
    torch.manual_seed(0)
    model = like_blocks(2)
    optimizers = adam(model)
    with offload(model, optimizers, _config(), on_close="restore") as run:
        _train(model, optimizers[0], [], 3)
        assert _is_above_a_quarter(run)
        _train(model, optimizers[0], [], 3)
        begin_s = time.monotonic()
        while _is_above_a_quarter(run):  # copies down are on their way
            assert time.monotonic() - begin_s < PATIENCE_S


def _is_above_a_quarter(run: Offload) -> bool:
    tier = run.store.stats().tiers["device"]
    return tier.charged_bytes > tier.capacity_bytes // 4


def test_a_later_plan_that_says_nothing_of_a_tier_lets_it_be_as_it_was_configured(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "search", _Chosen({"high": {"device": 0.25, "host": 0.5}}))
    torch.manual_seed(0)
    model = like_blocks(2)
    optimizers = adam(model)
    with offload(model, optimizers, _config(), on_close="restore") as run:
        _train(model, optimizers[0], [], 4)
        assert dict(run.placement.high) == {"device": 0.25, "host": 0.5}
        planners[0]._apply(replace(run.placement, high={}))
        assert dict(run.placement.high) == {}
        _train(model, optimizers[0], [], 3)
        assert _is_above_a_quarter(run)


def test_what_gains_too_little_is_left_as_it_is_and_compared_with_that(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(planned, "search", _Chosen({"high": {"device": 0.25}}))
    monkeypatch.setattr(planned, "LEAST_GAIN", math.inf)
    with caplog.at_level(logging.INFO, "tierstore"):
        _, placement = _trained(_config(), steps=5)
    assert placement is not None
    assert dict(placement.high) == {}
    assert planners[0].predicted_s == math.inf  # what a test says of the placement that was given
    assert any("nothing is changed" in line for line in caplog.messages)


def test_steps_that_take_longer_than_predicted_are_recorded_and_planned_anew_ever_more_seldom(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = _Chosen(times=1e-6)
    monkeypatch.setattr(planned, "search", chosen)
    monkeypatch.setattr(planned, "FIRST_PAUSE", 1)
    found, _ = _trained(_config(), steps=40)
    _assert_equal(_trained(None, steps=40)[0], found)
    assert 3 <= chosen.calls <= MOST_PLANS


def test_steps_that_take_as_long_as_predicted_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = _Chosen()
    monkeypatch.setattr(planned, "search", chosen)
    monkeypatch.setattr(planned, "DRIFT", math.inf)
    _trained(_config(), steps=20)
    assert chosen.calls == 1


def test_a_search_that_fails_ends_the_planning_and_nothing_else(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> Choice:
        raise ArithmeticError("a fault of the search")

    monkeypatch.setattr(planned, "search", fail)
    found, _ = _trained(_config(), steps=6)
    _assert_equal(_trained(None, steps=6)[0], found)
    assert planners[0].stage is Stage.RESTING
    assert planners[0].choice is None


def test_a_run_can_end_in_the_midst_of_what_is_recorded_anew(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "search", _Chosen(times=1e-6))
    torch.manual_seed(0)
    model = like_blocks(2)
    optimizers = adam(model)
    with offload(model, optimizers, _config(), on_close="restore") as run:
        for _ in _until(planners[0], Stage.RECORDING):
            _train(model, optimizers[0], [], 1)
        recorder = run._session.recorder  # type: ignore[union-attr]
        assert recorder.is_on
    assert not recorder.is_on
    assert planners[0].stage is Stage.RESTING


def _until(planner: RunPlanner, stage: Stage) -> Iterator[None]:
    for _ in range(200):
        if planner.stage is stage:
            return
        yield
    raise AssertionError(f"it is {planner.stage}, and was never {stage}")


@pytest.mark.parametrize(
    "more",
    [
        {"auto_offload": False},
        {"placement": {"ahead": {"device": 0.25}}},
        {"max_device_memory": "1GB", "device": "cpu"},
    ],
)
def test_what_is_given_or_need_not_move_is_not_planned(
    more: dict[str, object], planners: list[RunPlanner]
) -> None:
    _trained(_config(**more) if "device" not in more else ts.OffloadConfig(device="cpu"), steps=5)
    assert planners == []


def test_planning_waits_until_it_takes_a_small_share_of_the_run(
    planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planned, "SHARE_OF_TIME", 1e-9)
    _trained(_config(), steps=8)
    assert planners[0].choice is None
