"""A disk that fails or stands still, and quotas that change, during a step: the next step is right."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.training.twins import (
    Trial,
    assert_equal_models,
    assert_equal_states,
    batch,
    build_blocks,
    config_of,
    loss_of,
    same,
    with_device,
)
from tierstore.engine.registry import open_backend
from tierstore.spi import Backend
from tierstore.testing.faults import Faulty, Gate
from tierstore.training import offload

PATIENCE_S = 60.0
Batch = tuple[torch.Tensor, torch.Tensor]


class Disk:
    """The disk tier of the next store that is opened, behind a gate and with faults on demand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faulty: Faulty
        self.gate: Gate
        monkeypatch.setattr("tierstore.tier_backends.open_backend", self._open)

    def _open(self, name: str, *, capacity_bytes: int, options: Mapping[str, object]) -> Backend:
        backend = open_backend(name, capacity_bytes=capacity_bytes, options=options)
        if name != "files":
            return backend
        self.faulty = Faulty(backend)
        self.gate = Gate(self.faulty)
        self.gate.open()
        return self.gate


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def twins() -> tuple[Trial, Trial]:
    """Return two models that are alike, with their optimizers."""
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(Trial(*build_blocks()))
    return made[0], made[1]


def train(trial: Trial, data: Batch) -> torch.Tensor:
    """Do one step as any loop does; return the loss."""
    loss = loss_of(trial.model, *data)
    loss.backward()
    trial.optimizer.step()
    trial.optimizer.zero_grad()
    return loss.detach().clone()


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_an_io_error_at_any_operation_of_a_step_loses_nothing(
    layout: str, tmp_path: Path, disk: Disk
) -> None:
    plain, ours = twins()
    roomy = with_device(layout, "256KB")  # state that is loaded lies on the device until the next step
    with offload(ours.model, ours.optimizer, config_of(layout, tmp_path, roomy)) as run:
        for _ in range(3):
            data = batch()
            assert same(train(plain, data), train(ours, data))
        for number in itertools.count(1):
            before, data = values(plain.model), batch()
            expected = train(plain, data)
            disk.faulty.fail_next(number)
            failures = disk.faulty.failures
            if not _survives(ours, data, expected):
                disk.faulty.heal()
                ours.optimizer.zero_grad()
                _assert_old_or_new(ours.model, before, values(plain.model))
                ours.model.load_state_dict(plain.model.state_dict())
                ours.optimizer.load_state_dict(copy.deepcopy(plain.optimizer.state_dict()))
            run.store.check()
            disk.faulty.heal()
            if disk.faulty.failures == failures:
                break
        assert number > 10, "a step of this model does more with its disk"
        data = batch()
        assert same(train(plain, data), train(ours, data))
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)


def _survives(ours: Trial, data: Batch, expected: torch.Tensor) -> bool:
    """Return whether a step ends well, which it does if nobody had to wait for what failed."""
    try:
        assert same(train(ours, data), expected)
    except (ts.BackendError, ts.CapacityError):
        return False
    return True


def _assert_old_or_new(
    model: nn.Module, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor]
) -> None:
    for name, value in model.state_dict().items():
        assert same(value, old[name]) or same(value, new[name]), f"{name} is neither the old nor the new"


@pytest.mark.parametrize("layout", ["disk", "three"])
def test_a_disk_that_stands_still_holds_the_step_up_until_it_is_told_to_go(
    layout: str, tmp_path: Path, disk: Disk
) -> None:
    plain, ours = twins()
    with offload(ours.model, ours.optimizer, config_of(layout, tmp_path)):
        for _ in range(3):
            data = batch()
            assert same(train(plain, data), train(ours, data))
        disk.gate.shut()
        data, losses = batch(), []
        worker = threading.Thread(target=lambda: losses.append(train(ours, data)))
        worker.start()
        for _ in range(5):
            disk.gate.wait_until_held(1, timeout_s=PATIENCE_S)
            disk.gate.step()
        disk.gate.wait_until_held(1, timeout_s=PATIENCE_S)
        assert not losses
        disk.gate.open()
        worker.join(PATIENCE_S)
        assert same(train(plain, data), losses[0])
    assert_equal_models(plain.model, ours.model)


@pytest.mark.parametrize("where", ["forward", "backward", "between"])
def test_a_quota_that_changes_during_a_step_changes_no_bits(where: str, tmp_path: Path) -> None:
    plain, ours = twins()
    capacities = itertools.cycle(["96KB", "160KB", "100KB", "1MB", "112KB"])
    with offload(ours.model, ours.optimizer, config_of("disk", tmp_path)) as run:

        def resize(*_: object) -> None:
            run.store.resize("host", next(capacities))
            run.store.check()

        middle = ours.model[1].up  # type: ignore[index]
        if where == "forward":
            middle.register_forward_hook(resize)
        elif where == "backward":
            middle.register_full_backward_hook(resize)
        else:
            ours.optimizer.register_step_pre_hook(resize)
        for _ in range(8):
            data = batch()
            assert same(train(plain, data), train(ours, data))
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)
