"""``run.checkpoint()`` makes training durable where it lies; ``offload`` goes on from it, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.durable_runs import (
    DURABLE,
    assert_ends_alike,
    begin,
    build,
    layers,
    some_steps,
    state_bytes,
    uninterrupted,
    with_disk,
    written_to_disk,
)
from tests.training.twins import (
    LAYOUTS,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    build_blocks,
    config_of,
)
from tierstore.errors import CapacityError
from tierstore.planning import rules
from tierstore.training import offload
from tierstore.training.session import Session
from tierstore.units import MIB

# ---------------------------------------------------------------------- going on


@with_disk
def test_what_comes_after_a_checkpoint_is_gone_and_training_goes_on_from_it_bit_for_bit(
    layout: str, tmp_path: Path
) -> None:
    first, run = begin(layout, tmp_path)
    assert run.resumed is None
    torch.manual_seed(1)
    some_steps(first, 3)
    run.checkpoint({"step": 3})
    some_steps(first, 2)
    run.close()
    torch.manual_seed(99)  # the generator's state is part of the checkpoint: dropout and data go on
    second, run = begin(layout, tmp_path, seed=9)
    assert run.resumed is not None
    assert (run.resumed.extra, run.resumed.checkpoints) == ({"step": 3}, 1)
    some_steps(second, 2)
    assert_ends_alike(uninterrupted(3, 2), second, run)


@with_disk
def test_going_on_reads_and_writes_no_bundle(layout: str, tmp_path: Path) -> None:
    first, run = begin(layout, tmp_path)
    some_steps(first, 2)
    run.checkpoint()
    keys = {key: run.store.spec(key) for key in run.store if not key.startswith("training/")}
    run.close()
    _, run = begin(layout, tmp_path, seed=9)
    moved = run.stats().traffic
    assert set(moved) == {("disk", "caller"), ("caller", "host")}  # document and mark
    assert moved["disk", "caller"].copies == 1
    assert all(run.store.where(key) == ("disk",) and run.store.spec(key) == keys[key] for key in keys)
    run.close()


def test_a_second_checkpoint_without_a_step_writes_the_document_alone(tmp_path: Path) -> None:
    trial, run = begin("three", tmp_path)
    some_steps(trial, 3)
    run.checkpoint()
    before = written_to_disk(run)
    run.checkpoint()
    run.checkpoint()
    again = (written_to_disk(run) - before) / 2
    assert again < 20_000 < state_bytes(run) / 8
    run.close()


@with_disk
def test_a_checkpoint_writes_only_what_is_newer_above(layout: str, tmp_path: Path) -> None:
    trial, run = begin(layout, tmp_path)
    some_steps(trial, 3)
    run.checkpoint()
    some_steps(trial, 1)
    newer = [key for key in run.store if key.startswith(("param/", "state/"))]
    dirty_bytes = sum(run.store.spec(key).nbytes for key in newer if run.store.where(key)[-1] != "disk")
    assert 0 < dirty_bytes < state_bytes(run)
    before = written_to_disk(run)
    run.checkpoint()
    assert 0 <= written_to_disk(run) - before - dirty_bytes < 20_000
    run.close()


@with_disk
def test_runs_follow_each_other(layout: str, tmp_path: Path) -> None:
    expected = uninterrupted(6)
    logged = []
    for number in range(3):
        trial, run = begin(layout, tmp_path, seed=number)
        if run.resumed is None:
            torch.manual_seed(1)
        else:
            assert run.resumed.checkpoints == number
        some_steps(trial, 2)
        run.checkpoint({"run": number})
        logged += trial.logged
        assert run.stats().checkpoints == number + 1
        assert run.stats().checkpoint_s > 0
        if number < 2:
            run.close()
    trial.logged = logged
    assert_ends_alike(expected, trial, run)


def test_a_run_that_makes_no_checkpoint_leaves_the_former_one(tmp_path: Path) -> None:
    trial, run = begin("disk", tmp_path)
    some_steps(trial, 1)
    run.checkpoint({"step": 1})
    run.close()
    trial, run = begin("disk", tmp_path)
    some_steps(trial, 3)
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 1}
    run.close()


def test_a_checkpoint_before_the_first_step_is_one(tmp_path: Path) -> None:
    trial, run = begin("three", tmp_path)
    torch.manual_seed(1)
    run.checkpoint()
    some_steps(trial, 1)
    run.close()
    trial, run = begin("three", tmp_path, seed=5)
    some_steps(trial, 2)
    assert_ends_alike(uninterrupted(2), trial, run)


# ---------------------------------------------------------------------- other configurations, other bundles


OTHERS: dict[str, tuple[str, str, Mapping[str, object]]] = {
    "a device comes": ("disk", "three", {}),
    "the device goes": ("three", "disk", {}),
    "more room": ("three", "three", {"max_device_memory": "64MB", "offload_cpu_size": "64MB"}),
    "less room": ("disk", "disk", {"offload_cpu_size": "96KB"}),
    "state on the CPU": ("three", "three", {"optimizer_target": "cpu", "offload_cpu_size": "64MB"}),
    "everything to disk": ("disk", "disk", {"offload_param": "disk", "auto_offload": False}),
}


@pytest.mark.parametrize(("before", "after", "more"), OTHERS.values(), ids=OTHERS)
def test_another_configuration_goes_on_from_the_checkpoint(
    before: str, after: str, more: Mapping[str, object], tmp_path: Path
) -> None:
    first, run = begin(before, tmp_path)
    torch.manual_seed(1)
    some_steps(first, 2)
    run.checkpoint()
    run.close()
    second, run = begin(after, tmp_path, 9, more)
    some_steps(second, 1)
    run.checkpoint()
    run.close()
    third, run = begin(before, tmp_path, 3)
    some_steps(third, 2)
    assert_ends_alike(uninterrupted(5), third, run)


def test_bundles_that_are_cut_differently_are_read_and_put_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, large = rules._ALWAYS_SMALL, {"offload_cpu_size": "640MB"}
    monkeypatch.setattr(rules, "_ALWAYS_SMALL", MIB)  # as another version may have it
    first, run = begin("disk", tmp_path, more=large)
    torch.manual_seed(1)
    some_steps(first, 2)
    run.checkpoint()
    together = {key for key in run.store if key.startswith("param/")}
    run.close()
    monkeypatch.setattr(rules, "_ALWAYS_SMALL", usual)
    second, run = begin("disk", tmp_path, seed=9)
    apart = {key for key in run.store if key.startswith("param/")}
    assert len(apart) > len(together)
    assert not any(key.startswith("training/former") for key in run.store)
    some_steps(second, 1)
    run.checkpoint()
    run.close()
    monkeypatch.setattr(rules, "_ALWAYS_SMALL", MIB)
    third, run = begin("disk", tmp_path, 7, large)
    assert {key for key in run.store if key.startswith("param/")} == together
    some_steps(third, 2)
    assert_ends_alike(uninterrupted(5), third, run)


def test_parameters_that_are_frozen_later_travel_apart_from_then_on(tmp_path: Path) -> None:
    first, run = begin("disk", tmp_path)
    torch.manual_seed(1)
    some_steps(first, 2)
    run.checkpoint()
    run.close()
    trials = []
    for is_plain in (True, False):
        trial = uninterrupted(2) if is_plain else Trial(*build(9))
        trial.model.get_parameter("0.up.bias").requires_grad = False
        for parameter in trial.model.parameters():
            parameter.grad = None
        trials.append(trial)
    plain, second = trials
    with offload(second.model, second.optimizers, config_of("disk", tmp_path, DURABLE)) as run:
        random = torch.get_rng_state()
        some_steps(second, 2)
    torch.set_rng_state(random)
    plain.logged.clear()
    some_steps(plain, 2)
    assert_equal_lists(plain.logged, second.logged)
    assert_equal_models(plain.model, second.model)


def test_a_model_without_values_gets_them_from_the_checkpoint(tmp_path: Path) -> None:
    first, run = begin("three", tmp_path)
    torch.manual_seed(1)
    some_steps(first, 2)
    run.checkpoint()
    run.close()
    with torch.device("meta"):
        model = layers()
    first_one = torch.optim.AdamW(model[:2].parameters(), lr=1.0)
    second = Trial(model, [first_one, torch.optim.SGD(model[2:].parameters(), lr=1.0)])
    with offload(model, second.optimizers, config_of("three", tmp_path, DURABLE)) as run:
        some_steps(second, 2)
        assert_ends_alike(uninterrupted(4), second, run)


class Heavy(torch.optim.SGD):
    """Keeps five tensors a parameter, more than anybody would think."""

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - PyTorch's own signature
        """Step, and make state."""
        for group in self.param_groups:
            for parameter in group["params"]:
                for number in range(5):
                    self.state[parameter].setdefault(f"{number}", torch.zeros_like(parameter))
        return super().step(closure)


def test_a_device_that_cannot_hold_the_state_that_there_is_is_refused_before_the_first_step(
    tmp_path: Path,
) -> None:
    more = {**DURABLE, "offload_cpu_size": "64MB"}
    for device, is_enough in (("1MB", True), ("112KB", False)):
        model, _ = build_blocks()
        optimizer = Heavy(model.parameters(), lr=0.1)
        config = config_of("three", tmp_path, {**more, "max_device_memory": device})
        if is_enough:
            with offload(model, optimizer, config) as run:
                some_steps(Trial(model, [optimizer]), 1)
                run.checkpoint()
        else:
            with pytest.raises(CapacityError, match="cannot be trained on the device"):
                offload(model, optimizer, config)


def test_an_opening_that_fails_leaves_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, run = begin("disk", tmp_path)
    some_steps(first, 1)
    run.checkpoint({"step": 1})
    run.close()
    for resume in (True, False):
        with monkeypatch.context() as patch:
            patch.setattr(Session, "watch", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                begin("disk", tmp_path, resume=resume)
        _, run = begin("disk", tmp_path)
        assert run.resumed is not None
        assert run.resumed.extra == {"step": 1}
        run.close()


def test_starting_over_leaves_the_checkpoint_until_the_next_one(tmp_path: Path) -> None:
    first, run = begin("disk", tmp_path)
    some_steps(first, 2)
    run.checkpoint({"attempt": 1})
    run.close()
    second, run = begin("disk", tmp_path, resume=False)
    assert run.resumed is None
    torch.manual_seed(1)
    some_steps(second, 2)
    assert_ends_alike(uninterrupted(2), second, run)
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert run.resumed.extra == {"attempt": 1}
    run.close()
    third, run = begin("disk", tmp_path, resume=False)
    some_steps(third, 1)
    run.checkpoint({"attempt": 3})
    run.close()
    _, run = begin("disk", tmp_path)
    assert run.resumed is not None
    assert (run.resumed.extra, run.resumed.checkpoints) == ({"attempt": 3}, 1)
    run.close()


# ---------------------------------------------------------------------- room


def test_a_disk_that_cannot_hold_two_checkpoints_is_told_at_once_and_again_when_it_is_full(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING", "tierstore"):
        trial, run = begin("disk", tmp_path, more={"offload_disk_size": "300KB"})
    assert "a checkpoint keeps" in caplog.text
    some_steps(trial, 1)
    run.checkpoint({"step": 1})
    with pytest.raises(
        CapacityError, match=r"are kept in 'disk' only for the last flush\. Raise .* or offload_disk_size"
    ):
        some_steps(trial, 40)
    run.close()
    _, run = begin("disk", tmp_path, more={"offload_disk_size": "300KB"})
    assert run.resumed is not None
    assert run.resumed.extra == {"step": 1}
    run.close()


def test_a_disk_of_twice_the_state_and_the_gradients_is_enough(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert LAYOUTS["disk"]["offload_cpu_size"] == "112KB"
    with caplog.at_level("WARNING", "tierstore"):
        trial, run = begin("disk", tmp_path)
        some_steps(trial, 1)
        needed = 2 * state_bytes(run)
        run.close()
        more: Mapping[str, object] = {"offload_disk_size": int(2.7 * needed)}
        trial, run = begin("disk", tmp_path, more=more)
    assert "a checkpoint keeps" not in caplog.text
    for _ in range(4):
        some_steps(trial, 2)
        run.checkpoint()
    run.close()
