"""Who watches the operators of a thread, and what is left in force, whoever else has modes there."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.training import recompute
from tierstore.training.activations.runtime.operator_mode import WatchedOperators


class Others(TorchDispatchMode):
    """A mode of the program."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - torch's own
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run the operator."""
        return func(*args, **(kwargs or {}))


class Watcher:
    """Counts what it is told of."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, bool]] = []

    def before(self, func: Any, args: object, kwargs: object) -> object:  # noqa: ANN401 - torch's own
        """Note an operator."""
        return func.overloadpacket.__name__

    def after(self, noted: str, func: object, args: object, kwargs: object, result: object) -> None:
        """Note its end."""
        self.seen.append((noted, isinstance(result, torch.Tensor)))


def _modes() -> int:
    return int(torch._C._len_torch_dispatch_stack())


class WatchedOperatorsMachine(RuleBasedStateMachine):
    """Whoever watches sees every operator; where nobody does, nothing is in force."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = WatchedOperators()
        self.watching: list[Watcher] = []
        self.others: list[Others] = []
        self.expected: dict[Watcher, int] = {}

    @rule()
    def begin(self) -> None:
        watcher = Watcher()
        self.watching.append(watcher)
        self.expected[watcher] = 0
        self.operators.begin(watcher)

    @precondition(lambda self: self.watching)
    @rule(is_first=st.booleans())
    def end(self, is_first: bool) -> None:
        self.operators.end(self.watching.pop(0 if is_first else -1))

    @rule()
    def others_begin(self) -> None:
        self.others.append(Others())
        self.others[-1].__enter__()  # type: ignore[no-untyped-call]

    @precondition(lambda self: self.others and self.others[-1] is _last_mode())
    @rule()
    def others_end(self) -> None:
        self.others.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.operators.settle()

    @rule()
    def run(self) -> None:
        torch.ones(2).exp()
        self.expected.update({each: self.expected[each] + 1 for each in self.watching})

    @rule()
    def run_unwatched(self) -> None:
        with self.operators.unwatched():
            torch.ones(2).exp()

    @invariant()
    def nothing_is_in_force_for_nobody(self) -> None:
        if not self.others:
            assert _modes() == bool(self.watching)

    @invariant()
    def whoever_watches_has_seen_all(self) -> None:
        assert {each: each.seen.count(("exp", True)) for each in self.expected} == self.expected

    def teardown(self) -> None:
        for each in self.watching:
            self.operators.end(each)
        while self.others:
            self.others_end()
        assert _modes() == 0


TestWatchedOperators = WatchedOperatorsMachine.TestCase
TestWatchedOperators.settings = settings(stateful_step_count=30)


def _last_mode() -> object:
    last: object = torch.utils._python_dispatch._get_current_dispatch_mode()
    return last


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_mode_that_a_module_leaves_in_force_is_not_taken_away_in_place_of_ours(
    error: type[BaseException],
) -> None:
    mode = Others()

    class Entering(torch.nn.Module):
        """A layer that brings a mode into force, and fails."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Fail."""
            self.linear(x).tanh()
            mode.__enter__()  # type: ignore[no-untyped-call]
            raise error

    model = torch.nn.Sequential(Entering(), Entering())
    with recompute(model, {"select_recompute": [r"aten\.tanh"]}, layers=""):
        with contextlib.suppress(error):
            model(torch.ones(2, 4))
        assert _last_mode() is mode
        mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
    assert _modes() == 0
