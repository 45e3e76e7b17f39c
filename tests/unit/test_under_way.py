"""Steps that are under way are a thread's own, and none outlives its thread."""

from __future__ import annotations

import threading
from typing import cast

import torch

from tierstore.training.optimizers.step_units import Steps
from tierstore.training.optimizers.steps_under_way import UnderWay

TIMEOUT_S = 60


class Begun:
    """The steps of one optimizer, none of which runs any more."""

    def __init__(self) -> None:
        self.optimizer = torch.optim.SGD([torch.zeros(1)])
        self.is_abandoned = False

    def abandon(self) -> None:
        self.is_abandoned = True


def test_a_step_that_has_ended_is_under_way_no_more() -> None:
    under_way, outer, inner = UnderWay(), cast("Steps", Begun()), cast("Steps", Begun())
    under_way.begin(outer)
    under_way.begin(inner)
    assert list(under_way.here) == [outer, inner]
    under_way.end(inner)
    assert list(under_way.here) == [outer]
    under_way.end(outer)
    assert not under_way.here


def test_a_step_that_an_exception_has_ended_is_let_go_in_its_own_thread() -> None:
    under_way, begun = UnderWay(), Begun()
    under_way.begin(cast("Steps", begun))
    under_way.end_interrupted()
    assert begun.is_abandoned
    assert not under_way.here


def test_another_thread_lets_go_of_a_step_when_its_thread_has_ended_and_not_before() -> None:
    under_way, begun = UnderWay(), Begun()
    is_begun, may_end = threading.Event(), threading.Event()

    def step() -> None:
        under_way.begin(cast("Steps", begun))
        is_begun.set()
        assert may_end.wait(TIMEOUT_S)

    thread = threading.Thread(target=step)
    thread.start()
    assert is_begun.wait(TIMEOUT_S)
    assert not under_way.here
    under_way.end_interrupted()
    was_abandoned = begun.is_abandoned
    may_end.set()
    thread.join(TIMEOUT_S)
    under_way.end_interrupted()
    assert (was_abandoned, begun.is_abandoned) == (False, True)
