"""Every per-parameter optimizer of ``torch.optim``, and ours: the same bits, stepped a bundle at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests import target
from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    is_on_accelerator,
    is_simulated,
    loss_of,
    step,
    steps,
    with_copies,
    with_device,
)
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.training import offload

optim = torch.optim
some_layouts = pytest.mark.parametrize("layout", ["host", "disk", "device"])

KINDS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "sgd": (optim.SGD, {"lr": 0.1}),
    "sgd-momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "sgd-nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd-foreach": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd-fused": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd-maximize": (optim.SGD, {"lr": 0.1, "maximize": True}),
    "adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.01}),
    "adam-amsgrad": (optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adam-foreach": (optim.Adam, {"lr": 1e-2, "foreach": True}),
    "adam-fused": (optim.Adam, {"lr": 1e-2, "fused": True}),
    "adamw": (optim.AdamW, {"lr": 1e-2}),
    "adamw-amsgrad-foreach": (optim.AdamW, {"lr": 1e-2, "amsgrad": True, "foreach": True}),
    "adamw-fused": (optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adamw-tensor-lr": (optim.AdamW, {"lr": torch.tensor(1e-2)}),
    "rmsprop": (optim.RMSprop, {"lr": 1e-2}),
    "rmsprop-centered": (optim.RMSprop, {"lr": 1e-2, "centered": True, "momentum": 0.5}),
    "adagrad": (optim.Adagrad, {"lr": 1e-2}),
    "adadelta": (optim.Adadelta, {"lr": 1.0}),
    "adamax": (optim.Adamax, {"lr": 1e-2}),
    "nadam": (optim.NAdam, {"lr": 1e-2}),
    "radam": (optim.RAdam, {"lr": 1e-2}),
    "asgd": (optim.ASGD, {"lr": 1e-2}),
    "rprop": (optim.Rprop, {"lr": 1e-2}),
    "adafactor": (optim.Adafactor, {"lr": 1e-2}),
    "adafactor-foreach": (optim.Adafactor, {"lr": 1e-2, "foreach": True}),
    "lazy-adam": (LazyAdam, {"lr": 1e-2}),
    "lazy-adam-nesterov-decay": (LazyAdam, {"lr": 1e-2, "nesterov": True, "weight_decay": 0.1}),
    "ftrl": (FTRL, {"lr": 0.1}),
    "our-sparse-adam": (SparseAdam, {"lr": 1e-2}),
    "our-adagrad": (Adagrad, {"lr": 1e-2, "weight_decay": 0.1}),
    "our-sgd": (SGD, {"lr": 0.1, "momentum": 0.9}),
    "ftrl-l1-l2": (FTRL, {"lr": 0.1, "l1": 1e-3, "l2": 1e-3, "weight_decay": 0.01}),
}
if target.accelerator != "cuda":  # where PyTorch has no such kernel
    KINDS["adagrad-fused"] = optim.Adagrad, {"lr": 1e-2, "fused": True}


@some_layouts
@pytest.mark.parametrize("kind", KINDS)
def test_optimizer(layout: str, tmp_path: Path, kind: str) -> None:
    make, options = KINDS[kind]

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [make(model.parameters(), **options)]

    assert_same(build, steps(4), layout, tmp_path)


@some_layouts
def test_the_optimizer_s_state_from_before_is_taken_over(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model, optimizers = build_blocks()
        trial = Trial(model, optimizers)
        torch.manual_seed(5)
        step(trial)
        loss_of(model, *batch()).backward()
        return model, optimizers

    assert_same(build, steps(3), layout, tmp_path)


@some_layouts
def test_parameter_groups_with_different_options(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        matrices = [p for p in model.parameters() if p.dim() > 1]
        vectors = [p for p in model.parameters() if p.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": vectors, "weight_decay": 0.0, "lr": 3e-3},
            {"params": matrices},
        ]
        return model, [torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1)]

    assert_same(build, steps(), layout, tmp_path)


@some_layouts
@pytest.mark.parametrize(
    "schedule",
    [
        lambda optimizer: optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        lambda optimizer: optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10),
        lambda optimizer: optim.lr_scheduler.CosineAnnealingLR(optimizer, 5),
    ],
    ids=["step", "one-cycle", "cosine"],
)
def test_learning_rate_schedules(layout: str, tmp_path: Path, schedule: Callable[[Optimizer], Any]) -> None:
    def loop(trial: Trial) -> None:
        scheduler = schedule(trial.optimizer)
        for _ in range(4):
            step(trial)
            scheduler.step()

    assert_same(build_blocks, loop, layout, tmp_path)


@some_layouts
def test_a_group_added_in_the_middle(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [torch.optim.AdamW(model[:2].parameters(), lr=1e-2)]

    def loop(trial: Trial) -> None:
        step(trial)
        trial.model.zero_grad()
        trial.optimizer.add_param_group({"params": list(trial.model[2:].parameters()), "lr": 1e-3})  # type: ignore[index]
        step(trial)
        step(trial)

    assert_same(build, loop, layout, tmp_path)


@some_layouts
def test_a_closure(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for turn in range(4):
            inputs, classes = batch()

            def closure(inputs: Tensor = inputs, classes: Tensor = classes) -> float:
                trial.optimizer.zero_grad()
                loss = loss_of(trial.model, inputs, classes)
                loss.backward()
                trial.log_gradients()
                return loss.item()

            loss = trial.optimizer.step(closure) if turn % 2 else trial.optimizer.step(closure=closure)
            trial.log(torch.tensor(loss))

    assert_same(build_blocks, loop, layout, tmp_path)


@some_layouts
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clipping_the_norm_of_gradients(layout: str, tmp_path: Path, norm_type: float) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            trial.log(nn.utils.clip_grad_norm_(trial.model.parameters(), 0.1, norm_type))
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


def test_norms_of_stashed_gradients_are_taken_the_way_pytorch_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (optimizer,) = build_blocks()
    taken: list[int] = []
    foreach_norm = torch._foreach_norm

    def count(tensors: list[Tensor], norm_type: float) -> Sequence[Tensor]:
        taken.append(len(tensors))
        return foreach_norm(tensors, norm_type)

    monkeypatch.setattr(torch, "_foreach_norm", count)
    with offload(model, optimizer, config_of("device", tmp_path)):
        loss_of(model, *batch()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert taken == [len(list(model.parameters()))]


@some_layouts
def test_clipping_by_the_run_itself(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            norm = (
                trial.run.clip_grad_norm_(0.1)
                if trial.run is not None
                else nn.utils.clip_grad_norm_(trial.model.parameters(), 0.1)
            )
            trial.log(norm)
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


@some_layouts
def test_clipping_gradients_by_value(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            nn.utils.clip_grad_value_(trial.model.parameters(), 0.01)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path)


@some_layouts
def test_gradients_changed_and_assigned_by_hand(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            for number, parameter in enumerate(trial.model.parameters()):
                assert parameter.grad is not None
                if number % 3 == 0:
                    parameter.grad.mul_(0.5)
                elif number % 3 == 1:
                    parameter.grad = parameter.grad * 2
                else:
                    parameter.grad.data.clamp_(-0.01, 0.01)
            trial.log_gradients()
            (loss_of(trial.model, *batch()) * 2).backward()
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    # What is assigned stays on the device.
    assert_same(build_blocks, loop, layout, tmp_path, with_device(layout, "192KB"))


@some_layouts
def test_lists_of_tensors_changed_in_place(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            parameters: list[Tensor] = list(trial.model.parameters())
            gradients = [p.grad for p in parameters if p.grad is not None]
            torch._foreach_mul_(gradients, torch.tensor(0.5))
            with torch.no_grad():
                torch._foreach_lerp_(parameters, gradients, 0.1)
            for norm in torch._foreach_norm(parameters):
                trial.log(norm)
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()

    assert_same(build_blocks, loop, layout, tmp_path, with_copies(layout))


@some_layouts
def test_an_optimizer_that_calls_its_base_class(layout: str, tmp_path: Path) -> None:
    class Shrinking(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - torch's own signature
            loss = super().step(closure)
            with torch.no_grad():
                for group in self.param_groups:
                    for parameter in group["params"]:
                        parameter.mul_(0.999)
            return loss

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        return model, [Shrinking(model.parameters(), lr=1e-2)]

    assert_same(build, steps(3), layout, tmp_path, with_copies(layout))


def test_a_gradient_that_somebody_kept_outlives_zero_grad(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path, with_device("device", "384KB"))):
        loss_of(model, *batch()).backward()
        kept = [parameter.grad for parameter in model.parameters()]
        values = [gradient.clone() for gradient in kept if gradient is not None]
        optimizer.zero_grad()
        loss_of(model, *batch()).backward()
        assert all(type(gradient) is Tensor for gradient in kept)
        assert all(torch.equal(a, b) for a, b in zip(kept, values, strict=True) if a is not None)


def test_the_gradient_is_the_same_object_until_it_is_zeroed(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path)):
        loss_of(model, *batch()).backward()
        weight = model[0].up.weight  # type: ignore[index]
        first = weight.grad
        assert first is not None
        assert weight.grad is first
        before = first.clone()
        loss_of(model, *batch()).backward()
        assert weight.grad is first
        assert not torch.equal(before, first)


@pytest.mark.skipif(is_on_accelerator and not is_simulated, reason="a GPU rounds otherwise than the CPU")
@every_layout
def test_an_optimizer_that_computes_on_the_cpu(layout: str, tmp_path: Path) -> None:
    assert_same(build_blocks, steps(3), layout, tmp_path, {"optimizer_target": "cpu"})


@every_layout
def test_parameters_that_share_memory_and_belong_to_two_optimizers(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        one, other = model.get_parameter("0.up.weight"), model.get_parameter("1.up.weight")
        other.data = one.data
        rest = [p for p in model.parameters() if p is not one]
        return model, [torch.optim.Adam([one], lr=1e-2), torch.optim.SGD(rest, lr=0.1, momentum=0.9)]

    assert_same(build, steps(), layout, tmp_path)


def test_a_parameter_that_shares_memory_and_belongs_to_no_optimizer(tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks()
        one, other = model.get_parameter("0.up.weight"), model.get_parameter("1.up.weight")
        other.data = one.data
        return model, [torch.optim.Adam([p for p in model.parameters() if p is not other], lr=1e-2)]

    assert_same(build, steps(), "disk", tmp_path)


@every_layout
@pytest.mark.parametrize("is_of_all", [False, True])
def test_hooks_before_a_step_that_are_registered_in_the_run(
    is_of_all: bool, layout: str, tmp_path: Path
) -> None:
    def loop(trial: Trial) -> None:
        def hook(optimizer: Optimizer, *_: object) -> None:
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            trial.log(torch.tensor(len(parameters)))
            for parameter in parameters:
                trial.log(parameter.detach().clone())

        register = register_optimizer_step_pre_hook if is_of_all else trial.optimizer.register_step_pre_hook
        handle = register(hook)
        try:
            trial.optimizer.step()
            loss_of(trial.model, *batch()).backward()
            handle.remove()
            handle = register(hook)
            trial.optimizer.step()
        finally:
            handle.remove()

    assert_same(build_blocks, loop, layout, tmp_path)


@every_layout
def test_a_hook_before_a_step_that_refuses_it(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        def refuse(*_: object) -> None:
            raise ValueError("not now")

        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            handle = trial.optimizer.register_step_pre_hook(refuse)
            with pytest.raises(ValueError, match="not now"):
                trial.optimizer.step()
            trial.log_gradients()
            handle.remove()
            step(trial)

    assert_same(build_blocks, loop, layout, tmp_path)


# ---------------------------------------------------------------------- parameters of several types


class Narrow(nn.Module):
    """A layer that computes in a narrower type than those around it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs.to(torch.bfloat16))
        return outputs.float()


# PyTorch's fused SGD leaves bfloat16 moments as their memory was: two plain runs differ.
@some_layouts
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sgd-fused"])
@pytest.mark.parametrize("is_first", [True, False])
def test_parameters_of_several_types_in_one_group(
    is_first: bool, layout: str, tmp_path: Path, kind: str
) -> None:
    make, options = KINDS[kind]

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), Narrow()]
        model = nn.Sequential(*(layers if is_first else layers[::-1]), nn.Linear(WIDTH, 5))
        return model, [make(model.parameters(), **options)]

    assert_same(build, steps(4), layout, tmp_path)


# ---------------------------------------------------------------------- state that somebody else has


class Outer(Optimizer):
    """Has groups and state in common with the optimizer that it wraps, as wrappers in torch's manner do."""

    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups
        self.state = inner.state

    def step(self, closure: Any = None) -> Any:  # noqa: ANN401 - as torch's own
        return self.inner.step(closure)


@some_layouts
def test_state_that_another_optimizer_has_outlives_loading(layout: str, tmp_path: Path) -> None:
    """A wrapper that has loaded a state dict has state of its own; the inner one steps with the former."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [Outer(optim.SGD(model.parameters(), lr=0.1, momentum=0.9))]

    def loop(trial: Trial) -> None:
        steps(2)(trial)
        trial.optimizer.load_state_dict(copy.deepcopy(trial.optimizer.state_dict()))
        steps(2)(trial)

    assert_same(build, loop, layout, tmp_path, with_copies(layout))


@some_layouts
def test_an_alias_of_state_outlives_what_is_loaded_in_its_place(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        steps(2)(trial)
        aliases = [
            trial.optimizer.state[p]["momentum_buffer"].detach() for p in [*trial.model.parameters()][:2]
        ]
        trial.optimizer.load_state_dict(copy.deepcopy(trial.optimizer.state_dict()))
        steps(2)(trial)
        for alias in aliases:
            trial.log(alias)

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]

    assert_same(build, loop, layout, tmp_path)
