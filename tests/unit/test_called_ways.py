"""Calls of a module that take unlike much are told apart, and those that differ in numbers are not."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import nn

from tierstore.training.budgets.called_ways import MOST_WAYS, CalledWays


class Task(enum.Enum):
    """A switch."""

    ENCODE = enum.auto()
    JUDGE = enum.auto()


X, LONGER = torch.ones(2), torch.ones(3, 2)

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


def call(*args: Any, **kwargs: Any) -> Call:  # noqa: ANN401 - as a module's are
    """Return a call."""
    return args, kwargs


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(X), call(LONGER)),
        (call(X, 1), call(X, 7)),
        (call(X, cache=[X, X]), call(X, cache=[X, X, LONGER])),
        (call(X, cache={"a": X, "b": 1}), call(X, cache={"b": 2, "a": LONGER})),
        (call(X, scale=0.5), call(X, scale=2.0)),
        (call(X, object()), call(X, object())),
        (call(X, [1, 2]), call(X, [3])),
    ],
)
def test_sizes_and_numbers_make_no_other_way(one: Call, other: Call) -> None:
    ways, module = CalledWays("cpu"), nn.Identity()
    assert ways.way_of(module, *one) == ways.way_of(module, *other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (call(X, wide=True), call(X, wide=False)),
        (call(X, wide=False), call(X)),
        (call(X, labels=X), call(X, masks=X)),
        (call(X, None), call(X, X)),
        (call(X), call(X.double())),
        (call(X, task=Task.ENCODE), call(X, task=Task.JUDGE)),
        (call(X, task="encode"), call(X, task="judge")),
        (call({"a": X}), call({"a": X, "b": X})),
        (call({"a": X}), call(MappingProxyType({"a": X}))),
        (call([X]), call([X, None])),
        (call([X, [True]]), call([X, [False]])),
    ],
)
def test_switches_and_what_is_given_make_another_way(one: Call, other: Call) -> None:
    ways, module = CalledWays("cpu"), nn.Identity()
    assert ways.way_of(module, *one) != ways.way_of(module, *other)


def test_the_mode_makes_another_way() -> None:
    ways, module = CalledWays("cpu"), nn.Identity()
    found = [ways.way_of(module.train(), (X,), {}), ways.way_of(module.eval(), (X,), {})]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(ways.way_of(module, (X,), {}))
    assert len(set(found)) == len(found)


def test_each_module_is_called_in_its_own_ways() -> None:
    ways = CalledWays("cpu")
    assert ways.way_of(nn.Identity(), (X,), {}) != ways.way_of(nn.Identity(), (X,), {})


def test_of_many_ways_the_last_are_one() -> None:
    """Texts are given, each another one: whatever is learned of the first of them has to end."""
    ways, module = CalledWays("cpu"), nn.Identity()
    found = [ways.way_of(module, (X, f"text {number}"), {}) for number in range(4 * MOST_WAYS)]
    assert len(set(found)) == MOST_WAYS + 1
    assert found[0] == ways.way_of(module, (X, "text 0"), {})
    assert ways.way_of(nn.Identity(), (X, "text"), {})[1] is not None  # type: ignore[index]


@pytest.mark.parametrize("is_returned", [False, True])
def test_what_a_module_has_made_is_no_input_to_itself_and_one_to_others(*, is_returned: bool) -> None:
    ways, module, other = CalledWays("cpu"), nn.Identity(), nn.Identity()
    memory = [torch.ones(5)]
    assert ways.elements_of(module, [X, memory]) == 7
    memory[0] = made = torch.ones(9)
    ways.note_made(made if is_returned else None)
    assert ways.elements_of(module, [X, memory]) == 2
    ways.forget_call()
    assert ways.elements_of(module, [X, made.view(3, 3), torch.ones(4)]) == 6
    assert ways.elements_of(other, [X, memory]) == 11
    ways.note_made(X)  # it was given: what is larger next time is a larger input
    assert ways.elements_of(other, [X]) == 2


def test_of_steps_nothing_is_kept() -> None:
    ways, module = CalledWays("cpu"), nn.Identity()
    batch = torch.ones(7)
    gone = weakref.ref(batch)
    ways.elements_of(module, [batch])
    ways.forget_call()
    del batch
    assert gone() is None
