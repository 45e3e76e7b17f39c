"""``optimizer_in_backward``: what is stepped is stepped when hooks would do it in plain PyTorch."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.test_optimizer_in_backward import (
    IN_BACKWARD,
    Fails,
    assert_same_as_hooks,
    passes,
    step_each_alone,
)
from tests.training.twins import (
    Block,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    with_device,
)
from tierstore.errors import UsageError
from tierstore.training import offload

optim = torch.optim
StateDicts = tuple[dict[str, Any], dict[str, Any]]
Undo = Callable[[], object]


class Way(NamedTuple):
    """How a pass is ended in its midst.

    Attributes:
        begin: lets the next pass be ended; returns what undoes that.
        error: that ends it.
    """

    begin: Callable[[nn.Sequential], Undo]
    error: type[Exception]


def _raise(*_: object) -> None:
    raise ZeroDivisionError


def _second(model: nn.Sequential) -> Block:
    return cast("Block", model[1])


def _by_the_gradients_hook(model: nn.Sequential) -> Undo:
    return cast("Undo", _second(model).down.weight.register_hook(_raise).remove)


def _by_a_hook_after_accumulation(model: nn.Sequential) -> Undo:
    return cast("Undo", _second(model).up.bias.register_post_accumulate_grad_hook(_raise).remove)


def _by_the_step(model: nn.Sequential) -> Undo:
    """Make a gradient sparse, which Adam refuses."""
    return cast("Undo", _second(model).up.bias.register_hook(lambda gradient: gradient.to_sparse()).remove)


def _fail(module: nn.Module, args: object, output: Tensor) -> Tensor:
    del module, args
    return cast("Tensor", Fails.apply(output))  # type: ignore[no-untyped-call]


def _by_a_function(model: nn.Sequential) -> Undo:
    Fails.is_on = True
    handle = _second(model).norm.register_forward_hook(_fail)

    def undo() -> None:
        Fails.is_on = False
        handle.remove()

    return undo


WAYS = {
    "gradient hook": Way(_by_the_gradients_hook, ZeroDivisionError),
    "hook after accumulation": Way(_by_a_hook_after_accumulation, ZeroDivisionError),
    "step": Way(_by_the_step, RuntimeError),
    "function": Way(_by_a_function, ValueError),
}


def _change_the_rate(trial: Trial, good: StateDicts) -> None:
    del good
    for group in trial.optimizer.param_groups:
        group["lr"] = 0.0


def _roll_back(trial: Trial, good: StateDicts) -> None:
    trial.optimizer.load_state_dict(good[1])
    trial.model.load_state_dict(good[0])


def _save(trial: Trial, good: StateDicts) -> None:
    del good
    file = io.BytesIO()
    torch.save((trial.model.state_dict(), trial.optimizer.state_dict()), file)
    file.seek(0)
    model, optimizer = torch.load(file)
    for each in (*model.values(), *(v for e in optimizer["state"].values() for v in e.values())):
        trial.log(each)


def _clear(trial: Trial, good: StateDicts) -> None:
    del good
    trial.optimizer.zero_grad()


def _step(trial: Trial, good: StateDicts) -> None:
    del good
    for parameter in trial.model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = None
    trial.optimizer.step()


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("then", [_change_the_rate, _roll_back, _save, _clear, _step])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_pass_that_raised_had_reached_is_stepped_at_once(
    way: str, then: Callable[[Trial, StateDicts], None], layout: str, tmp_path: Path
) -> None:
    begin, error = WAYS[way]

    def loop(trial: Trial) -> None:
        assert isinstance(trial.model, nn.Sequential)
        passes(2)(trial)
        good = copy.deepcopy((trial.model.state_dict(), trial.optimizer.state_dict()))
        undo = begin(trial.model)
        with pytest.raises(error):
            passes(1)(trial)
        undo()
        then(trial, good)
        for parameter in trial.model.parameters():
            trial.log(parameter)
            trial.log(parameter.grad)
            parameter.grad = None
        passes(2)(trial)

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(3)
        return model, [optim.Adam(model.parameters(), lr=1e-2)]

    assert_same_as_hooks(build, loop, layout, tmp_path)


def _replace_all(optimizer: Optimizer, model: nn.Sequential) -> None:
    """Train as many others."""
    optimizer.param_groups[0]["params"] = list(model[1].parameters())


def _replace_one(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.param_groups[0]["params"][0] = _second(model).norm.weight


def _exchange(optimizer: Optimizer, model: nn.Sequential) -> None:
    del model
    one, other = optimizer.param_groups
    one["params"], other["params"] = other["params"], one["params"]


def _freeze(optimizer: Optimizer, model: nn.Sequential) -> None:
    del optimizer
    model[0].requires_grad_(requires_grad=False)
    model[1].requires_grad_(requires_grad=True)


def _add(optimizer: Optimizer, model: nn.Sequential) -> None:
    optimizer.add_param_group({"params": list(model[1].parameters()), "lr": 0.5})


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("ignored", [(), ("1.*",), ("0.norm.*", "2.*")])
@pytest.mark.parametrize("change", [_replace_all, _replace_one, _exchange, _freeze, _add])
def test_what_is_stepped_is_what_the_groups_name(
    change: Callable[[Optimizer, nn.Sequential], None], ignored: Sequence[str], layout: str, tmp_path: Path
) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        model[1].requires_grad_(requires_grad=change is not _freeze)
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.1},
            {"params": list(model[2].parameters()), "lr": 0.01},
        ]
        if change is _exchange:
            groups[0]["params"] = list(model[0].parameters())[:2]
        return model, [optim.SGD(groups, momentum=0.9)]

    def loop(trial: Trial) -> None:
        assert isinstance(trial.model, nn.Sequential)
        passes(2)(trial)
        change(trial.optimizer, trial.model)
        trial.model.zero_grad()
        passes(1)(trial)
        trial.log_gradients()
        trial.optimizer.step()
        passes(2)(trial)
        trial.log_gradients()

    assert_same_as_hooks(
        build, loop, layout, tmp_path, {"ignored": list(ignored), **with_device(layout, "512KB")}
    )


@pytest.mark.parametrize("layout", ["host", "disk"])
def test_a_fused_optimizer_that_a_parameter_joins_later(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = nn.Sequential(*(nn.Linear(48, 48) for _ in range(2)))
        return model, [optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)]

    def loop(trial: Trial) -> None:
        assert isinstance(trial.model, nn.Sequential)
        trial.model[0](batch()[0]).sum().backward()
        for _ in range(2):
            trial.model(batch()[0]).sum().backward()

    assert_same_as_hooks(build, loop, layout, tmp_path)


@pytest.mark.parametrize("layout", ["host", "disk", "device"])
def test_hooks_in_backward_see_what_was_stepped_before(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        assert isinstance(trial.model, nn.Sequential)
        head = cast("nn.Linear", trial.model[-1])
        for parameter in trial.model.parameters():
            parameter.register_hook(lambda gradient: trial.log(head.bias.data))
            parameter.register_post_accumulate_grad_hook(lambda each: trial.log(each.grad))
        if trial.run is None:  # last, as ours is
            step_each_alone(trial)
        passes(3)(trial)

    assert_same(build_blocks, loop, layout, tmp_path, IN_BACKWARD)


def _work(model: nn.ModuleList, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    for _ in range(8):
        model[number](torch.randn(4, 48, generator=generator)).square().mean().backward()


def _two_stacks() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Sequential(*(nn.Linear(48, 48) for _ in range(4))) for _ in range(2))


def test_threads_that_train_a_part_each_with_one_optimizer(tmp_path: Path) -> None:
    plain, ours = _two_stacks(), _two_stacks()
    optimizer = optim.Adam(plain.parameters(), lr=1e-2)
    step_each_alone(Trial(plain, [optimizer]))
    for number in range(2):
        _work(plain, number)
    config = config_of("host", tmp_path, IN_BACKWARD)
    with (
        offload(ours, optim.Adam(ours.parameters(), lr=1e-2), config),
        ThreadPoolExecutor(2) as pool,
    ):
        for done in [pool.submit(_work, ours, number) for number in range(2)]:
            done.result()
    assert_equal_lists(list(plain.parameters()), list(ours.parameters()))


class Failing(nn.Module):
    """Three parts, two of them under checkpoints that run backward inside backward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Sequential(nn.Linear(4, 4)) for _ in range(3))
        self.is_bad = False

    def fail(self, x: Tensor) -> Tensor:
        """Raise when it is computed again."""
        if self.is_bad and torch.is_grad_enabled():
            raise ValueError
        return self.a(x)  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, 4)``."""
        x = checkpoint(self.fail, x, use_reentrant=True)
        return self.c(checkpoint(self.b, x, use_reentrant=True))  # type: ignore[no-any-return]


@pytest.mark.parametrize("has_head", [True, False])
def test_no_checkpoint_is_made_of_half_a_pass(tmp_path: Path, has_head: bool) -> None:
    model = Failing()
    if not has_head:
        model.c = nn.Sequential()
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with offload(model, optimizer, config_of("disk", tmp_path, {**IN_BACKWARD, "durable": True})) as run:

        def one() -> None:
            model(torch.ones(2, 4, requires_grad=True)).sum().backward()

        one()
        run.checkpoint()
        model.is_bad = True
        with pytest.raises(ValueError, match=r"^$"):
            one()
        with pytest.raises(UsageError, match="failed in its midst"):
            run.checkpoint()
        model.is_bad = False
        one()
        run.checkpoint()
