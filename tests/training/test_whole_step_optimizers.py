"""Optimizers that are not known to treat each parameter by itself: their own step, once, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import (
    Optimizer,
    Trial,
    assert_same,
    batch,
    blocks,
    config_of,
    every_layout,
    loss_of,
    with_device,
)
from tests.training.whole_step_kinds import KINDS, SAM, CountsInItself, KeepsMoments, Kind
from tierstore.errors import CapacityError, UsageError
from tierstore.training import offload, register_optimizer
from tierstore.training.faults import guard
from tierstore.training.pytorch.own_work import ordinary_mode


def built_with(make: Callable[[Any], Optimizer]) -> Callable[[], tuple[nn.Module, Sequence[Optimizer]]]:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [make(model.parameters())]

    return build


def log_result(trial: Trial, result: object) -> None:
    trial.log(torch.as_tensor(float("nan") if result is None else result))


def log_state(trial: Trial) -> None:
    """Log options, attributes and all state of the first optimizer."""
    for group in trial.optimizer.param_groups:
        trial.log(torch.tensor(group.get("t", 0)))
    for name in ("t", "calls"):
        trial.log(torch.tensor(getattr(trial.optimizer, name, -1)))
    for entries in trial.optimizer.state.values():
        values = entries.values() if isinstance(entries, dict) else [entries]
        for value in values:
            trial.log(value if isinstance(value, Tensor) else None)


def plain_loop(trial: Trial) -> None:
    for _ in range(3):
        loss_of(trial.model, *batch()).backward()
        log_result(trial, trial.optimizer.step())
        trial.log_gradients()
        log_state(trial)
        trial.optimizer.zero_grad()


def closure_loop(trial: Trial) -> None:
    for turn in range(3):
        inputs, classes = batch()

        def closure(inputs: Tensor = inputs, classes: Tensor = classes) -> Tensor:
            trial.optimizer.zero_grad()
            loss = loss_of(trial.model, inputs, classes)
            loss.backward()
            return loss.detach()

        optimizer: Any = trial.optimizer
        result = optimizer.step(closure) if turn % 2 else optimizer.step(closure=closure)
        log_result(trial, result)
        trial.log_gradients()
        log_state(trial)


@every_layout
@pytest.mark.parametrize("kind", KINDS)
def test_step_runs_once_as_it_is(layout: str, tmp_path: Path, kind: str) -> None:
    # What spans parameters stays in the program's hands, beside the store.
    assert_same(built_with(KINDS[kind]), plain_loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
@pytest.mark.parametrize("kind", ["CountsInItself", "KeepsMoments", "AddsNoise", "CallsItsBase"])
def test_a_closure_runs_inside_the_step(layout: str, tmp_path: Path, kind: str) -> None:
    assert_same(built_with(KINDS[kind]), closure_loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
def test_a_wrapper_that_holds_its_optimizer(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [SAM(model.parameters(), lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9))]

    def loop(trial: Trial) -> None:
        sam = trial.optimizer
        assert isinstance(sam, SAM)
        for _ in range(3):
            inputs, classes = batch()

            def closure(inputs: Tensor = inputs, classes: Tensor = classes) -> Tensor:
                loss = loss_of(trial.model, inputs, classes)
                loss.backward()
                return loss

            closure()
            trial.log(sam.step(closure))
            trial.log_gradients()
            for parameter in trial.model.parameters():
                trial.log(sam.base_optimizer.state[parameter]["momentum_buffer"])
            sam.zero_grad()

    assert_same(build, loop, layout, tmp_path, with_device(layout, "512KB"))


@every_layout
def test_a_wrapper_and_the_optimizer_that_it_holds(layout: str, tmp_path: Path) -> None:
    """The inner one is stepped a bundle at a time, in the midst of the outer one's step."""

    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        sam = SAM(model.parameters(), lambda groups: torch.optim.Adam(groups, lr=1e-2))
        return model, [sam, sam.base_optimizer]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            inputs, classes = batch()

            def closure(inputs: Tensor = inputs, classes: Tensor = classes) -> Tensor:
                loss = loss_of(trial.model, inputs, classes)
                loss.backward()
                return loss

            closure()
            optimizer: Any = trial.optimizer
            trial.log(optimizer.step(closure))
            trial.log_gradients()
            trial.optimizer.zero_grad()

    assert_same(build, loop, layout, tmp_path, with_device(layout, "512KB"))


@every_layout
def test_slow_weights_around_an_optimizer(layout: str, tmp_path: Path) -> None:
    """A wrapper that is no optimizer itself, such as Lookahead."""

    class Lookahead:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.slow = optimizer, [p.data.clone() for p in parameters_of(optimizer)]
            self.k = 0

        def step(self) -> None:
            self.optimizer.step()
            self.k += 1
            if self.k % 2 == 0:
                for slow, parameter in zip(self.slow, parameters_of(self.optimizer), strict=True):
                    slow.add_(parameter.data - slow, alpha=0.5)
                    parameter.data.copy_(slow)

    def loop(trial: Trial) -> None:
        lookahead = Lookahead(trial.optimizer)
        for _ in range(4):
            loss = loss_of(trial.model, *batch())
            loss.backward()
            trial.log(loss)
            lookahead.step()
            trial.optimizer.zero_grad()

    build = built_with(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2))
    assert_same(build, loop, layout, tmp_path, with_device(layout, "512KB"))


def gradient_of(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Picks(Kind):
    """Tries two steps, and takes the better one."""

    def step(self, closure: Any = None, *, tries: int = 2) -> Any:  # noqa: ANN401
        with torch.no_grad():
            starts = [p.clone() for p in parameters_of(self)]
            losses = []
            for number in range(tries):
                with torch.enable_grad():
                    losses.append(float(closure()))
                for parameter in parameters_of(self):
                    parameter.add_(gradient_of(parameter), alpha=-0.1 / (number + 1))
            if losses[-1] > losses[0]:
                for parameter, start in zip(parameters_of(self), starts, strict=True):
                    parameter.copy_(start)
        return torch.tensor(losses)


@every_layout
def test_a_closure_evaluated_several_times(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(3):
            inputs, classes = batch()

            def closure(inputs: Tensor = inputs, classes: Tensor = classes) -> Tensor:
                trial.optimizer.zero_grad()
                loss = loss_of(trial.model, inputs, classes)
                loss.backward()
                return loss.detach()

            optimizer: Any = trial.optimizer
            trial.log(optimizer.step(closure, tries=3))
            trial.log_gradients()

    assert_same(built_with(Picks), loop, layout, tmp_path, with_device(layout, "512KB"))


@every_layout
def test_two_optimizers_of_the_same_parameters(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [
            KINDS["KeepsMoments"](model.parameters()),
            torch.optim.Adam(model.parameters(), lr=1e-3),
            CountsInItself(model.parameters()),
        ]

    def loop(trial: Trial) -> None:
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            for optimizer in trial.optimizers:
                optimizer.step()
            trial.log_gradients()
            trial.model.zero_grad()

    assert_same(build, loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
def test_a_group_added_later(layout: str, tmp_path: Path) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(2)
        return model, [KINDS["KeepsMoments"](model[:1].parameters())]

    def loop(trial: Trial) -> None:
        plain_loop(trial)
        trial.model.zero_grad()
        trial.optimizer.add_param_group({"params": list(trial.model[1:].parameters()), "lr": 1e-3})  # type: ignore[index]
        plain_loop(trial)

    assert_same(build, loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
def test_gradients_that_a_scaler_unscales(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=1)
        for turn in range(4):
            loss = loss_of(trial.model, *batch())
            scaler.scale(loss * float("inf") if turn == 1 else loss).backward()
            log_result(trial, scaler.step(trial.optimizer))
            scaler.update()
            trial.log(torch.tensor(scaler.get_scale()))
            log_state(trial)
            trial.optimizer.zero_grad()

    assert_same(built_with(KINDS["KeepsMoments"]), loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
def test_a_schedule_and_hooks_around_the_step(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        def hook(optimizer: Optimizer, args: object, kwargs: object) -> None:
            del args, kwargs
            trial.log(torch.tensor(len(parameters_of(optimizer))))
            trial.log(parameters_of(optimizer)[0].sum())

        scheduler = torch.optim.lr_scheduler.StepLR(trial.optimizer, 1, gamma=0.5)
        handles = [
            trial.optimizer.register_step_pre_hook(hook),
            trial.optimizer.register_step_post_hook(hook),
        ]
        for _ in range(3):
            loss_of(trial.model, *batch()).backward()
            log_result(trial, trial.optimizer.step())
            scheduler.step()
            trial.optimizer.zero_grad()
        for handle in handles:
            handle.remove()

    build = built_with(KINDS["KeepsMoments"])
    assert_same(build, loop, layout, tmp_path, with_device(layout, "384KB"))


@every_layout
def test_state_dicts_there_and_back(layout: str, tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        plain_loop(trial)
        kept = copy.deepcopy(trial.optimizer.state_dict())  # PyTorch's own lives on
        plain_loop(trial)
        trial.optimizer.load_state_dict(kept)
        plain_loop(trial)

    for kind in ("KeepsMoments", "KeepsOtherShapes"):
        assert_same(built_with(KINDS[kind]), loop, layout, tmp_path / kind, with_device(layout, "512KB"))


# ---------------------------------------------------------------------- what leaves and what stays


def state_tensors(optimizer: Optimizer, name: str) -> list[Tensor]:
    return [entries[name] for entries in optimizer.state.values()]


def test_state_goes_into_the_store_and_stays_the_same_object(tmp_path: Path) -> None:
    model, (optimizer,) = built_with(KINDS["KeepsMoments"])()
    with offload(model, optimizer, config_of("device", tmp_path, with_device("device", "384KB"))) as run:
        loss_of(model, *batch()).backward()
        optimizer.step()
        squares = state_tensors(optimizer, "square")
        assert all(guard.guarded_tensor_of(square) is not None for square in squares)
        assert sum(key.startswith("state/") for key in run.store) > 0
        optimizer.step()
        assert all(a is b for a, b in zip(squares, state_tensors(optimizer, "square"), strict=True))


def test_state_leaves_while_the_first_step_goes_on(tmp_path: Path) -> None:
    taken: list[int] = []

    class Watched(KeepsMoments):
        def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
            super().change(group, parameter, gradient)
            squares = state_tensors(self, "square")
            taken.append(sum(guard.guarded_tensor_of(square) is not None for square in squares))

    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    optimizer = Watched(model.parameters())
    with offload(model, optimizer, config_of("disk", tmp_path)):
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
    assert taken == [0, 0, 2, 2, 4, 4, 6, 6]


@pytest.mark.parametrize("kind", ["SharesItsState", "KeepsOneFlatState"])
def test_state_of_shared_memory_stays_where_it_is(kind: str, tmp_path: Path) -> None:
    model, (optimizer,) = built_with(KINDS[kind])()
    with offload(model, optimizer, config_of("host", tmp_path)):
        loss_of(model, *batch()).backward()
        optimizer.step()
        assert all(guard.guarded_tensor_of(mean) is None for mean in state_tensors(optimizer, "mean"))


def test_state_that_numpy_looks_at_stays_where_it_is(tmp_path: Path) -> None:
    arrays = []

    class Exports(Kind):
        def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["sum"] = torch.zeros_like(parameter)
                arrays.append(state["sum"].numpy())
            state["sum"].add_(1)

    model, (optimizer,) = built_with(Exports)()
    with offload(model, optimizer, config_of("host", tmp_path)):
        for _ in range(2):
            loss_of(model, *batch()).backward()
            optimizer.step()
        assert all(guard.guarded_tensor_of(each) is None for each in state_tensors(optimizer, "sum"))
        assert all((array == 2).all() for array in arrays)


def test_state_that_a_graph_has_saved_stays_until_that_is_gone(tmp_path: Path) -> None:
    graphs = []

    class Differentiates(Kind):
        def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
            state = self.state[parameter]
            if not state:
                state["factor"] = torch.full_like(parameter, 3.0)
                with torch.enable_grad():
                    leaf = torch.ones(parameter.shape, requires_grad=True)
                    graphs.append((leaf, (leaf * state["factor"]).sum()))

    model, (optimizer,) = built_with(Differentiates)()
    with offload(model, optimizer, config_of("host", tmp_path)):
        loss_of(model, *batch()).backward()
        optimizer.step()
        for leaf, total in graphs:
            (gradient,) = torch.autograd.grad(total, leaf)
            assert torch.equal(gradient, torch.full_like(leaf, 3.0))


# ---------------------------------------------------------------------- no room


class Flattens(Kind):
    """Has all gradients at once, as LBFGS has."""

    def apply(self) -> object:
        flat = torch.cat([p.grad.view(-1) for p in parameters_of(self)])  # type: ignore[union-attr]
        offset = 0
        for parameter in parameters_of(self):
            parameter.sub_(flat[offset : offset + parameter.numel()].view_as(parameter), alpha=0.1)
            offset += parameter.numel()
        return flat.norm()


class WritesThenFlattens(Flattens):
    """Changes a parameter before it asks for too much."""

    def apply(self) -> object:
        with torch.no_grad():
            parameters_of(self)[0].add_(1)
        return super().apply()


def test_what_is_flattened_works_where_it_fits(tmp_path: Path) -> None:
    assert_same(built_with(Flattens), plain_loop, "device", tmp_path, with_device("device", "640KB"))
    assert_same(built_with(Flattens), plain_loop, "host", tmp_path)


def held_by(model: nn.Module) -> list[Tensor]:
    """Return copies of parameters and gradients, in memory that no meter takes for a device's."""
    with ordinary_mode():
        tensors = (tensor for p in model.parameters() for tensor in (p, p.grad) if tensor is not None)
        return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.parametrize("layout", ["disk", "device", "three"])
def test_what_finds_no_room_is_refused_by_name_and_nothing_is_changed(layout: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = blocks(3)
    optimizer = Flattens(model.parameters())
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, classes = batch()
    with offload(model, [optimizer, plain], config_of(layout, tmp_path)):
        loss_of(model, inputs, classes).backward()
        before = held_by(model)
        with pytest.raises(
            CapacityError, match=r"(?s)Flattens.*Nothing was changed.*register_optimizer"
        ) as caught:
            optimizer.step()
        assert caught.value.needed_bytes is not None
        del caught
        assert all(torch.equal(a, b) for a, b in zip(before, held_by(model), strict=True))
        plain.step()
        plain.zero_grad()
        loss_of(model, inputs, classes).backward()


def test_what_finds_no_room_after_a_write_says_so(tmp_path: Path) -> None:
    model = blocks(3)
    optimizer = WritesThenFlattens(model.parameters())
    with offload(model, optimizer, config_of("disk", tmp_path)):
        loss_of(model, *batch()).backward()
        with pytest.raises(CapacityError, match=r"WritesThenFlattens.*may be changed"):
            optimizer.step()


# ---------------------------------------------------------------------- LBFGS


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@every_layout
def test_lbfgs_works_where_it_fits(layout: str, tmp_path: Path, line_search: str | None) -> None:
    def build() -> tuple[nn.Module, Sequence[Optimizer]]:
        model = blocks(1)
        options = {"lr": 0.1, "max_iter": 4, "history_size": 3, "line_search_fn": line_search}
        return model, [torch.optim.LBFGS(model.parameters(), **options)]  # type: ignore[arg-type]

    more = {"max_device_memory": "4MB"} if "max_device_memory" in config_of(layout, tmp_path) else {}
    more = {"offload_cpu_size": "1MB"} if layout == "disk" else more
    assert_same(build, closure_loop, layout, tmp_path, more)


@pytest.mark.parametrize("layout", ["disk", "device", "three"])
def test_lbfgs_is_refused_before_the_first_step_where_it_does_not(layout: str, tmp_path: Path) -> None:
    model = blocks()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(CapacityError, match=r"LBFGS has all parameters and gradients at once.*history_size"):
        offload(model, torch.optim.LBFGS(model.parameters()), config_of(layout, tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# ---------------------------------------------------------------------- who is known


class Signs(Kind):
    """Treats each parameter by itself."""

    def apply(self) -> object:
        self.t += 1
        super().apply()
        return None

    def change(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            state["mean"] = torch.zeros_like(parameter)
        state["mean"].lerp_(gradient, 0.1)
        parameter.add_(state["mean"].sign(), alpha=-group["lr"])


def log_state_only(trial: Trial) -> None:
    for _ in range(3):
        loss_of(trial.model, *batch()).backward()
        trial.log_gradients()
        trial.optimizer.step()
        trial.optimizer.zero_grad()


@every_layout
def test_a_registered_class_is_stepped_a_bundle_at_a_time(layout: str, tmp_path: Path) -> None:
    register_optimizer(Signs)
    register_optimizer(Signs)
    try:
        assert_same(built_with(Signs), log_state_only, layout, tmp_path)
        model, (optimizer,) = built_with(Signs)()
        with offload(model, optimizer, config_of("disk", tmp_path / "calls")):
            loss_of(model, *batch()).backward()
            optimizer.step()
            assert optimizer.t > 1  # type: ignore[attr-defined]
    finally:
        register_optimizer(Signs, per_parameter=False)


def test_what_is_registered_can_be_taken_back(tmp_path: Path) -> None:
    register_optimizer(Signs, per_parameter=True)
    register_optimizer(Signs, per_parameter=False)
    model, (optimizer,) = built_with(Signs)()
    with offload(model, optimizer, config_of("disk", tmp_path)):
        loss_of(model, *batch()).backward()
        optimizer.step()
    assert optimizer.t == 1  # type: ignore[attr-defined]


def test_a_subclass_is_not_covered_by_its_base_s_registration(tmp_path: Path) -> None:
    class More(Signs):
        pass

    register_optimizer(Signs)
    try:
        model = blocks(2)
        optimizer = More(model.parameters())
        with offload(model, optimizer, config_of("disk", tmp_path)):
            loss_of(model, *batch()).backward()
            optimizer.step()
        assert optimizer.t == 1
    finally:
        register_optimizer(Signs, per_parameter=False)


def test_a_step_that_somebody_replaced_is_not_pytorch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = blocks(2)
    torch.optim.SGD(model.parameters())  # hooks its class
    calls: list[int] = []
    own: Callable[..., Any] = torch.optim.SGD.step

    def counted(self: Optimizer, closure: Any = None) -> Any:  # noqa: ANN401
        calls.append(1)
        return own(self, closure)

    monkeypatch.setattr(torch.optim.SGD, "step", counted)
    optimizer = torch.optim.SGD(model.parameters())
    with offload(model, optimizer, config_of("disk", tmp_path)):
        loss_of(model, *batch()).backward()
        optimizer.step()
    assert calls == [1]


@pytest.mark.parametrize("given", [nn.Linear, Signs([nn.Parameter(torch.zeros(1))]), "SGD", None])
def test_what_is_no_class_of_optimizers_is_refused(given: Any) -> None:  # noqa: ANN401
    with pytest.raises(UsageError, match=r"subclass of torch\.optim\.Optimizer"):
        register_optimizer(given)


def test_what_is_no_optimizer_is_refused_by_name(tmp_path: Path) -> None:
    class Wrapper:
        def step(self) -> None: ...

    with pytest.raises(
        UsageError, match=r"Wrapper is no torch\.optim\.Optimizer\. Pass the optimizer that it works"
    ):
        offload(blocks(1), Wrapper(), config_of("host", tmp_path))  # type: ignore[arg-type]
