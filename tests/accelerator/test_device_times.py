"""What an accelerator computes is timed by its own events: what kernels take is counted, stalls are not."""

from __future__ import annotations

import logging
import math
import statistics
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.accelerator import DEVICE, Pace, busy, held, late, paced
from tests.run_planners import noted_planners
from tierstore.planning import Machine, Phase, Placement, Program
from tierstore.planning.searching import Choice, Levers, search
from tierstore.planning.simulating import Conditions
from tierstore.training import Offload, offload, planned
from tierstore.training.planned import RunPlanner, Stage
from tierstore.training.recording.device_clock import DeviceClock, DevicePoint, DeviceSeconds
from tierstore.training.recording.marks import Sign

_KB = 1000
_WIDTH, _LAYERS, _BATCH = 64, 6, 8
_BUNDLE_BYTES = (_WIDTH + 1) * _WIDTH * 4
_PRODUCT_S = 0.02
_CONFIG = {
    "device": "openreg",
    "max_device_memory": "240KB",
    "offload_cpu_size": "16MB",
    "offload_disk_size": 0,
    "host_mem_block_size": "1MB",
    "foresee": False,  # what steps tell is what is looked at
}


# ---------------------------------------------------------------------- the clock


def _busy_wait(seconds: float) -> None:
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < seconds:
        pass


class _Points:
    """Points of a clock, in order."""

    def __init__(self) -> None:
        self.clock = DeviceClock(DEVICE)
        self.noted: list[DevicePoint] = []

    def note(self, *, is_apart: bool = False) -> float:
        """Note one; return when."""
        now = time.perf_counter()
        point = self.clock.point(now, is_apart=is_apart)
        assert point is not None
        self.noted.append(point)
        return now

    def seconds(self) -> DeviceSeconds:
        """Return what they come to, when the device has."""
        self.clock.read_all()
        return DeviceSeconds(self.noted, {threading.get_ident()})


@pytest.fixture
def points() -> _Points:
    return _Points()


@pytest.mark.parametrize("kernels", [1, 4, 15])
@pytest.mark.parametrize("arrival_s", [0.0, 0.01, 0.2])
def test_kernels_are_counted_and_what_their_stream_waited_for_is_not(
    kernels: int, arrival_s: float, points: _Points
) -> None:
    x = torch.zeros(_KB, dtype=torch.uint8, device=DEVICE)  # 10 ms for what reads and writes it
    size = max(1, int(arrival_s * _KB))
    come, host = torch.zeros(size, dtype=torch.uint8, device=DEVICE), torch.zeros(size, dtype=torch.uint8)
    host, side, arrived = host.pin_memory(), torch.Stream(DEVICE), torch.Event(DEVICE)
    with paced(Pace(operations=1e12, memory_bytes=2e5, link_bytes=1e3)):
        with side:
            come.copy_(host, non_blocking=True)
            arrived.record()
        x.bitwise_not_()  # until it has ended, the device is busy
        begin_s = points.note()
        torch.accelerator.current_stream().wait_event(arrived)
        had_s = points.note(is_apart=True)
        for _ in range(kernels):
            x.bitwise_not_()
        end_s = points.note()
        seconds = points.seconds()
    assert seconds.computing(begin_s, end_s) == pytest.approx(0.01 * kernels, rel=1e-6)
    assert seconds.computing(had_s, end_s) == pytest.approx(0.01 * kernels, rel=1e-6)
    assert seconds.computing(begin_s, had_s) == 0
    assert seconds.is_busy(end_s)


def test_nobody_waits_for_a_point_and_its_time_is_known_when_it_has_passed(points: _Points) -> None:
    with held(torch.accelerator.current_stream()):
        points.note()
        points.clock.read_passed()
        assert points.noted[0].reached_s is None
    torch.accelerator.synchronize()
    points.clock.read_passed()
    assert points.noted[0].reached_s is not None


def test_a_device_that_waits_for_the_host_is_not_busy_and_its_time_goes_on(points: _Points) -> None:
    begin_s = points.note()
    _busy_wait(0.05)
    end_s = points.note()
    seconds = points.seconds()
    assert 0.04 < seconds.computing(begin_s, end_s) < 5
    assert not seconds.is_busy(begin_s) or not seconds.is_busy(end_s)  # the least lag is that of one of them


def test_points_of_two_streams_that_are_beside_each_other_count_once(points: _Points) -> None:
    x = torch.zeros(_KB, dtype=torch.uint8, device=DEVICE)
    with paced(Pace(operations=1e12, memory_bytes=2e5, link_bytes=1e3)):
        begin_s = points.note()
        for _ in range(5):
            x.bitwise_not_()  # 50 ms
        points.note()
        with torch.Stream(DEVICE):  # which has nothing to do, and is there at once
            points.note()
        end_s = points.note()
        seconds = points.seconds()
    assert 0.05 <= seconds.computing(begin_s, end_s) < 0.5
    total_s = points.noted[-1].reached_s
    first_s = points.noted[0].reached_s
    assert total_s is not None
    assert first_s is not None
    assert seconds.computing(begin_s, end_s) == pytest.approx(total_s - first_s)


def test_points_of_threads_that_do_not_train_are_left_out(points: _Points) -> None:
    begin_s = points.note()
    _busy_wait(0.02)
    aside = threading.Thread(target=lambda: points.note(is_apart=True))
    aside.start()
    aside.join()
    end_s = points.note()
    assert points.seconds().computing(begin_s, end_s) > 0.015


# ---------------------------------------------------------------------- runs


def _pace(*, stall: float) -> Pace:
    """Return a pace at which the bytes of a layer take ``stall`` times as long as its product in forward."""
    return Pace(2 * _BATCH * _WIDTH * _WIDTH / _PRODUCT_S, 1e10, _BUNDLE_BYTES / (stall * _PRODUCT_S))


def _model() -> tuple[nn.Sequential, torch.optim.Optimizer, torch.Tensor]:
    torch.manual_seed(0)
    with DEVICE:
        model = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)))
        return model, torch.optim.AdamW(model.parameters()), torch.randn(_BATCH, _WIDTH)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def _forward_s(program: Program) -> list[float]:
    """Return what each layer computes in forward."""
    return [each.compute_s for each in program.moments if each.phase is Phase.FORWARD and each.uses]


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> list[RunPlanner]:
    """Return the planners of runs that are opened in a test; planning is always worth its time."""
    monkeypatch.setattr(planned, "SHARE_OF_TIME", math.inf)
    return noted_planners(monkeypatch)


@pytest.mark.parametrize("stall", [0.1, 4.0])
def test_a_paced_run_is_recorded_with_what_its_kernels_take_and_planned(
    stall: float, planners: list[RunPlanner], caplog: pytest.LogCaptureFixture
) -> None:
    model, optimizer, x = _model()
    with offload(model, optimizer, _CONFIG, on_close="release") as run:
        _step(model, optimizer, x)
        with caplog.at_level(logging.INFO, "tierstore"), paced(_pace(stall=stall)):
            for _ in range(2):
                _step(model, optimizer, x)
            torch.accelerator.synchronize()
            begin_s, before = time.perf_counter(), busy()
            _step(model, optimizer, x)
            torch.accelerator.synchronize()
            step_s, kernels_s = time.perf_counter() - begin_s, busy().kernels_s - before.kernels_s
            _step(model, optimizer, x)
            program = run.program()
    forward_s = _forward_s(program)
    assert len(forward_s) == _LAYERS
    # Where the host has told the device in time it is exact; what it told too late makes single ones longer.
    assert statistics.median(forward_s) == pytest.approx(_PRODUCT_S, rel=0.03)
    assert min(forward_s) >= 0.999 * _PRODUCT_S
    assert program.compute_s >= 0.999 * kernels_s
    if stall > 1:  # a layer's bytes come in 80 ms, and it computes for 20
        assert step_s > 1.5 * kernels_s
        assert sum(forward_s) < 1.25 * _LAYERS * _PRODUCT_S
    assert not any("clock" in said for said in program.assumptions)
    (planner,) = planners
    assert planner.choice is not None
    assert planner.predicted_s >= 0.999 * kernels_s
    assert any(line.startswith("planned after step") for line in caplog.messages)


def test_whoever_leases_from_the_store_of_a_run_is_no_computing_until_the_bytes_are_there() -> None:
    model, optimizer, x = _model()
    config = {**_CONFIG, "max_device_memory": "16MB", "auto_offload": False, "offload_param": "cpu"}
    with offload(model, optimizer, config, on_close="release") as run:
        for _ in range(3):
            _step(model, optimizer, x)
        assert run._session is not None
        recorder, weight = run._session.recorder, torch.zeros(_WIDTH, _WIDTH, device=DEVICE)
        run.store.put("mine", torch.zeros(_BUNDLE_BYTES, dtype=torch.uint8), tier="host")
        with paced(_pace(stall=4.0)), recorder.watched() as steps:
            for _ in range(3):  # until they have ended the device is busy
                torch.mm(x, weight)
            recorder.tell(Sign.FORWARD)
            with run.store.lease("mine"):  # comes in 80 ms
                torch.mm(x, weight)
            recorder.tell(Sign.BACKWARD)
            recorder.await_device()
            (step,) = steps.steps
    begin_s, end_s = (mark.at_s for mark in step.marks)
    seconds = DeviceSeconds(step.points or (), {threading.get_ident()})
    assert seconds.computing(begin_s, end_s) == pytest.approx(_PRODUCT_S, rel=0.03)


def test_what_the_host_takes_to_tell_a_busy_device_comes_before_the_next_moment() -> None:
    model, optimizer, x = _model()
    slow_s = 0.008
    for layer in model:
        layer.register_forward_pre_hook(lambda *_: _busy_wait(slow_s))  # inside of its window, as it is later
    with offload(model, optimizer, {**_CONFIG, "max_device_memory": "2MB"}, on_close="release") as run:
        _step(model, optimizer, x)
        with paced(_pace(stall=0.1)):
            for _ in range(3):
                _step(model, optimizer, x)
            program = run.program()
    layers = [each for each in program.moments if each.phase is Phase.FORWARD and each.uses]
    assert all(each.host_s >= slow_s for each in layers[2:])  # the device is behind by then
    assert statistics.median(each.compute_s for each in layers) == pytest.approx(_PRODUCT_S, rel=0.03)


def _trained(config: Mapping[str, object] | None, steps: int = 8) -> list[torch.Tensor]:
    model, optimizer, x = _model()
    if config is None:
        losses = [_step(model, optimizer, x) for _ in range(steps)]
    else:
        with offload(model, optimizer, config, on_close="restore"):
            losses = [_step(model, optimizer, x) for _ in range(steps)]
    return [each.cpu() for each in [*losses, *(one.detach() for one in model.parameters())]]


def _assert_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    assert len(expected) == len(found)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


@pytest.mark.parametrize(
    "changes", [{}, {"high": {"device": 0.5}}, {"ahead": {"device": 0.0625}}, {"high": {"device": 0.25}}]
)
def test_a_planned_run_has_the_bits_of_a_plain_one_and_of_one_that_is_not_planned(
    changes: dict[str, Any], planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(
        program: Program,
        machine: Machine,
        *,
        given: Placement,
        levers: Levers,
        conditions: Conditions,
        spare: float,
    ) -> Choice:
        found = search(program, machine, given=given, levers=levers, conditions=conditions, spare=spare)
        if not changes:
            return found
        quick = tuple(replace(each, end_s=each.begin_s) for each in found.timeline.steps)
        timeline = replace(found.timeline, steps=quick)
        return replace(found, placement=replace(given, **changes), timeline=timeline)

    monkeypatch.setattr(planned, "search", chosen)
    expected = _trained(None)
    with late(kernel_us=50, copy_us=1000, seed=5):
        found = _trained(_CONFIG)
        unplanned = _trained(
            {**_CONFIG, "auto_offload": False, "offload_param": "cpu", "max_device_memory": "16MB"}
        )
    _assert_equal(expected, found)
    _assert_equal(expected, unplanned)
    (planner,) = planners
    assert planner.choice is not None


def _made_to_fail(at: int, part: str) -> type[torch.Event]:
    """Return events of which one refuses something, and all after it."""
    calls = iter(range(1_000_000))

    class Failing(torch.Event):
        def record(self, stream: torch.Stream | None = None) -> None:
            if part == "record" and next(calls) >= at:
                raise RuntimeError("the device takes no event here")
            super().record(stream)

        def elapsed_time(self, end_event: torch.Event) -> float:
            if part == "elapsed_time" and next(calls) >= at:
                raise RuntimeError("the device tells no time")
            return super().elapsed_time(end_event)

    return Failing


@pytest.mark.parametrize("part", ["record", "elapsed_time"])
@pytest.mark.parametrize("at", [0, 1, 60])
def test_a_device_that_refuses_events_is_not_planned_and_goes_on_with_the_same_bits(
    at: int, part: str, planners: list[RunPlanner], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _trained(None, 6)
    monkeypatch.setattr(torch, "Event", _made_to_fail(at, part))
    model, optimizer, x = _model()
    with offload(model, optimizer, _CONFIG, on_close="restore") as run:
        losses = [_step(model, optimizer, x) for _ in range(6)]
        assumptions = run.program().assumptions
    found = [each.cpu() for each in [*losses, *(one.detach() for one in model.parameters())]]
    _assert_equal(expected, found)
    assert any("host's clock" in said for said in assumptions)
    assert planners[0].stage is Stage.RESTING
    assert planners[0].choice is None


def _recorder_points(run: Offload) -> Iterator[DevicePoint]:
    session = run._session
    assert session is not None
    learned = session.recorder.learned
    assert learned is not None
    for step in learned.steps:
        yield from step.points or ()


def test_events_are_kept_no_longer_than_until_they_have_passed() -> None:
    model, optimizer, x = _model()
    with offload(model, optimizer, _CONFIG, on_close="release") as run:
        for _ in range(4):
            _step(model, optimizer, x)
        run.program()
        kept = [point for point in _recorder_points(run) if point.event is not None]
        assert len(kept) <= 1  # from which the next time would be asked
        assert len(list(_recorder_points(run))) > 100
