"""Models that cannot be traced, or only with assumptions: each is told with its place."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.training.traced_models import mlp
from tierstore.errors import UsageError
from tierstore.planning import Program
from tierstore.training.tracing import trace_model

Made = Callable[[torch.Tensor], torch.Tensor]


class Inner(nn.Module):
    """What a function makes of a linear layer's result."""

    def __init__(self, function: Made) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


class Outer(nn.Module):
    """Has the other inside."""

    def __init__(self, function: Made) -> None:
        super().__init__()
        self.inner = Inner(function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.inner(x)
        return found


def traced(function: Made) -> Program:
    return trace_model(lambda: (Outer(function), (torch.zeros(8, 4),)), loss=lambda model, x: model(*x).sum())


def line_of(function: Callable[..., object]) -> str:
    """Return the only line of a function, as messages have it."""
    return f"{__file__}:{function.__code__.co_firstlineno + 1}"


def _branches(x: torch.Tensor) -> torch.Tensor:
    return x * 2 if x.sum() > 0 else x


def _counts(x: torch.Tensor) -> torch.Tensor:
    return x * x.abs().sum().item()


def _chooses(x: torch.Tensor) -> torch.Tensor:
    return x[x > 0]


def _finds(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[(x.flatten() > 0).nonzero()[:, 0]]


def _selects(x: torch.Tensor) -> torch.Tensor:
    return x.masked_select(x > 0)


def _lists(x: torch.Tensor) -> torch.Tensor:
    return x * float(x.tolist()[0][0])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (_branches, "assumed True at 'inner' (aten::_local_scalar_dense, {})"),
        (_counts, "assumed 1.0 at 'inner' (aten::_local_scalar_dense, {})"),
        (_chooses, "assumed all chosen by a mask at 'inner' (aten::index.Tensor, {})"),
        (_finds, "assumed as many as there can be at 'inner' (aten::nonzero, {})"),
        (_selects, "assumed as many as there can be at 'inner' (aten::masked_select, {})"),
        (_lists, "assumed that tolist() returns ones at {}"),
    ],
)
def test_what_a_model_asks_of_values_is_assumed_and_noted_once(function: Made, said: str) -> None:
    def twice(x: torch.Tensor) -> torch.Tensor:
        function(x)
        return x + function(x).sum()

    noted = [each for each in traced(twice).assumptions if "optimizer" not in each]
    assert noted == [said.format(line_of(function))]


def test_what_is_chosen_by_a_mask_is_taken_to_be_all() -> None:
    most = {each.nbytes for each in traced(lambda x: x[x > 0].exp()).data.values() if "exp" in each.operator}
    assert most == {8 * 4 * 4}


def _repeats(x: torch.Tensor) -> torch.Tensor:
    return torch.repeat_interleave(x, x[:, 0].long(), dim=0)


def _bins(x: torch.Tensor) -> torch.Tensor:
    return x * torch.bincount(x.flatten().long())[0]


@pytest.mark.parametrize(
    ("function", "operator"), [(_repeats, "aten::repeat_interleave.Tensor"), (_bins, "aten::bincount")]
)
def test_a_size_that_depends_on_values_is_refused_with_its_place(function: Made, operator: str) -> None:
    with pytest.raises(UsageError) as caught:
        traced(function)
    text = str(caught.value)
    assert text.startswith(f"{operator} cannot be traced at 'inner' ({operator}, {line_of(function)})")
    assert "depends on values" in text


def _divides(x: torch.Tensor) -> torch.Tensor:
    return x / (1 // 0)


def _multiplies(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.zeros(3, 3)


def _leaves(x: torch.Tensor) -> torch.Tensor:
    return x * torch.from_numpy(x.detach().numpy())


@pytest.mark.parametrize(
    ("function", "kind", "text"),
    [
        (_divides, "ZeroDivisionError", "by zero"),
        (_multiplies, "RuntimeError", "reduction dim"),
        (_leaves, "TypeError", "numpy"),
    ],
)
def test_what_a_forward_raises_is_told_in_one_line_with_its_place(
    function: Made, kind: str, text: str
) -> None:
    with pytest.raises(UsageError) as caught:
        traced(function)
    said = str(caught.value)
    assert said.startswith(f"the model's forward raised {kind} at {line_of(function)}: ")
    assert text in said
    assert "\n" not in said
    assert type(caught.value.__cause__).__name__ == kind


def _broken() -> nn.Module:
    raise KeyError("of two\nlines")


def test_what_building_raises_is_told_in_one_line_with_its_place() -> None:
    with pytest.raises(UsageError) as caught:
        trace_model(_broken)
    said = str(caught.value)
    assert said.startswith(f"_broken() raised KeyError at {line_of(_broken)}: ")
    assert "\n" not in said


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        del ctx
        return x.clone()

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("in backward")


def test_what_backward_raises_is_told() -> None:
    with pytest.raises(
        UsageError, match=r"the model's backward raised ArithmeticError at .*test_tracing_bad"
    ):
        traced(_Backward.apply)


def test_what_an_optimizer_raises_is_told() -> None:
    def build() -> object:
        model = nn.Linear(4, 4)
        return model, (torch.zeros(2, 4),), torch.optim.LBFGS(model.parameters())

    with pytest.raises(UsageError, match=r"the step of LBFGS raised TypeError.*closure"):
        trace_model(build)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("built", "said"),
    [
        (5, "it returned int; accepted: a model"),
        ((nn.Identity(), (), (), ()), "it returned (Identity, tuple, tuple, tuple); accepted"),
        ((nn.Identity(), 5), "the inputs are int"),
        ((nn.Identity(), (), 5), "an optimizer is a int"),
        (nn.LazyLinear(3), "LazyLinear has parameters without a size"),
        (nn.Conv2d(3, 3, 3), "what Conv2d is given cannot be told from it"),
        (nn.Identity(), "what Identity is given cannot be told from it"),
        ((nn.Identity(), torch.zeros(3)), "no loss of Identity depends on a parameter"),
        ((nn.Linear(3, 3).requires_grad_(requires_grad=False), torch.zeros(3)), "no loss of Linear depends"),
    ],
)
def test_what_cannot_be_a_model_is_refused(built: object, said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        trace_model(lambda: built)  # type: ignore[arg-type,return-value]


def test_a_model_elsewhere_with_an_optimizer_is_refused() -> None:
    def build() -> object:
        model = nn.Linear(4, 4, device="cpu")
        return model, (torch.zeros(2, 4),), torch.optim.SGD(model.parameters())

    with pytest.raises(UsageError, match="not on the meta device"):
        trace_model(build)  # type: ignore[arg-type]


def test_a_model_elsewhere_is_moved() -> None:
    program = trace_model(lambda: (nn.Linear(4, 4, device="cpu"), torch.zeros(2, 4, device="cpu")))
    assert program.data["param/weight"].nbytes == 4 * 4 * 4 + 64


@pytest.mark.parametrize("given", [{"batch": 0}, {"sequence": 0}, {"accumulations": -1}])
def test_counts_below_one_are_refused(given: dict[str, int]) -> None:
    with pytest.raises(UsageError, match="at least 1"):
        trace_model(mlp, **given)  # type: ignore[arg-type]


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(UsageError, match="layers='nowhere'"):
        trace_model(mlp, layers="nowhere")


def test_nothing_is_left_on_a_model_that_was_given() -> None:
    model = nn.Linear(4, 4, device="meta")
    trace_model(lambda: (model, torch.zeros(2, 4)))
    assert all(each.grad is None for each in model.parameters())
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert not list(filter(None, (each._post_accumulate_grad_hooks for each in model.parameters())))
