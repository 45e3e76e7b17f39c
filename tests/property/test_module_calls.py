"""What is open for the calls of modules, whatever ends them, against what Python itself says is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from tierstore.training.activations.runtime.module_calls import CallStack, hook_around, hook_inside

ENDS = (None, None, None, ValueError, KeyboardInterrupt, SystemExit)


@dataclass(frozen=True)
class Call:
    """What is open for a call of a module."""

    node: Node


class Journal:
    """Opens a `Call` for each call of a module, and compares what is open with what runs."""

    def __init__(self) -> None:
        self.calls = CallStack()
        self.running: list[Node] = []
        self.opened: list[Call] = []
        self.left: list[Call] = []
        self.discarded: list[Call] = []

    def enter(self, node: Any, *_: object) -> None:  # noqa: ANN401 - a hook's
        """Open a call."""
        self.calls.discard_interrupted()
        call = Call(node)
        self.opened.append(call)
        self.calls.begin(node, call, lambda: self.discarded.append(call))

    def leave(self, node: Any, *_: object) -> None:  # noqa: ANN401 - a hook's
        """Close a call that was not interrupted."""
        call = self.calls.end(node, Call)
        assert call is not None
        self.left.append(call)

    def look(self) -> None:
        """Compare what is open with what runs."""
        assert self.calls.last(Call) == Call(self.running[-1])


class Node(nn.Module):
    """A module that runs others, is ended by an exception, or catches those of others.

    Args:
        parts: that it runs in order, each as often as it is there.
        end: what ends it, after the others.
        catches: whether it goes on after what has ended another.
    """

    journal: Journal

    def __init__(self, parts: Sequence[Node], end: type[BaseException] | None, catches: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.end, self.catches = end, catches

    def forward(self, x: Tensor) -> Tensor:
        """Run the parts, and look who runs in between."""
        self.journal.running.append(self)
        try:
            for part in self.parts:
                self.journal.look()
                with contextlib.suppress(BaseException) if self.catches else contextlib.nullcontext():
                    x = part(x)
            self.journal.look()
            if self.end is not None:
                raise self.end
        finally:
            self.journal.running.pop()
        return x


def _shared(nodes: list[Node]) -> list[Node]:
    return nodes + nodes[:1]  # one that is run twice


trees = st.recursive(
    st.builds(Node, st.just([]), st.sampled_from(ENDS), st.booleans()),
    lambda parts: st.builds(
        Node, st.lists(parts, max_size=3).map(_shared), st.sampled_from(ENDS), st.booleans()
    ),
    max_leaves=8,
)


@pytest.mark.parametrize("hook", [hook_around, hook_inside])
@given(tree=trees)
def test_what_is_open_is_what_runs_and_what_was_interrupted_is_discarded(
    hook: Callable[..., Any], tree: Node
) -> None:
    journal = Journal()
    nodes = [each for each in tree.modules() if isinstance(each, Node)]
    for node in nodes:
        node.journal = journal
        hook(node, journal.enter, journal.leave)
    for _ in range(2):
        with contextlib.suppress(ValueError, KeyboardInterrupt, SystemExit):
            tree(torch.zeros(1))
        assert journal.calls.last(Call) is None
    ended = [*journal.left, *journal.discarded]
    assert sorted(map(id, journal.opened)) == sorted(map(id, ended))
    if not any(issubclass(node.end or ValueError, (KeyboardInterrupt, SystemExit)) for node in nodes):
        assert not journal.discarded
