"""Steps ahead, where what changes is hard to see: aliases, scalers, other optimizers, leases and modes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests.training.ahead_loops import Taken, count_taken, quiet_step
from tests.training.twins import (
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    loss_of,
)
from tierstore.training import offload

__all__ = ["count_taken"]  # a fixture


def some_gradients(trial: Trial) -> list[Tensor]:
    """Return the gradients of a layer in the midst: what has aliases stays in memory."""
    return [p.grad for p in list(trial.model.parameters())[8:10] if p.grad is not None]


def test_an_alias_of_a_gradient_may_write_to_it_at_any_time(tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            quiet_step(trial)
        loss_of(trial.model, *batch()).backward()
        trial.optimizer.step()
        trial.optimizer.zero_grad(set_to_none=False)
        buckets = [gradient.view(-1) for gradient in some_gradients(trial)]
        for _ in range(4):
            loss_of(trial.model, *batch()).backward()
            for bucket in buckets:
                bucket.mul_(0.5)
            trial.optimizer.step()
            trial.optimizer.zero_grad(set_to_none=False)

    assert_same(build_blocks, loop, "disk", tmp_path)
    assert taken.keys


def test_an_alias_between_two_backward_passes(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(6):
            loss_of(trial.model, *batch()).backward()
            kept = [gradient.detach() for gradient in some_gradients(trial)] if turn > 3 else []
            loss_of(trial.model, *batch()).backward()
            for gradient in kept:
                gradient.mul_(0.5)
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "disk", tmp_path)


def test_two_optimizers_of_the_same_parameters_in_turns(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9) for rate in (0.1, 0.01)]

    def loop(trial: Trial) -> None:
        for turn in range(8):
            loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)
            trial.optimizers[turn % 2].step()
            trial.model.zero_grad()

    assert_same(build, loop, "disk", tmp_path)


def test_a_lease_of_somebody_elses_refuses_the_step_and_breaks_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    with offload(model, optimizers, config_of("disk", tmp_path)) as run:
        for _ in range(3):
            quiet_step(trial)
        loss_of(model, *batch()).backward()
        key = next(key for key in run.store if key.startswith("param/2.up"))
        with run.store.lease(key), pytest.raises(ts.LeaseError):
            optimizers[0].step()
        optimizers[0].zero_grad()
        for _ in range(3):
            quiet_step(trial)
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_a_backward_pass_under_autocast_steps_as_the_step_itself_would(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.Adafactor(model.parameters(), lr=1e-2)]

    def loop(trial: Trial) -> None:
        for _ in range(5):
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(trial.model, *batch())
                loss.backward()
            trial.log(loss)
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build, loop, "disk", tmp_path)


def test_what_a_scaler_tells_a_fused_optimizer_is_heard(tmp_path: Path, taken: Taken) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)]

    def loop(trial: Trial) -> None:
        optimizer: Any = trial.optimizer
        for turn in range(6):
            loss_of(trial.model, *batch()).backward()
            if turn == 3:
                optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            if turn == 3:
                del optimizer.found_inf
            optimizer.zero_grad()

    assert_same(build, loop, "disk", tmp_path)
    assert taken.keys


def test_options_that_are_changed_in_place_are_seen(tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        trial.optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        for turn in range(6):
            loss_of(trial.model, *batch()).backward()
            trial.optimizer.param_groups[0]["betas"][0] = 0.5 if turn == 3 else 0.9
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "disk", tmp_path)
    assert taken.keys


def test_state_that_cannot_be_compared_makes_the_step_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    with offload(model, optimizers, config_of("disk", tmp_path)) as run:
        for turn in range(6):
            quiet_step(trial)
            if turn == 2:
                for parameter in model.parameters():
                    optimizers[0].state[parameter]["tag"] = np.array([1, 2])
        assert not [key for key in run.store if key.endswith("~next")]
