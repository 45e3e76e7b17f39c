"""``run.suspend()`` and ``run.resume()``: a whole run off the device and back, as if nothing had happened."""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.one_budget import document
from tests.training.swap_models import Llama, inputs
from tests.training.test_checkpoints import build
from tests.training.test_faults import Disk
from tests.training.twins import (
    LAYOUTS,
    WIDTH,
    Trial,
    adam,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    batch,
    blocks,
    config_of,
    loss_of,
    same,
    step,
    steps,
    with_device,
)
from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload
from tierstore.training.faults import guard

Act = Callable[[Trial], object]
ROOM = {"offload_disk_size": "64MB"}
TARGETS = [(layout, to) for layout in LAYOUTS for to in ("host", "disk")]
every_target = pytest.mark.parametrize(("layout", "to"), TARGETS)


def settings(layout: str, path: Path, **more: object) -> dict[str, object]:
    """Return a configuration with a disk, and a device that has room for loaded state."""
    return config_of(layout, path, ROOM | with_device(layout, "300KB") | more)


def emptied(run: Offload, to: str) -> tuple[str, ...]:
    """Return the tiers that a run suspended to ``to`` must have nothing in."""
    names = run.store.tier_names
    return names[: names.index(to)]


def assert_away(run: Offload, to: str) -> None:
    """Make sure that no tier above has anything."""
    tiers = run.stats().tiers
    for name in emptied(run, to):
        assert (tiers[name].charged_bytes, tiers[name].in_flight_bytes, tiers[name].leased_bytes) == (0, 0, 0)
    assert all(run.store.where(key)[0] not in emptied(run, to) for key in run.store)


# ---------------------------------------------------------------------- as if nothing had happened


def moments(trial: Trial, away: Callable[[], None]) -> None:
    """Train, and go away at every moment between steps."""
    for number in range(5):
        away()
        first = loss_of(trial.model, *batch())
        if number == 2:
            away()  # a graph waits
        first.backward()
        trial.log(first)
        away()
        second = loss_of(trial.model, *batch())
        second.backward()
        if number == 3:
            away()
            trial.log(nn.utils.clip_grad_norm_(trial.model.parameters(), 0.1))
        trial.log_gradients()
        away()
        for optimizer in trial.optimizers:
            optimizer.step()
            away()
        for optimizer in trial.optimizers:
            optimizer.zero_grad(set_to_none=number != 1)
        with torch.no_grad():
            trial.model.eval()
            trial.log(trial.model(batch()[0]))
            trial.model.train()


@pytest.mark.parametrize("selected", [{}, {"pinned": ["0"], "ignored": [r"2\.up"]}], ids=["", "selected"])
@every_target
def test_training_goes_on_as_if_nothing_had_happened(
    layout: str, to: str, selected: Mapping[str, list[str]], tmp_path: Path
) -> None:
    plain, ours = Trial(*build()), Trial(*build())
    torch.manual_seed(1)
    moments(plain, lambda: None)
    with offload(ours.model, ours.optimizers, settings(layout, tmp_path), **selected) as run:  # type: ignore[arg-type]

        def away() -> None:
            identities = [(id(p), id(p.grad)) for p in ours.model.parameters()]
            run.suspend(to)
            assert_away(run, to)
            run.suspend(to)
            assert_away(run, to)
            run.resume()
            run.resume()
            assert identities == [(id(p), id(p.grad)) for p in ours.model.parameters()]

        torch.manual_seed(1)
        moments(ours, away)
        run.store.check()
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


def test_the_devices_memory_is_free_for_others(tmp_path: Path) -> None:
    """As a meter sees it that asks the store nothing."""
    trial = Trial(model := blocks(4), adam(model))
    big = 220 << 10
    with DeviceBudget(256 << 10) as meter:
        config = settings("device", tmp_path, max_device_memory="240KB")
        with offload(model, trial.optimizers, config, pinned=["1"]) as run:
            for _ in range(3):
                loss = loss_of(model, *batch())
                loss.backward()
                del loss
                run.suspend()
                assert meter.live_bytes < 16 << 10
                other = torch.empty(big, dtype=torch.uint8)
                del other
                run.resume()
                for optimizer in trial.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()


def test_what_was_on_the_device_comes_back(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings("device", tmp_path, max_device_memory="8MB")) as run:
        steps(4)(trial)
        faults = run.store.stats().faults
        step(trial)
        usual = run.store.stats().faults - faults
        before = {key for key in run.store if run.store.where(key)[0] == "device"}
        assert before
        run.suspend()
        run.resume()
        run.store.fetch(*before).result()
        faults = run.store.stats().faults
        step(trial)
        assert run.store.stats().faults - faults <= usual
        assert {key for key in run.store if run.store.where(key)[0] == "device"} >= before


def test_a_run_may_go_further_down(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    expected = Trial(twin := blocks(), adam(twin))
    twin.load_state_dict(model.state_dict())
    with offload(model, trial.optimizers, settings("three", tmp_path)) as run:
        run.suspend()
        run.suspend("disk")
        assert_away(run, "disk")
        run.suspend("host")
        assert_away(run, "disk")
        run.resume()
        for each in (expected, trial):
            torch.manual_seed(0)
            steps(2)(each)
    assert_equal_lists(expected.logged, trial.logged)


# ---------------------------------------------------------------------- while it is away


def names_resume(act: Callable[[], object]) -> None:
    with pytest.raises((UsageError, RuntimeError), match=r"the run is suspended.*run\.resume\(\)"):
        act()


@every_target
def test_what_needs_the_bytes_is_refused(layout: str, to: str, tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings(layout, tmp_path)) as run:
        steps(2)(trial)
        loss_of(model, *batch()).backward()
        graph = loss_of(model, *batch())
        run.save(tmp_path / "saved")
        expected = {name: value.clone() for name, value in model.state_dict().items()}
        run.suspend(to)
        parameter = model.get_parameter("0.up.weight")
        used = [each for each in (parameter, parameter.grad) if guard.guarded_tensor_of(each) is not None]
        for act in (
            lambda: model(batch()[0]),
            lambda: model.get_submodule("0.up")(batch()[0]),
            graph.backward,
            trial.optimizer.step,
            lambda: trial.optimizer.step(lambda: loss_of(model, *batch()).item()),
            lambda: parameter + 1,
            lambda: parameter.data,
            lambda: run.load(tmp_path / "saved"),
            lambda: model.load_state_dict(expected),
            lambda: torch.mul(used[-1], 2),  # type: ignore[arg-type]
        ):
            names_resume(act)
            assert_away(run, to)
        assert {name: value.shape for name, value in model.named_parameters()}  # looks are free
        assert run.stats().store is not None
        found = model.state_dict()
        assert all(same(expected[name], found[name]) for name in expected)
        assert trial.optimizer.state_dict()["state"]
        run.save(tmp_path / "again")
        assert_away(run, to)
        used.clear()
        trial.optimizer.zero_grad()
        assert all(each.grad is None for each in model.parameters())
        run.resume()
        step(trial)
        del graph


@every_target
def test_a_suspended_run_can_be_closed(layout: str, to: str, tmp_path: Path) -> None:
    plain, ours = Trial(*build()), Trial(*build())
    for trial in (plain, ours):
        torch.manual_seed(2)
        if trial is plain:
            steps(2)(trial)
            loss_of(trial.model, *batch()).backward()
            continue
        with offload(trial.model, trial.optimizers, settings(layout, tmp_path), pinned=["0"]) as run:
            steps(2)(trial)
            loss_of(trial.model, *batch()).backward()
            run.suspend(to)
        for what in (run.suspend, run.resume):
            with pytest.raises(UsageError, match="the run is closed"):
                what()
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


@pytest.mark.parametrize(("layout", "to"), [t for t in TARGETS if t[0] in ("disk", "three")])
def test_a_suspended_run_can_be_made_durable(layout: str, to: str, tmp_path: Path) -> None:
    plain = Trial(*build())
    torch.manual_seed(1)
    steps(4)(plain)
    config = settings(layout, tmp_path, durable=True)
    first = Trial(*build())
    with offload(first.model, first.optimizers, config, pinned=["0"]) as run:
        torch.manual_seed(1)
        steps(2)(first)
        run.suspend(to)
        run.checkpoint()
        assert_away(run, to)
    second = Trial(*build(seed=5))
    with offload(second.model, second.optimizers, config):
        steps(2)(second)
    assert_equal_lists(plain.logged, first.logged + second.logged)
    assert_equal_models(plain.model, second.model)


def test_an_optimizers_state_may_be_loaded_meanwhile(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings("three", tmp_path)) as run:
        steps(1)(trial)
        state = trial.optimizer.state_dict()
        run.suspend()
        trial.optimizer.load_state_dict(state)
        assert_away(run, "host")
        run.resume()
        step(trial)


@every_target
def test_what_was_pointed_elsewhere_goes_away_too(layout: str, to: str, tmp_path: Path) -> None:
    plain, ours = Trial(model := blocks(), adam(model)), Trial(model := blocks(), adam(model))
    ours.model.load_state_dict(plain.model.state_dict())
    with offload(ours.model, ours.optimizers, settings(layout, tmp_path)) as run:
        for trial in (plain, ours):
            torch.manual_seed(0)
            steps(1)(trial)
            trial.model.get_parameter("1.up.weight").data = torch.ones(2 * WIDTH, WIDTH)
            if trial is ours:
                run.suspend(to)
                assert_away(run, to)
                run.resume()
            steps(1)(trial)
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)


@pytest.mark.usefixtures("compiler_at_work")
def test_what_was_pointed_elsewhere_comes_home_while_the_compiler_evaluates_frames(tmp_path: Path) -> None:
    """An argument of a function has one reference more then."""
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings("three", tmp_path)) as run:
        steps(1)(trial)
        model.get_parameter("1.up.weight").data = torch.ones(2 * WIDTH, WIDTH)
        run.suspend("host")
        assert_away(run, "host")
        run.resume()


# ---------------------------------------------------------------------- what is refused


def test_it_is_done_between_steps(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings("three", tmp_path)) as run:
        steps(1)(trial)

        def refused(match: str) -> Callable[..., None]:
            def act(*_: object) -> None:
                with pytest.raises(UsageError, match=match):
                    run.suspend()

            return act

        for handle in (
            model[1].register_forward_hook(refused("the model runs")),
            model.get_parameter("1.up.weight").register_hook(refused("a backward pass runs")),
            trial.optimizer.register_step_post_hook(refused("an optimizer steps")),
        ):
            step(trial)
            handle.remove()
        alias = model.get_parameter("0.up.weight").data
        refused(r"the bytes of 1 bundles are in use")()
        del alias
        step(trial)
        run.suspend()


def test_swapped_activations_have_to_be_used_first(tmp_path: Path) -> None:
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offload(model, optimizer, document(tmp_path)) as run:
        loss = model(inputs()).square().mean()
        with pytest.raises(UsageError, match=r"\d+ swapped activations wait for backward"):
            run.suspend()
        loss.backward()
        run.suspend()
        run.resume()
        optimizer.step()
        loss = model(inputs()).square().mean()
        del loss
        run.suspend()


def test_a_tier_that_is_not_there_is_refused(tmp_path: Path) -> None:
    model = blocks()
    with offload(model, None, config_of("device", tmp_path)) as run:
        for to in ("disk", "device", "cpu"):
            with pytest.raises(
                UsageError, match=r"accepted is 'host'; the tiers of this run are device, host"
            ):
                run.suspend(to)
        run.suspend()
    with offload(model, None, {"memory_offload": "OFF"}) as run:
        for what in (run.suspend, run.resume):
            with pytest.raises(UsageError, match="memory_offload is OFF"):
                what()


def test_what_the_tiers_below_cannot_hold_is_refused_before_anything_moves(tmp_path: Path) -> None:
    trial = Trial(model := blocks(), adam(model))
    config = config_of("device", tmp_path, {"max_device_memory": "2MB", "offload_cpu_size": "256KB"})
    with offload(model, trial.optimizers, config) as run:
        steps(3)(trial)
        traffic = run.stats().traffic
        where = {key: run.store.where(key) for key in run.store}
        with pytest.raises(CapacityError, match=r"run\.suspend\(to='host'\) has to put .* into host"):
            run.suspend()
        assert where == {key: run.store.where(key) for key in run.store}
        assert traffic == run.stats().traffic
        step(trial)


def test_what_stays_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trial = Trial(model := blocks(), adam(model))
    with offload(model, trial.optimizers, settings("device", tmp_path), ignored=[r"0\.up"]) as run:
        model.get_parameter("3.bias").grad = kept = torch.ones(5)
        with caplog.at_level(logging.WARNING, "tierstore"):
            run.suspend()
        (record,) = caplog.records
        assert "suspended; 3 tensors stay where they are: 0.up.weight, 0.up.bias" in record.message
        assert "the gradient of 3.bias" in record.message
        assert kept.sum() == 5


# ---------------------------------------------------------------------- faults


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_failure_of_any_move_leaves_a_run_that_goes_on(layout: str, tmp_path: Path, disk: Disk) -> None:
    plain, ours = Trial(*build()), Trial(*build())
    torch.manual_seed(1)
    steps(2)(plain)
    with offload(ours.model, ours.optimizers, settings(layout, tmp_path), pinned=["0"]) as run:
        torch.manual_seed(1)
        steps(2)(ours)
        for number in itertools.count(1):
            disk.faulty.fail_next(number)
            failures = disk.faulty.failures
            with contextlib.suppress(BackendError, CapacityError):
                run.suspend("disk")
                disk.faulty.heal()
                assert_away(run, "disk")
            disk.faulty.heal()
            assert_equal_lists(
                list(plain.model.state_dict().values()), list(ours.model.state_dict().values())
            )
            run.resume()
            for trial in (plain, ours):
                torch.manual_seed(number)
                step(trial)
            run.store.check()
            if disk.faulty.failures == failures:
                break
        assert number > 3
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        assert_equal_states(expected, found)


def test_a_failure_on_the_way_back_leaves_it_suspended(tmp_path: Path, disk: Disk) -> None:
    trial = Trial(model := blocks(), adam(model))
    expected = Trial(twin := blocks(), adam(twin))
    twin.load_state_dict(model.state_dict())
    with offload(model, trial.optimizers, settings("three", tmp_path), pinned=["0"]) as run:
        run.suspend("disk")
        disk.faulty.fail_next(1)
        with pytest.raises(BackendError):
            run.resume()
        disk.faulty.heal()
        assert_away(run, "disk")
        names_resume(lambda: model(batch()[0]))
        run.resume()
        for each in (expected, trial):
            torch.manual_seed(0)
            steps(2)(each)
    assert_equal_lists(expected.logged, trial.logged)


def test_an_evaluation_model_goes_away_too(tmp_path: Path) -> None:
    model = blocks()
    data: Tensor = batch()[0]
    expected = model(data).detach()
    with offload(model, None, settings("three", tmp_path)) as run, torch.inference_mode():
        for _ in range(3):
            assert torch.equal(model(data), expected)
            run.suspend()
            assert_away(run, "host")
            run.resume()
