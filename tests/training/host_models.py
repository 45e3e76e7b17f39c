"""Models of which parts compute on the host, and the same in plain PyTorch: ``Tensor.to`` brings values."""

from __future__ import annotations

import gc
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests import target
from tests.training import twins
from tests.training.twins import Optimizer, Trial, config_of
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload

WIDTH = 16

Log = Callable[[Trial], None]


class MatMul(nn.Module):
    """A matrix product."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply."""
        return x @ weight


class Add(nn.Module):
    """A sum."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add."""
        return x + bias


class Dense(nn.Module):
    """The document's layer: two operators, which are given its own weight and bias."""

    def __init__(self, inputs: int = WIDTH, outputs: int = WIDTH) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.zeros(outputs))
        self.matmul = MatMul()
        self.add = Add()

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.add(self.matmul(x, self.weight), self.bias)
        return made


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        changed: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + changed


class Named(nn.Module):
    """Takes and returns tensors by name, in nested containers, one of them twice, with what is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Mapping[str, Any], *, also: Sequence[Tensor], scale: float) -> dict[str, Any]:
        """Transform."""
        x, same = given["x"], given["again"]
        assert x is same
        y = self.line(x) * scale + also[0]
        return {"y": y, "more": (y, None, [y.detach().sum()], "text")}


class Containers(nn.Module):
    """Calls `Named`."""

    def __init__(self) -> None:
        super().__init__()
        self.named = Named()
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        found = self.named({"x": x, "again": x}, also=[x], scale=0.5)
        assert found["more"][0] is found["y"]
        made: Tensor = self.norm(found["y"] + found["more"][2][0])
        return made


class Twice(nn.Module):
    """Calls a module on its own output, and with some inputs once more.

    The norm is what keeps it on the device: a module all of whose children are on the host is there, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Call it."""
        y: Tensor = self.inner(torch.tanh(self.inner(x)))
        if float(x.detach()[0, 0]) > 0:
            y = y + self.inner(x)
        made: Tensor = self.norm(y)
        return made


class Embedded(nn.Module):
    """Looks up what is on the host, and computes with it on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, WIDTH)
        self.line = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Look up one row for each column of the input's first two."""
        ids = (x[:, :2].detach() * 10).long().abs() % 32
        return x + torch.tanh(self.line(self.table(ids).sum(1)))


class Inner(nn.Module):
    """A host module with a module inside that computes on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.fast = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        y = self.first(x)
        made: Tensor = y * torch.sigmoid(self.fast(y))
        return made


class Tied(nn.Module):
    """Two host modules that share a weight, and a device module between them."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH)
        self.between = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.other(torch.tanh(self.between(self.one(x))))
        return made


class InPlace(nn.Module):
    """A module that writes to its input, on the host to a copy; without that it could not be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """Transform, and use what the module was given once more."""
        y = self.line(x)
        z: Tensor = self.relu(y)
        z += 1
        made: Tensor = z * y.sigmoid()
        return made


def _model(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *middle, nn.Linear(WIDTH, 5))


@dataclass(frozen=True)
class Case:
    """What is on the host.

    Attributes:
        build: makes the model.
        patterns: that place it.
        borders: where values cross, with the side of each: the oracle's.
        on_host: the modules whose tensors are used on the host: the oracle's.
        handed_on: those whose output goes to the next one as it is: nothing travels there.
    """

    build: Callable[[], nn.Module]
    patterns: Mapping[str, str]
    borders: Mapping[str, str]
    on_host: Sequence[str] = field(default_factory=list)
    handed_on: Mapping[str, str] = field(default_factory=dict)


def _case(build: Callable[[], nn.Module], *names: str, handed_on: Mapping[str, str] | None = None) -> Case:
    patterns = {name.replace(".", r"\."): "cpu" for name in names}
    return Case(build, patterns, dict.fromkeys(names, "cpu"), names, handed_on or {})


CASES: dict[str, Case] = {
    "leaf": _case(lambda: _model(nn.Linear(WIDTH, WIDTH), nn.Tanh()), "1"),
    "layer": _case(lambda: _model(Layer(), Layer()), "2"),
    "first and last": _case(lambda: _model(nn.Tanh()), "0", "2"),
    "dense": Case(
        lambda: _model(Dense(), nn.ReLU()),
        {r"1\.(matmul|add)": "cpu"},
        {"1": "cpu"},
        ["1"],
    ),
    "root": Case(lambda: _model(Layer()), {".*": "cpu"}, {"": "cpu"}, [""]),
    "neighbours": Case(
        lambda: _model(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Tanh()),
        {"[1-3]": "cpu"},
        {"1": "cpu", "2": "cpu", "3": "cpu"},
        ["1", "2", "3"],
        {"1": "2", "2": "3"},
    ),
    "inner on the device": Case(
        lambda: _model(Inner()),
        {r"1\.fast": "device", "1": "cpu"},
        {"1": "cpu", "1.fast": "device"},
        ["1.first"],
    ),
    "containers": _case(lambda: _model(Containers()), "1.named"),
    "twice": _case(lambda: _model(Twice()), "1.inner"),
    "embedding": _case(lambda: _model(Embedded()), "1.table"),
    "tied": _case(lambda: _model(Tied()), "1.one", "1.other"),
    "in place": _case(lambda: _model(InPlace()), "1.relu"),
    "dropout": _case(
        lambda: _model(nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH)), "1", "2", handed_on={"1": "2"}
    ),
    "buffers": _case(lambda: _model(nn.BatchNorm1d(WIDTH), nn.Tanh()), "1"),
}


# ---------------------------------------------------------------------- the same in plain PyTorch


@dataclass
class Moved:
    """What has crossed in plain PyTorch, in bytes, by where it went."""

    bytes_to: Counter[str] = field(default_factory=Counter)


class _Moving(torch.autograd.Function):
    """Brings a value to a device, and its gradient back, and counts both."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, side: str, moved: Moved) -> Tensor:  # noqa: ANN401
        """Bring a value."""
        ctx.side, ctx.moved = side, moved
        moved.bytes_to[side] += value.nbytes
        return value.to(_device(side), copy=True)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # noqa: ANN401
        """Bring its gradient."""
        other = "device" if ctx.side == "cpu" else "cpu"
        return _moving(gradient, other, ctx.moved), None, None


_moving: Callable[[Tensor, str, Moved], Tensor] = _Moving.apply


def _device(side: str) -> str:
    return "cpu" if side == "cpu" else target.accelerator or "cpu"


def place_plainly(model: nn.Module, case: Case, moved: Moved) -> None:
    """Let a model compute as placed: hooks at the borders bring values, as a program would."""
    for name, side in case.borders.items():
        module = model.get_submodule(name)
        other = "device" if side == "cpu" else "cpu"

        before = _Before(side, Moved() if name in case.handed_on.values() else moved)
        after = _After(other, Moved() if name in case.handed_on else moved)
        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        module.register_forward_hook(after)


@dataclass
class _Before:
    side: str
    moved: Moved

    def __call__(self, _: nn.Module, args: object, kwargs: object) -> Any:  # noqa: ANN401
        return _mapped((args, kwargs), self.side, self.moved)


@dataclass
class _After:
    side: str
    moved: Moved

    def __call__(self, _: nn.Module, args: object, output: object) -> Any:  # noqa: ANN401
        return _mapped(output, self.side, self.moved)


def _mapped(values: Any, side: str, moved: Moved) -> Any:  # noqa: ANN401
    known: dict[int, Tensor] = {}

    def bring(value: Tensor) -> Tensor:
        if id(value) not in known:
            known[id(value)] = _moving(value, side, moved)
        return known[id(value)]

    return pytree.tree_map_only(Tensor, bring, values)


def to_host(model: nn.Module, case: Case) -> None:
    """Bring what modules on the host have there; parameters are replaced, so before an optimizer is made."""
    for name in case.on_host:
        model.get_submodule(name).to("cpu")
    for name in [name for name, side in case.borders.items() if side == "device"]:
        model.get_submodule(name).to(_device("device"))


# ---------------------------------------------------------------------- both


Optimize = Callable[[nn.Module], Sequence[Optimizer]]


def adam(model: nn.Module) -> list[Optimizer]:
    """Return Adam for all parameters."""
    return [torch.optim.Adam(model.parameters(), lr=1e-2)]


def trial_of(case: Case, optimize: Optimize = adam) -> Trial:
    """Return a model with its optimizers, what is on the host there."""
    torch.manual_seed(0)
    model = case.build()
    to_host(model, case)
    return Trial(model, optimize(model))


def has_device(layout: str) -> bool:
    """Whether modules can compute elsewhere than on the host."""
    return "max_device_memory" in twins.LAYOUTS[layout]


def assert_same_placed(
    case: Case,
    loop: twins.Loop,
    layout: str,
    path: Path,
    more: Mapping[str, object] | None = None,
    optimize: Optimize = adam,
) -> tuple[Moved, Trial]:
    """Run the loop plain and offloaded, parts of both on the host; compare all bits.

    Returns:
        What has crossed in plain PyTorch, and the offloaded trial, which has ended.
    """
    plain, moved = trial_of(case, optimize), Moved()
    if has_device(layout):  # else there is nowhere else to compute
        place_plainly(plain.model, case, moved)
    torch.manual_seed(1)
    loop(plain)
    ours = trial_of(case, optimize)
    config = twins.with_rest(config_of(layout, path, more), ours.model)
    with offload(ours.model, list(ours.optimizers), config, placement=case.patterns) as run:
        ours.run = run
        torch.manual_seed(1)
        with DeviceBudget("1GiB", mixing="raise"):
            loop(ours)
        assert_confined(ours, case)
        run.store.check()
    twins.assert_equal_lists(plain.logged, ours.logged)
    assert_equal_left(plain, ours, case)
    return moved, ours


def assert_equal_left(plain: Trial, ours: Trial, case: Case) -> None:
    """Compare what two trials leave; hooks that plain PyTorch has are none of it."""
    del case
    twins.assert_equal_models(plain.model, ours.model)
    for expected, found in zip(plain.optimizers, ours.optimizers, strict=True):
        twins.assert_equal_states(expected, found)


def assert_confined(trial: Trial, case: Case) -> None:
    """Make sure that nothing of what is on the host is, or was put, anywhere else."""
    assert trial.run is not None
    store, placement = trial.run.store, trial.run.placement
    own = [key for key, homes in placement.bundles.items() if homes.parameters.device == "cpu"]
    if store.tier_names[0] == "host":
        return
    names = dict(trial.model.named_parameters())
    used = {id(p) for name in case.on_host for p in trial.model.get_submodule(name).parameters()}
    on_host = {name for name, p in names.items() if id(p) in used}
    assert bool(own) is bool(on_host)
    states = {f"state/{n}/{key.partition('/')[2]}" for key in own for n in range(len(trial.optimizers))}
    for key in {*own, *states, *(f"grad/{name}" for name in on_host)}.intersection(store):
        assert "device" not in store.where(key), key
        assert not any("device" in each for each in store.story(key)), store.story(key)


def assert_nothing_crosses(run: Offload) -> None:
    """Make sure that of what has crossed nothing is left but what somebody refers to, which nobody does.

    A value goes at the first sweep at which nobody refers to it.  A thread of autograd may have the last one
    for a moment after the step.
    """
    assert run._session is not None
    until = time.monotonic() + 10
    while left := [key for key in run.store if key.startswith("cross/")]:
        assert time.monotonic() < until, left
        gc.collect()
        run._session.link.sweep()
        threading.Event().wait(0.01)
