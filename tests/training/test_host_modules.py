"""Modules that compute on the host beside a device: the bits of plain PyTorch with the same modules there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import checkpoint

from tests import target
from tests.training import twins
from tests.training.host_models import (
    CASES,
    WIDTH,
    Moved,
    assert_confined,
    assert_same_placed,
    has_device,
    place_plainly,
    trial_of,
)
from tests.training.twins import LAYOUTS, Trial, config_of, is_on_accelerator
from tierstore.training import offload, place


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(6, WIDTH), torch.randint(0, 5, (6,))


def loss_of(trial: Trial) -> Tensor:
    x, classes = batch()
    return nn.functional.cross_entropy(trial.model(x), classes)


def _step(trial: Trial) -> None:
    trial.log_gradients()
    for optimizer in trial.optimizers:
        optimizer.step()
        optimizer.zero_grad()


def plainly(trial: Trial) -> None:
    for _ in range(4):
        loss = loss_of(trial)
        loss.backward()
        trial.log(loss)
        _step(trial)


def accumulating(trial: Trial) -> None:
    for _ in range(2):
        for _ in range(3):
            loss = loss_of(trial) / 3
            loss.backward()
            trial.log(loss)
        _step(trial)


def with_evaluation(trial: Trial) -> None:
    for _ in range(2):
        loss = loss_of(trial)
        with torch.no_grad():
            trial.log(trial.model(batch()[0]))
        loss.backward()
        with torch.inference_mode():
            trial.log(trial.model(batch()[0]))
        _step(trial)
    trial.model.eval()
    trial.log(trial.model(batch()[0]))


def retaining(trial: Trial) -> None:
    for _ in range(2):
        x = batch()[0].requires_grad_()
        loss = trial.model(x).square().mean()
        loss.backward(retain_graph=True)
        trial.log(x.grad)
        loss.backward()
        trial.log(x.grad)
        _step(trial)


def twice_differentiated(trial: Trial) -> None:
    for _ in range(2):
        x = batch()[0].requires_grad_()
        loss = trial.model(x).sigmoid().square().mean()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + gradient.square().sum()).backward()
        trial.log(gradient)
        trial.log(x.grad)
        _step(trial)


class _OnPurposeError(Exception):
    pass


def failing(trial: Trial) -> None:
    for module in list(trial.model.modules()):

        def fail(*_: object) -> None:
            raise _OnPurposeError

        for register in (module.register_forward_pre_hook, module.register_forward_hook):
            handle = register(fail)
            with pytest.raises(_OnPurposeError):
                loss_of(trial)
            handle.remove()
        loss = loss_of(trial)
        loss.backward()
        trial.log(loss)
        _step(trial)


def scaled(trial: Trial) -> None:
    scaler = torch.amp.GradScaler(device=target.accelerator or "cpu", init_scale=64.0)
    for _ in range(3):
        loss = loss_of(trial)
        scaler.scale(loss).backward()
        for optimizer in trial.optimizers:
            scaler.unscale_(optimizer)
        trial.log_gradients()
        for optimizer in trial.optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update()
        trial.log(loss)


def clipped(trial: Trial) -> None:
    for _ in range(3):
        loss_of(trial).backward()
        for parameter in trial.model.parameters():
            nn.utils.clip_grad_norm_([parameter], 0.1)
        _step(trial)


def checkpointed(trial: Trial) -> None:
    for _ in range(3):
        x, classes = batch()
        y: Any = checkpoint.checkpoint(trial.model, x, use_reentrant=False)
        loss = nn.functional.cross_entropy(y, classes)
        loss.backward()
        trial.log(loss)
        _step(trial)


def saved_on_cpu(trial: Trial) -> None:
    for _ in range(2):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(trial)
        loss.backward()
        trial.log(loss)
        _step(trial)


def looking(trial: Trial) -> None:
    """Parameters and state are read and written between steps."""
    for _ in range(3):
        loss_of(trial).backward()
        with torch.no_grad():
            for parameter in trial.model.parameters():
                trial.log(parameter.sum())
                parameter.mul_(0.9)
        _step(trial)
        for optimizer in trial.optimizers:
            for entries in optimizer.state.values():
                for value in entries.values():
                    trial.log(value)


LOOPS: dict[str, Callable[[Trial], None]] = {
    "accumulating": accumulating,
    "with evaluation": with_evaluation,
    "retaining": retaining,
    "twice differentiated": twice_differentiated,
    "failing": failing,
    "scaled": scaled,
    "clipped": clipped,
    "checkpointed": checkpointed,
    "saved on cpu": saved_on_cpu,
    "looking": looking,
}


GRID = [(layout, case) for layout in LAYOUTS for case in CASES if has_device(layout) or case != "in place"]


@pytest.mark.parametrize(("layout", "case"), GRID)
def test_the_bits_are_those_of_plain_pytorch(layout: str, case: str, tmp_path: Path) -> None:
    assert_same_placed(CASES[case], plainly, layout, tmp_path)


# Plain PyTorch unscales the host's gradients by a number that is still on its way from the simulated device.
KINDS = [(case, loop) for case in CASES for loop in LOOPS if not (is_on_accelerator and loop == "scaled")]

ALWAYS = [
    ("neighbours", "twice differentiated"),
    ("neighbours", "with evaluation"),
    ("dense", "checkpointed"),
]


@pytest.mark.parametrize("layout", ["three"])
@pytest.mark.parametrize(
    ("case", "loop"), [each for n, each in enumerate(KINDS) if n % 3 == 0 or each in ALWAYS]
)
def test_the_bits_of_loops_of_all_kinds(layout: str, case: str, loop: str, tmp_path: Path) -> None:
    more = twins.with_device(layout, "256KB")
    assert_same_placed(CASES[case], LOOPS[loop], layout, tmp_path, more)


@pytest.mark.parametrize("layout", ["device"])
def test_a_gradient_that_has_room_on_the_device_is_there_for_a_step_on_the_host(
    layout: str, tmp_path: Path
) -> None:
    more = {"optimizer_target": "cpu", **twins.with_device(layout, "64MB")}
    twins.assert_same(twins.build_blocks, twins.steps(6), layout, tmp_path, more)


@pytest.mark.parametrize("layout", ["device"])
@pytest.mark.parametrize("case", ["layer", "dense", "containers", "inner on the device", "embedding"])
def test_a_model_without_a_run_is_placed_as_well(layout: str, case: str, tmp_path: Path) -> None:
    """On an accelerator values cross; elsewhere all is in one place.  A run inside takes it over."""
    placed = CASES[case]
    plain, ours = trial_of(placed), trial_of(placed)
    if is_on_accelerator:
        place_plainly(plain.model, placed, Moved())
    torch.manual_seed(1)
    plainly(plain)
    torch.manual_seed(1)
    with place(ours.model, placed.patterns):
        plainly(ours)
    twins.assert_equal_lists(plain.logged, ours.logged)
    twins.assert_equal_models(plain.model, ours.model)
    assert not any(module._forward_pre_hooks for module in ours.model.modules())
    with (
        place(ours.model, placed.patterns),
        offload(
            ours.model, list(ours.optimizers), twins.with_rest(config_of(layout, tmp_path), ours.model)
        ) as run,
    ):
        ours.run = run
        plainly(ours)
        assert dict(run.placement.modules) == placed.patterns
        assert_confined(ours, placed)
