"""Optimizers that step in backward: in hooks of the user's, and by ``optimizer_in_backward``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.twins import (
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    with_device,
)
from tests.training.whole_step_kinds import KeepsMoments
from tierstore.errors import UsageError
from tierstore.optim import FTRL, LazyAdam
from tierstore.training import offload

optim = torch.optim
IN_BACKWARD = {"optimizer_in_backward": True}

# ---------------------------------------------------------------------- hooks of the user's


def one_for_each() -> tuple[nn.Module, Sequence[Optimizer]]:
    model = blocks(2)
    return model, [optim.AdamW([parameter], lr=1e-2) for parameter in model.parameters()]


def step_in_hooks(trial: Trial, every: int = 1) -> None:
    """Step each parameter's optimizers after every so many accumulations, and clear the gradient."""
    owners: dict[Tensor, list[Optimizer]] = {}
    for optimizer in trial.optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                owners.setdefault(parameter, []).append(optimizer)
    counts = dict.fromkeys(owners, 0)

    def hook(parameter: Tensor) -> None:
        counts[parameter] += 1
        trial.log(parameter.grad)
        if counts[parameter] % every == 0:
            for optimizer in owners[parameter]:
                optimizer.step()
            parameter.grad = None

    for parameter in owners:
        parameter.register_post_accumulate_grad_hook(hook)


def passes(count: int = 4) -> Callable[[Trial], None]:
    def loop(trial: Trial) -> None:
        for _ in range(count):
            loss = loss_of(trial.model, *batch())
            trial.log(loss)
            loss.backward()

    return loop


@every_layout
@pytest.mark.parametrize("every", [1, 2])
def test_hooks_that_step_one_optimizer_for_each_parameter(layout: str, tmp_path: Path, every: int) -> None:
    def loop(trial: Trial) -> None:
        step_in_hooks(trial, every)
        passes(6)(trial)
        trial.log_gradients()

    assert_same(one_for_each, loop, layout, tmp_path, with_device(layout, "192KB"))


@every_layout
def test_hooks_that_step_optimizers_of_their_own_kind(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [KeepsMoments([parameter]) for parameter in model.parameters()]

    def loop(trial: Trial) -> None:
        step_in_hooks(trial)
        passes()(trial)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "192KB"))


def test_a_step_costs_the_same_whatever_the_number_of_optimizers(tmp_path: Path) -> None:
    """Each gradient asks the optimizer of its own parameter, and no other."""
    asked: list[int] = []

    def count(optimizers: int) -> int:
        model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(optimizers)))
        each = [optim.SGD([parameter], lr=0.1) for parameter in model.parameters()]
        with offload(model, each, config_of("host", tmp_path / str(optimizers))):
            step_in_hooks(Trial(model, each))
            model(torch.randn(2, 4)).sum().backward()
            calls = Calls()
            with calls:
                model(torch.randn(2, 4)).sum().backward()
        asked.append(calls.count)
        return calls.count

    few, many = count(20), count(80)
    assert many <= 4.6 * few


class Calls:
    """Counts Python's calls, which say what a loop costs on any machine."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        def note(frame: object, event: str, argument: object) -> None:
            del frame, argument
            self.count += event == "call"

        sys.setprofile(note)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)


# ---------------------------------------------------------------------- our own option


def assert_same_as_hooks(
    build: Callable[[], tuple[nn.Module, Sequence[Optimizer]]],
    loop: Callable[[Trial], None],
    layout: str,
    path: Path,
    more: dict[str, object] | None = None,
) -> None:
    """Compare with plain PyTorch where hooks after accumulation step each parameter alone."""

    def with_hooks(trial: Trial) -> None:
        if trial.run is None:
            step_each_alone(trial)
        loop(trial)

    assert_same(build, with_hooks, layout, path, {**IN_BACKWARD, **(more or {})})


def step_each_alone(trial: Trial) -> None:
    """What ``optimizer_in_backward`` means, in plain PyTorch."""

    def hook(parameter: Tensor) -> None:
        if not any(p is parameter for o in trial.optimizers for g in o.param_groups for p in g["params"]):
            return
        for optimizer in trial.optimizers:
            former = [group["params"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["params"] = [each for each in group["params"] if each is parameter]
            try:
                type(optimizer).step.__wrapped__(optimizer)  # type: ignore[attr-defined]
            finally:
                for group, parameters in zip(optimizer.param_groups, former, strict=True):
                    group["params"] = parameters
        parameter.grad = None

    for parameter in trial.model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(hook)


KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda parameters: optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda parameters: optim.Adam(parameters, lr=1e-2),
    "adamw-foreach": lambda parameters: optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw-fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, fused=True),
    "adafactor": lambda parameters: optim.Adafactor(parameters, lr=1e-2),
    "lazy-adam": lambda parameters: LazyAdam(parameters, lr=1e-2),
    "ftrl": lambda parameters: FTRL(parameters, lr=0.1, l1=1e-4),
}


@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_the_bits_are_those_of_hooks(layout: str, tmp_path: Path, kind: str) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [KINDS[kind](model.parameters())]

    def loop(trial: Trial) -> None:
        schedule = optim.lr_scheduler.ExponentialLR(trial.optimizer, 0.9)
        for _ in range(4):
            passes(1)(trial)
            trial.log_gradients()  # there are none
            trial.optimizer.step()
            schedule.step()
            trial.optimizer.zero_grad()

    assert_same_as_hooks(build, loop, layout, tmp_path)


@every_layout
def test_a_parameter_that_is_not_in_every_pass(layout: str, tmp_path: Path) -> None:
    class Sometimes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra, self.head = blocks(1)[0], nn.Linear(48, 48), nn.Linear(48, 5)
            self.turn = 0

        def forward(self, x: Tensor) -> Tensor:
            self.turn += 1
            x = self.body(x)
            if self.turn % 3 == 0:
                x = x + nn.functional.linear(x, self.extra.weight)
            result: Tensor = self.head(x)
            return result

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Sometimes()
        return model, [optim.Adam(model.parameters(), lr=1e-2)]

    assert_same_as_hooks(build, passes(7), layout, tmp_path)


@every_layout
def test_tied_and_checkpointed_parameters(layout: str, tmp_path: Path) -> None:
    """A checkpoint that runs backward inside backward gives a shared parameter several gradients."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = nn.Linear(48, 48), nn.Linear(48, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = x.requires_grad_()
            for _ in range(3):
                x = checkpoint(self.inner, x, use_reentrant=True)
            result: Tensor = self.head(x)
            return result

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Tied()
        return model, [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            inputs, classes = batch()
            nn.functional.cross_entropy(trial.model(inputs), classes).backward()

    assert_same_as_hooks(build, loop, layout, tmp_path)


@every_layout
def test_several_optimizers_and_frozen_parameters(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(3)
        for parameter in model[0].parameters():
            parameter.requires_grad = False
        return model, [
            optim.Adam(model[1].parameters(), lr=1e-2),
            optim.SGD(model[2:].parameters(), lr=0.1),
            optim.SGD(model[1].parameters(), lr=1e-3, momentum=0.5),
        ]

    assert_same_as_hooks(build, passes(), layout, tmp_path)


@every_layout
def test_a_parameter_of_no_optimizer_keeps_its_gradient(layout: str, tmp_path: Path) -> None:
    model = blocks(2)
    optimizer = optim.SGD(model[0].parameters(), lr=0.1)
    with offload(model, optimizer, config_of(layout, tmp_path, IN_BACKWARD)):
        for _ in range(2):
            loss_of(model, *batch()).backward()
        assert all(parameter.grad is None for parameter in model[0].parameters())
        assert all(parameter.grad is not None for parameter in model[1:].parameters())


@every_layout
def test_a_group_added_between_passes(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [optim.Adam(model[0].parameters(), lr=1e-2)]

    def loop(trial: Trial) -> None:
        passes(2)(trial)
        trial.model.zero_grad()
        trial.optimizer.add_param_group({"params": list(trial.model[1:].parameters()), "lr": 1e-3})  # type: ignore[index]
        passes(3)(trial)

    assert_same_as_hooks(build, loop, layout, tmp_path, with_device(layout, "192KB"))


class Fails(torch.autograd.Function):
    """Raises in backward while it is on."""

    is_on = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # noqa: ANN401
        del ctx
        if Fails.is_on:
            raise ValueError
        return gradient


@every_layout
def test_an_interrupted_pass_has_stepped_what_it_reached(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        assert isinstance(trial.model, nn.Sequential)
        for turn in range(4):
            Fails.is_on = turn == 2
            inputs, classes = batch()
            hidden = Fails.apply(trial.model[:2](inputs))  # type: ignore[no-untyped-call]
            loss = nn.functional.cross_entropy(trial.model[2:](hidden), classes)
            try:
                loss.backward()
            except ValueError:
                assert turn == 2
            for parameter in trial.model.parameters():
                trial.log(parameter.sum())

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(3)
        return model, [optim.Adam(model.parameters(), lr=1e-2)]

    assert_same_as_hooks(build, loop, layout, tmp_path)


# ---------------------------------------------------------------------- what is refused


def test_an_optimizer_that_is_not_known_is_refused_before_the_first_step(tmp_path: Path) -> None:
    model = blocks(1)
    with pytest.raises(UsageError, match=r"KeepsMoments is not known.*register_optimizer\(KeepsMoments\)"):
        offload(model, KeepsMoments(model.parameters()), config_of("host", tmp_path, IN_BACKWARD))


def test_a_step_on_the_cpu_is_refused_where_backward_is_elsewhere(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    config = config_of("device", tmp_path, {**IN_BACKWARD, "optimizer_target": "cpu"})
    with pytest.raises(UsageError, match="optimizer_target is 'cpu'"):
        offload(model, list(optimizers), config)


def test_clipping_by_the_run_is_refused(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with (
        offload(model, list(optimizers), config_of("host", tmp_path, IN_BACKWARD)) as run,
        pytest.raises(UsageError, match="optimizer_in_backward has stepped"),
    ):
        run.clip_grad_norm_(1.0)


# ---------------------------------------------------------------------- what it writes


def bytes_written(
    path: Path, *, is_in_backward: bool, layers: int = 12, more: dict[str, object] | None = None
) -> tuple[int, int, int]:
    """Return the bytes to disk of one step, those of parameters and state, and the quota of host memory."""
    quota = 288 * 1024
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers)))
    optimizer = optim.Adam(model.parameters(), lr=1e-3)
    config = {
        "device": "cpu",
        "offload_cpu_size": quota,
        "offload_disk_size": "64MB",
        "offload_path": str(path / str(is_in_backward)),
        "optimizer_in_backward": is_in_backward,
        **(more or {}),
    }
    steps = 6
    with offload(model, optimizer, config) as run:

        def one() -> None:
            model(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            one()
        before = run.stats().traffic["host", "disk"].nbytes
        for _ in range(steps):
            one()
        written = (run.stats().traffic["host", "disk"].nbytes - before) // steps
    own = 3 * sum(parameter.nbytes for parameter in model.parameters())
    return written, own, quota


def test_only_what_does_not_fit_of_parameters_and_state_is_written(tmp_path: Path) -> None:
    kept, own, quota = bytes_written(tmp_path, is_in_backward=False)
    least, _, _ = bytes_written(tmp_path, is_in_backward=True)
    working = 3.5 * own / 12  # what comes and goes while a layer is trained
    assert own - quota <= least <= own - quota + working
    assert least < 0.8 * kept


def test_a_module_is_written_once_for_all_its_parameters(tmp_path: Path) -> None:
    """Also where nothing stays in host memory that is not in use."""
    more: dict[str, object] = {
        "auto_offload": False,
        "offload_param": "disk",
        "offload_optimizer": "disk",
    }
    written, own, _ = bytes_written(tmp_path, is_in_backward=True, more=more)
    assert 0.9 * own <= written <= 1.1 * own  # what is used again on its way down is not written


def test_no_gradient_comes_into_the_store(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, list(optimizers), config_of("disk", tmp_path, IN_BACKWARD)) as run:
        for _ in range(3):
            loss_of(model, *batch()).backward()
            assert not [key for key in run.store if key.startswith("grad/") or key.endswith("~next")]
            assert all(parameter.grad is None for parameter in model.parameters())


def test_a_checkpoint_may_be_made_after_a_pass(tmp_path: Path) -> None:
    """Every whole pass is a whole step, whether ``step`` is called or not."""
    model, optimizers = build_blocks()
    with offload(
        model, list(optimizers), config_of("disk", tmp_path, {**IN_BACKWARD, "durable": True})
    ) as run:
        loss_of(model, *batch()).backward()
        run.checkpoint()
        expected = [parameter.detach().clone() for parameter in model.parameters()]
    again, its_optimizers = build_blocks()
    config = config_of("disk", tmp_path, {**IN_BACKWARD, "durable": True})
    with offload(again, list(its_optimizers), config) as run:
        assert run.resumed is not None
        assert all(torch.equal(a, b) for a, b in zip(expected, again.parameters(), strict=True))
