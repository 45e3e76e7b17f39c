"""Recomputing changes no bit: not of losses, gradients, buffers, their versions, or random numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.recompute_models import (
    CONFIGS,
    DIM,
    LENGTH,
    MODELS,
    Model,
    Steps,
    assert_same_bits,
    inputs,
    recomputing,
    train,
)

every_model = pytest.mark.parametrize("model", MODELS)
every_config = pytest.mark.parametrize("config", CONFIGS)


def autocast(model: nn.Module) -> list[Tensor | None]:
    """Train under autocast: forward, backward, or both."""
    losses: list[Tensor | None] = []
    for number, (forward, backward) in enumerate([(True, False), (True, True), (False, True)]):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=forward):
            loss = model(inputs(number)).float().square().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=backward):
            loss.backward()
        losses.append(loss.detach())
    return losses


def retained(model: nn.Module) -> list[Tensor | None]:
    """Run backward twice through one graph."""
    loss = model(inputs()).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return [loss.detach()]


def in_flight(model: nn.Module) -> list[Tensor | None]:
    """Run two forwards, then two backwards in the other order; a third graph is never run backward."""
    first, second, _ = (model(inputs(number)).square().mean() for number in range(3))
    second.backward()
    first.backward()
    return [first.detach(), second.detach()]


def by_grad(model: nn.Module) -> list[Tensor | None]:
    """Ask for gradients of inputs and of one parameter."""
    x = inputs().requires_grad_()
    weight = next(model.parameters())
    found = torch.autograd.grad(model(x).square().mean(), [x, weight], allow_unused=True)
    return list(found)


def evaluated(model: nn.Module) -> list[Tensor | None]:
    """Evaluate before, between and after steps; in evaluation mode also with gradients."""
    logged: list[Tensor | None] = []
    for number in range(2):
        model.eval()
        with torch.no_grad():
            logged.append(model(inputs(number)))
        model(inputs(number)).square().mean().backward()
        model.train()
        logged += train(model)
    return logged


ALL_STEPS = {
    "train": train,
    "autocast": autocast,
    "retained": retained,
    "in flight": in_flight,
    "by grad": by_grad,
    "evaluated": evaluated,
}


@every_model
@every_config
@pytest.mark.parametrize("steps", ALL_STEPS)
def test_everything_is_the_same_bit_for_bit(model: str, config: str, steps: str) -> None:
    run = assert_same_bits(MODELS[model], ALL_STEPS[steps], CONFIGS[config])
    stats = run.stats()
    if config in ("whole", "aten"):
        assert stats.repetitions + stats.operators > 0


_PATTERNS = [
    "attention",
    "feed_forward",
    r"attention\.w.",
    r"attention\.flash_attention",
    r".*_norm",
    r"feed_forward\.mul",
    r"feed_forward\.silu",
    r"feed_forward\.dropout",
    "aten.mul",
    "aten.mm",
    "aten.add",
    r"aten\.(t|view|clone|bernoulli_|empty_like|_unsafe_view)",
    r"aten\._scaled.*",
    r"aten\.native_layer_norm",
    "add",
]
_layers = st.one_of(st.booleans(), st.lists(st.integers(0, 3), max_size=1))


@given(
    st.dictionaries(st.sampled_from(_PATTERNS), _layers, max_size=6),
    _layers,
    st.lists(st.sampled_from(["aten.mul", "aten.mm", r"feed_forward\.mul", "aten.add"]), max_size=2),
    st.sampled_from([train, autocast, in_flight]),
)
def test_any_selection_changes_no_bit(
    chosen: dict[str, object], whole: object, kept: list[str], steps: object
) -> None:
    config = {"select_recompute": chosen, "recompute": whole, "select_recompute_exclude": kept or False}
    assert_same_bits(MODELS["llama"], cast("type[object]", steps), config)  # type: ignore[arg-type]


def test_double_backward_is_the_same() -> None:
    def steps(model: nn.Module) -> list[Tensor | None]:
        x = inputs().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        first.square().sum().backward()
        return [first.detach(), x.grad]

    for config in ({"recompute": True}, {"select_recompute": ["aten.mul", "aten.silu"]}):
        assert_same_bits(lambda: Model(_smooth), steps, config)


# ---------------------------------------------------------------------- what else a forward depends on

WHOLE_OR_OPERATORS = (
    {"recompute": True},
    {"recompute": True, "select_recompute_exclude": ["aten.addmm", "aten.tanh"]},
    {"select_recompute": [r"aten\..*"]},
)


class Part(nn.Module):
    """A product, dropout, a norm that counts, and generators of its own and of others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(DIM, DIM), nn.BatchNorm1d(LENGTH), nn.Dropout(0.2)
        self.generator = torch.Generator().manual_seed(5)
        self.generators = random.Random(6)
        self.numpy, self.legacy = numpy.random.default_rng(7), numpy.random.RandomState(8)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Transform ``(batch, LENGTH, DIM)``."""
        mask = torch.rand(x.shape, generator=generator or self.generator)
        scale = random.random() + numpy.random.rand() + self.generators.random()
        scale += float(self.numpy.random()) + self.legacy.rand()
        output: Tensor = self.dropout(self.norm(torch.tanh(self.linear(x)) * mask * scale))
        return output


class Given(nn.Module):
    """Layers that are given a generator, an iterator, and a list that they change."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_GivenLayer() for _ in range(2))
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, LENGTH, DIM)`` to the same shape."""
        self.generator.manual_seed(3)
        for layer in self.layers:
            scales = [x.cos(), x.sin()]
            x = layer(x, scales, generator=self.generator, more={"steps": iter([x, 2 * x])})
            assert len(scales) == 1
        return x


class _GivenLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = _TakesList()

    def forward(
        self,
        x: Tensor,
        scales: list[Tensor],
        *,
        generator: torch.Generator,
        more: dict[str, Iterator[Tensor]],
    ) -> Tensor:
        return torch.tanh(self.part(x, scales, generator) + next(more["steps"]) * next(more["steps"]))


class _TakesList(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Part()

    def forward(self, x: Tensor, scales: list[Tensor], generator: torch.Generator) -> Tensor:
        output: Tensor = self.inner(x, generator) * scales.pop()
        return output


def toggled(model: nn.Module) -> list[Tensor | None]:
    """Say between forward and backward that the model evaluates, trains, or has nothing to learn."""
    logged: list[Tensor | None] = []
    for trains in (True, False):
        loss = model.train(trains)(inputs()).square().mean()
        model.train(not trains).requires_grad_(not trains)
        loss.backward()
        assert all(module.training != trains for module in model.modules())
        assert all(parameter.requires_grad != trains for parameter in model.parameters())
        model.requires_grad_()
        logged.append(loss.detach())
    return logged


@pytest.mark.parametrize("steps", [train, retained, in_flight, toggled])
@pytest.mark.parametrize("config", [*WHOLE_OR_OPERATORS, {"select_recompute": ["part"]}], ids=str)
@pytest.mark.parametrize("build", [lambda: Model(Part), Given], ids=["part", "given"])
def test_a_forward_sees_what_it_saw(
    build: Callable[[], nn.Module], config: dict[str, object], steps: Steps
) -> None:
    def with_generators(model: nn.Module) -> list[Tensor | None]:
        random.seed(1)
        numpy.random.seed(2)
        logged = steps(model)
        owned = [each.generator for each in model.modules() if isinstance(each, Part | Given)]
        parts = [each for each in model.modules() if isinstance(each, Part)]
        drawn = [random.random(), numpy.random.rand(), *(each.generators.random() for each in parts)]
        drawn += [float(each.numpy.random()) + each.legacy.rand() for each in parts]
        return [*logged, torch.tensor(drawn), *(each.get_state() for each in owned)]

    run = assert_same_bits(build, with_generators, config)
    is_recomputed = "recompute" not in config or build is not Given  # else there is an iterator
    is_recomputed &= "part" not in str(config) or build is Given
    assert (run.stats().repetitions + run.stats().operators > 0) == is_recomputed


def test_a_parameter_that_changed_since_is_refused_as_pytorch_refuses_it() -> None:
    model = Model(lambda: nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
    with recomputing(model, {"recompute": True}):
        loss = model(inputs()).sum()
        with torch.no_grad():
            for parameter in model.layers[1].parameters():
                parameter.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_parameter_that_the_forward_itself_changes_is_not_refused() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(LENGTH, DIM, max_norm=1.0)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x * self.words(torch.arange(LENGTH)))

    model = Model(Embedded)
    with recomputing(model, {"recompute": True}) as run:
        train(model)
    assert run.stats().repetitions > 0


@dataclass
class State:
    """What goes from layer to layer."""

    x: Tensor
    steps: int = 0


def test_a_dataclass_that_a_layer_changes_is_what_it_was() -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, state: State) -> State:
            state.steps += 1
            state.x = torch.tanh(self.linear(state.x) * state.steps)
            return state

    class Stepped(Model):
        def forward(self, x: Tensor) -> Tensor:
            state = State(x)
            for layer in self.layers:
                state = layer(state)
            return state.x

    for steps in (train, retained):
        run = assert_same_bits(lambda: Stepped(Stepping), steps, {"recompute": True})
        assert run.stats().repetitions > 0


def test_parameters_that_are_lent_for_a_call_are_those_of_its_repetition() -> None:
    def steps(model: nn.Module) -> list[Tensor | None]:
        lent = {name: (2 * each).detach().requires_grad_() for name, each in model.named_parameters()}
        torch.func.functional_call(model, lent, (inputs(),)).square().mean().backward()
        return [each.grad for each in lent.values()]

    for config in WHOLE_OR_OPERATORS:
        run = assert_same_bits(lambda: Model(_smooth), steps, config)
        assert run.stats().repetitions + run.stats().operators > 0


def test_a_copy_that_shares_the_hooks_runs_itself_again() -> None:
    def steps(model: nn.Module) -> list[Tensor | None]:
        layer = model.get_submodule("layers.1")
        twin = copy.copy(layer)
        twin._parameters = {name: nn.Parameter(2 * each) for name, each in layer.named_parameters()}
        twin(inputs()).square().mean().backward()
        return [parameter.grad for parameter in twin.parameters()]

    class Squashed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(super().forward(x))

    for config in WHOLE_OR_OPERATORS:
        run = assert_same_bits(lambda: Model(lambda: Squashed(DIM, DIM)), steps, config)
        assert run.stats().repetitions + run.stats().operators > 0


def test_what_was_made_before_a_change_serves_a_retained_graph() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            h: Tensor = self.linear(x)
            made = torch.sin(h + 1)
            return made + h.mul_(2)

    run = assert_same_bits(lambda: Model(Changing), retained, {"select_recompute": ["aten.add"]})
    assert run.stats().operators > 0


def test_what_is_given_twice_is_one_object_again() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(DIM, 2, 0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            mixed, _ = self.attention(x, x, x)  # if these are one, it takes another way
            return torch.tanh(mixed)

    for config in (*WHOLE_OR_OPERATORS, {"select_recompute": ["attention", "aten.tanh"]}):
        run = assert_same_bits(lambda: Model(Mixing), train, config)
        assert run.stats().repetitions + run.stats().operators > 0


def test_a_lazy_layer_is_recomputed_from_its_second_forward_on() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(DIM), nn.Sequential(nn.LazyBatchNorm1d(), nn.Tanh()))

    for config in WHOLE_OR_OPERATORS[:2]:
        run = assert_same_bits(lambda: Model(lazy), train, config)
        assert run.stats().repetitions == 5  # of 2 x 4, without the first of each of 3 layers


def _slopes(model: nn.Module) -> list[Tensor | None]:
    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(model, parameters, (inputs(),))
        return output.square().mean()

    return list(torch.func.grad(loss)(dict(model.named_parameters())).values())


def _by_row(model: nn.Module) -> list[Tensor | None]:
    output: Tensor = torch.func.vmap(model)(inputs().unsqueeze(1))
    output.square().mean().backward()
    return [output.detach()]


def _traced(model: nn.Module) -> list[Tensor | None]:
    for layer in model.get_submodule("layers").children():
        layer.register_buffer("scale", torch.ones(()))
    return [torch.jit.trace(model, inputs())(inputs()).detach()]


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
@pytest.mark.parametrize("steps", [_slopes, _by_row, _traced])
@pytest.mark.parametrize("config", WHOLE_OR_OPERATORS, ids=str)
def test_inside_of_transforms_nothing_is_recomputed(steps: Steps, config: dict[str, object]) -> None:
    run = assert_same_bits(lambda: Model(_smooth), steps, config)
    assert run.stats().repetitions + run.stats().operators == 0


def test_what_is_read_once_is_not_recomputed_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Given()
    with recomputing(model, {"recompute": True}) as run:
        train(model)
    assert run.stats().forwards == 0
    assert [text for text in caplog.messages if "iterator" in text] == [
        "a _GivenLayer was given an iterator, which can be read once: it is not recomputed"
    ] * 2


class Transformed(nn.Module):
    """Uses ``torch.func``, and gradients, inside its forward."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, LENGTH, DIM)``."""
        if self.how == "vmap":
            mapped: Tensor = torch.func.vmap(lambda row: torch.tanh(self.linear(row)) * row.sin())(x)
            return mapped
        if self.how == "jvp":
            tangent: Tensor = torch.func.jvp(
                lambda y: torch.tanh(self.linear(y)), (x,), (torch.ones_like(x),)
            )[1]
            return tangent
        if self.how == "functional_call":
            weights = {"weight": 2 * self.linear.weight, "bias": self.linear.bias}
            called: Tensor = torch.func.functional_call(self.linear, weights, (x,))
            return called.tanh()
        y = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(y).tanh().sum(), y, create_graph=True)
        return x * slope


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # the first jvp calls it
@pytest.mark.parametrize("how", ["vmap", "jvp", "functional_call", "grad"])
@pytest.mark.parametrize("config", WHOLE_OR_OPERATORS, ids=str)
def test_transforms_inside_of_a_forward_are_the_same(how: str, config: dict[str, object]) -> None:
    assert_same_bits(lambda: Model(lambda: Transformed(how)), train, config)


def _smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh())
