"""Recomputing changes no bit: not of losses, gradients, buffers, their versions, or random numbers."""

from __future__ import annotations

from typing import cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.training.recompute_models import CONFIGS, MODELS, Model, assert_same_bits, inputs, train

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


def _smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh())
