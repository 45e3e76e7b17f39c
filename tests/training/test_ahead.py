"""Steps that the optimizer makes during backward: nobody can tell, whatever comes between backward and step.

None of these loops looks at gradients in its first steps: so that steps are made ahead at all.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.ahead_loops import Taken, count_taken, quiet_step
from tests.training.twins import (
    WIDTH,
    Log,
    Optimizer,
    Trial,
    adam,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    loss_of,
)
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training import offload

ROOMY = {"max_device_memory": "192KB"}
"""A device that holds a working set beside activations and the optimizer's workspace."""

__all__ = ["count_taken"]  # a fixture
some_layouts = pytest.mark.parametrize("layout", ["disk", "device", "three"])
Between = Callable[[Trial, int], None]


def assert_same_with(
    between: Between,
    layout: str,
    path: Path,
    build: Callable[[], tuple[nn.Module, Sequence[Optimizer]]] = build_blocks,
) -> None:
    """Compare loops with something between backward and step, in every other step from the fourth on."""

    def loop(trial: Trial) -> None:
        for turn in range(8):
            acts = turn >= 3 and turn % 2 == 1
            quiet_step(trial, functools.partial(between, trial, turn) if acts else None)

    assert_same(build, loop, layout, path, ROOMY if layout != "disk" else None)


# ---------------------------------------------------------------------- where it happens


@some_layouts
def test_steps_are_made_ahead_where_nothing_forbids_it(layout: str, tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(8):
            quiet_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, ROOMY if layout != "disk" else None)
    assert taken.keys > 8, "parameters and state of several bundles"


@some_layouts
def test_the_last_of_several_backward_passes_steps(layout: str, tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(6):
            for _ in range(2):
                (loss_of(trial.model, *batch()) / 3).backward()
            quiet_step(trial)

    assert_same(build_blocks, loop, layout, tmp_path, ROOMY if layout != "disk" else None)
    assert taken.keys > 8


@some_layouts
def test_gradients_that_are_kept_go_on_being_added_to(layout: str, tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(5):
            loss_of(trial.model, *batch()).backward()
            trial.optimizer.step()
        trial.log_gradients()

    assert_same(build_blocks, loop, layout, tmp_path, ROOMY if layout != "disk" else None)
    assert taken.keys > 8


_CLASSES: list[type[Optimizer]] = [
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.ASGD, torch.optim.Rprop, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.Adamax, torch.optim.Adafactor),
]

KINDS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd-momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "adam-foreach": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True),
    "adam-amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2, amsgrad=True),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=1e-2),
    "radam": lambda model: torch.optim.RAdam(model.parameters(), lr=1e-2),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=1e-2),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
    "adadelta": lambda model: torch.optim.Adadelta(model.parameters()),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, centered=True, momentum=0.5),
    "adafactor": lambda model: torch.optim.Adafactor(model.parameters(), lr=1e-2),
    "lazy-adam": lambda model: LazyAdam(model.parameters(), lr=1e-2, nesterov=True),
    "our-sparse-adam": lambda model: SparseAdam(model.parameters(), lr=1e-2),
    "our-adagrad": lambda model: Adagrad(model.parameters(), lr=1e-2),
    "our-sgd": lambda model: SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "ftrl": lambda model: FTRL(model.parameters(), lr=0.1, l1=1e-4),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_known_optimizer_can_step_ahead(kind: str, tmp_path: Path, taken: Taken) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [KINDS[kind](model)]

    def loop(trial: Trial) -> None:
        for _ in range(6):
            quiet_step(trial)

    assert_same(build, loop, "disk", tmp_path)
    assert taken.keys


def _ways(kind: type[Optimizer]) -> list[dict[str, Any]]:
    """Return ways of stepping of one class, each option that changes them by itself."""
    known = inspect.signature(kind).parameters
    options: list[dict[str, Any]] = [{}, {"maximize": True}, {"weight_decay": 0.1}, {"amsgrad": True}]
    options += [{"momentum": 0.9}, {"momentum": 0.9, "nesterov": True}, {"centered": True}]
    options += [
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": 0.1, "maximize": True},
    ]
    many: dict[str, Any] = {"foreach": True} if "foreach" in known else {}
    return [{**each, **many} for each in options if known.keys() >= each.keys()]


@pytest.mark.parametrize("kind", _CLASSES, ids=lambda kind: kind.__name__)
def test_a_step_that_comes_to_nothing_has_written_to_no_gradient(
    kind: type[Optimizer], tmp_path: Path
) -> None:
    """Some steps write to gradients: those belong to the step itself, as who reads them afterwards sees.

    Each way of stepping has a block of its own, which is a group of parameters.
    """

    def loop(trial: Trial) -> None:
        for _ in range(2):
            quiet_step(trial)
        loss_of(trial.model, *batch()).backward()
        trial.optimizer.param_groups[0]["lr"] *= 0.5
        trial.optimizer.step()
        trial.log_gradients()
        quiet_step(trial)

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        ways = _ways(kind)
        model = blocks(len(ways))
        groups = [{"params": [*block.parameters()], **way} for block, way in zip(model, ways, strict=False)]
        groups[0]["params"] += model[-1].parameters()
        return model, [kind(groups, lr=1e-2)]  # type: ignore[call-arg]

    assert_same(build, loop, "disk", tmp_path)


def test_an_optimizer_that_is_not_torchs_own_is_never_run_ahead(tmp_path: Path, taken: Taken) -> None:
    class Noisy(torch.optim.SGD):
        """Consumes random numbers, whose order is part of the result."""

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            super().step(closure)
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.data.add_(torch.randn_like(parameter), alpha=1e-3)

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [Noisy(model.parameters(), lr=0.1)]

    torch.manual_seed(0)
    model, optimizers = build()
    with offload(model, optimizers, config_of("disk", tmp_path)):
        for _ in range(4):
            quiet_step(Trial(model, optimizers))
    assert taken.keys == 0


def test_options_that_are_tensors_keep_steps_in_their_place(tmp_path: Path, taken: Taken) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))]

    def loop(trial: Trial) -> None:
        for turn in range(6):
            rate = trial.optimizer.param_groups[0]["lr"]
            quiet_step(trial, functools.partial(rate.fill_, 1e-2 / (turn + 1)))

    assert_same(build, loop, "disk", tmp_path)
    assert taken.keys == 0


@pytest.mark.parametrize("disk", ["560KB", "640KB", "800KB", "1200KB"])
def test_new_values_beside_old_ones_never_crowd_anything_out(disk: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(6):
            quiet_step(trial)

    assert_same(build_blocks, loop, "disk", tmp_path, {"offload_disk_size": disk})


# ---------------------------------------------------------------------- what comes between


def log_gradients(trial: Trial, turn: int) -> None:
    trial.log_gradients()


def clip(trial: Trial, turn: int) -> None:
    trial.log(torch.nn.utils.clip_grad_norm_(trial.model.parameters(), 0.01))


def scale_one_gradient(trial: Trial, turn: int) -> None:
    gradient = next(iter(trial.model.parameters())).grad
    assert gradient is not None
    gradient.mul_(0.5)


def assign_one_gradient(trial: Trial, turn: int) -> None:
    parameter = next(iter(trial.model.parameters()))
    parameter.grad = torch.full_like(parameter, 0.25)


def remove_one_gradient(trial: Trial, turn: int) -> None:
    next(iter(trial.model.parameters())).grad = None


def change_the_rate(trial: Trial, turn: int) -> None:
    trial.optimizer.param_groups[0]["lr"] = 1e-2 / turn


def change_parameters(trial: Trial, turn: int) -> None:
    with torch.no_grad():
        for parameter in trial.model.parameters():
            parameter.mul_(0.99)


def change_one_through_data(trial: Trial, turn: int) -> None:
    list(trial.model.parameters())[-1].data.mul_(0.5)


def change_state(trial: Trial, turn: int) -> None:
    for parameter in trial.model.parameters():
        trial.optimizer.state[parameter]["exp_avg"].mul_(0.5)


def change_small_state(trial: Trial, turn: int) -> None:
    for parameter in trial.model.parameters():
        trial.optimizer.state[parameter]["step"].add_(3)


def replace_state(trial: Trial, turn: int) -> None:
    parameter = list(trial.model.parameters())[-1]
    trial.optimizer.state[parameter]["exp_avg"] = torch.ones_like(parameter)


def forget_state(trial: Trial, turn: int) -> None:
    trial.optimizer.state.clear()


def reload_state(trial: Trial, turn: int) -> None:
    trial.optimizer.load_state_dict(trial.optimizer.state_dict())


def load_a_changed_model(trial: Trial, turn: int) -> None:
    trial.model.load_state_dict({k: v * 0.5 for k, v in trial.model.state_dict().items()})


def look_at_state_dicts(trial: Trial, turn: int) -> None:
    for tensor in trial.model.state_dict().values():
        trial.log(tensor)
    for entries in trial.optimizer.state_dict()["state"].values():
        for name in entries:
            trial.log(entries[name])


def look_at_parameters(trial: Trial, turn: int) -> None:
    for parameter in trial.model.parameters():
        trial.log(parameter)
        for name in ("step", "exp_avg"):
            trial.log(trial.optimizer.state[parameter][name])


def evaluate(trial: Trial, turn: int) -> None:
    with torch.no_grad():
        trial.log(trial.model(torch.ones(2, WIDTH)))


def add_another_backward(trial: Trial, turn: int) -> None:
    loss_of(trial.model, *batch()).backward()


def begin_anew(trial: Trial, turn: int) -> None:
    trial.optimizer.zero_grad()
    loss_of(trial.model, *batch()).backward()


def throw_the_gradients_away(trial: Trial, turn: int) -> None:
    trial.optimizer.zero_grad()


def step_twice(trial: Trial, turn: int) -> None:
    trial.optimizer.step()


def step_with_a_closure(trial: Trial, turn: int) -> None:
    def closure() -> Tensor:
        trial.optimizer.zero_grad()
        loss = loss_of(trial.model, *batch())
        loss.backward()
        return loss

    trial.optimizer.step(closure)  # type: ignore[arg-type]


def freeze_one(trial: Trial, turn: int) -> None:
    list(trial.model.parameters())[turn].requires_grad_(False)  # noqa: FBT003 - torch's own signature


def move_one_to_another_group(trial: Trial, turn: int) -> None:
    group = trial.optimizer.param_groups[0]
    trial.optimizer.add_param_group({"params": [group["params"].pop()], "lr": 1e-3})


def take_one_out(trial: Trial, turn: int) -> None:
    trial.optimizer.param_groups[0]["params"].pop(turn)


def keep_an_alias(trial: Trial, turn: int) -> None:
    aliases.append(list(trial.model.parameters())[-1].detach())


aliases: list[Tensor] = []

BETWEEN: list[Between] = [
    log_gradients,
    clip,
    scale_one_gradient,
    assign_one_gradient,
    remove_one_gradient,
    change_the_rate,
    change_parameters,
    change_one_through_data,
    change_state,
    change_small_state,
    replace_state,
    forget_state,
    reload_state,
    load_a_changed_model,
    look_at_state_dicts,
    look_at_parameters,
    evaluate,
    add_another_backward,
    begin_anew,
    throw_the_gradients_away,
    step_twice,
    step_with_a_closure,
    freeze_one,
    move_one_to_another_group,
    take_one_out,
    keep_an_alias,
]


@some_layouts
@pytest.mark.parametrize("between", BETWEEN, ids=lambda between: between.__name__)
def test_whatever_comes_between(between: Between, layout: str, tmp_path: Path, taken: Taken) -> None:
    assert_same_with(between, layout, tmp_path)
    aliases.clear()
    assert taken.keys, "no step was made ahead: the test shows nothing"


def test_a_step_that_had_to_be_made_again_makes_the_next_ones_wait(tmp_path: Path, taken: Taken) -> None:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    counts = []
    with offload(model, optimizers, config_of("disk", tmp_path)):
        for turn in range(8):
            quiet_step(trial, functools.partial(change_the_rate, trial, 3) if turn == 3 else None)
            counts.append(taken.since())
    assert counts[0] == 0, "nothing is known yet"
    assert counts[2] > 0
    assert counts[3] == 0, "the rate changed"
    assert counts[4] == 0, "it waits"
    assert counts[5] > 0


def test_two_optimizers_each_step_ahead(tmp_path: Path, taken: Taken) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [
            torch.optim.Adam(model[:2].parameters(), lr=1e-2),
            torch.optim.SGD(model[2:].parameters(), lr=1e-2, momentum=0.9),
        ]

    def loop(trial: Trial) -> None:
        for turn in range(6):
            quiet_step(trial, trial.optimizers[0].step if turn == 4 else None)

    assert_same(build, loop, "disk", tmp_path)
    assert taken.keys > 8


def test_a_graph_that_is_kept_sees_the_step_as_a_change_in_place(tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            quiet_step(trial)
        loss = loss_of(trial.model, *batch())
        loss.backward(retain_graph=True)
        trial.optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        trial.optimizer.zero_grad()
        quiet_step(trial)

    assert_same(build_blocks, loop, "disk", tmp_path)
    assert taken.keys


def test_a_graph_that_is_kept_can_be_run_again_before_the_step(tmp_path: Path, taken: Taken) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(6):
            loss = loss_of(trial.model, *batch())
            loss.backward(retain_graph=True)
            if turn == 4:
                loss.backward()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "disk", tmp_path)
    assert taken.keys


class Breakable(nn.Sequential):
    """Blocks whose backward raises in their midst when it is told to."""

    is_broken = False

    @contextlib.contextmanager
    def broken(self) -> Iterator[None]:
        """Let it raise inside the context."""
        self.is_broken = True
        yield
        self.is_broken = False

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        x = self[1](self[0](x))
        if self.is_broken and x.requires_grad:
            x.register_hook(self._break)
        return self[3](self[2](x))  # type: ignore[no-any-return]

    def _break(self, gradient: Tensor) -> None:
        raise RuntimeError("interrupted")


@some_layouts
def test_an_exception_in_the_midst_of_backward(layout: str, tmp_path: Path, taken: Taken) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = Breakable(*blocks())
        return model, adam(model)

    def loop(trial: Trial) -> None:
        for turn in range(8):
            if turn == 4:
                with trial.model.broken(), pytest.raises(RuntimeError, match="interrupted"):  # type: ignore[operator]
                    loss_of(trial.model, *batch()).backward()
                trial.optimizer.zero_grad()
            else:
                quiet_step(trial)

    assert_same(build, loop, layout, tmp_path, ROOMY if layout != "disk" else None)
    assert taken.keys


def test_a_scaler_that_skips_a_step(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        for turn in range(6):
            loss = loss_of(trial.model, *batch()) * (float("inf") if turn == 3 else 1.0)
            scaler.scale(loss).backward()
            scaler.step(trial.optimizer)
            scaler.update()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, "disk", tmp_path)


def test_a_checkpoint_between_backward_and_step_is_of_the_old_values(tmp_path: Path, taken: Taken) -> None:
    torch.manual_seed(0)
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    with offload(model, optimizers, config_of("disk", tmp_path)) as run:
        for _ in range(3):
            quiet_step(trial)
        before = copy.deepcopy(model.state_dict())
        quiet_step(trial, lambda: run.save(tmp_path / "checkpoint"))
        run.load(tmp_path / "checkpoint")
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), name


def test_closing_between_backward_and_step_leaves_the_old_values_and_the_gradients(tmp_path: Path) -> None:
    def build_and_train(log: Log, path: Path | None) -> None:
        torch.manual_seed(0)
        model, optimizers = build_blocks()
        trial = Trial(model, optimizers)
        run = None if path is None else offload(model, optimizers, config_of("disk", path))
        for _ in range(3):
            quiet_step(trial)
        loss_of(model, *batch()).backward()
        if run is not None:
            run.close()
        for parameter in model.parameters():
            log(parameter)
            log(parameter.grad)
        optimizers[0].step()
        for parameter in model.parameters():
            log(parameter)

    plain, ours = Trial(nn.Linear(1, 1), []), Trial(nn.Linear(1, 1), [])
    build_and_train(plain.log, None)
    build_and_train(ours.log, tmp_path)
    for number, (a, b) in enumerate(zip(plain.logged, ours.logged, strict=True)):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b), number
