"""When bytes begin to come back: so many nodes of the backward graph before their first use.

Backward runs the nodes that it has reached in descending order of their sequence numbers, and a node's number
is higher than those of all nodes that it leads to.  So the order of a graph is known as soon as it is made,
without running it.

1. What is counted are nodes that the walked outputs lead to, other than those that accumulate gradients.
2. A trigger is a pre-hook on the node that runs so many nodes before the first consumer.  Where that node is
   not made yet, the next walk finds it.  What lies beyond the last output is told by `Triggers.end`.
3. A consumer that no output leads to gets no trigger: its bytes come when they are asked for.
4. Nothing here keeps a node, or the bytes.

A guess that is wrong costs time, never correctness.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from tierstore.torch_private import next_sequence_number
from tierstore.training.activations.swapping.activation_store import WeakOffloadedTensor

_ACCUMULATES = 2**63
"""From here on a sequence number says that the node accumulates a gradient: it runs at once."""


def last_number() -> int:
    """Return the sequence number of the node that this thread made last."""
    return next_sequence_number() - 1


@dataclass(slots=True)
class _Use:
    """Some bytes, and the node that uses them first in backward.

    Attributes:
        offloaded: the bytes.
        consumer: the node's number.
        ahead: how many nodes before it they are to come.
        beyond: how many nodes of the next walk run after the trigger; ``None``: the consumer was not
            walked over yet.
    """

    offloaded: WeakOffloadedTensor
    consumer: int
    ahead: int
    beyond: int | None = None


class Triggers:
    """The triggers of one forward pass, in the thread that makes it.

    Attributes:
        made: how many there are.
    """

    def __init__(self) -> None:
        self.made = 0
        self._known = last_number()  # the nodes up to this number have been walked over
        self._waiting: dict[
            str, _Use
        ] = {}  # by key: of several uses the last one made is the first in backward

    def expect(self, offloaded: WeakOffloadedTensor, ahead: int) -> None:
        """The node that this thread made last uses some bytes; let them come ``ahead`` nodes before."""
        self._waiting[offloaded.key] = _Use(offloaded, last_number(), ahead)

    def walk(self, outputs: Iterable[torch.Tensor]) -> dict[int, Node]:
        """Make the triggers that lie in what leads to ``outputs``; return those nodes by number."""
        nodes = _nodes_above(self._known, outputs) if self._waiting else {}
        self._known = last_number()
        order = sorted(nodes)
        due: dict[int, list[WeakOffloadedTensor]] = {}
        for key, use in list(self._waiting.items()):
            place = _place(use, order)
            if place is None:
                del self._waiting[key]
            elif place < len(order):
                del self._waiting[key]
                due.setdefault(order[place], []).append(use.offloaded)
            else:
                use.beyond = place - len(order)
        for number, offloaded in due.items():
            self._hook(nodes[number], offloaded)
        return nodes

    def end(self, outputs: Iterable[torch.Tensor]) -> set[str]:
        """Walk over the rest; return the keys that are wanted before backward could tell.

        Those of them that have left the device come when backward reaches the first output.
        """
        nodes = self.walk(outputs)
        near = [use.offloaded for use in self._waiting.values()]
        gone = [offloaded for offloaded in near if not offloaded.is_here]
        if gone and nodes:
            self._hook(nodes[max(nodes)], gone)
        self._waiting.clear()
        return {offloaded.key for offloaded in near}

    def _hook(self, node: Node, offloaded: list[WeakOffloadedTensor]) -> None:
        self.made += len(offloaded)

        def bring(_: object) -> None:
            for each in offloaded:
                each.bring()

        node.register_prehook(bring)


def _place(use: _Use, order: list[int]) -> int | None:
    """Return where in ``order`` the trigger lies, or how far beyond; ``None``: the consumer leads nowhere."""
    if use.beyond is not None:
        return use.beyond
    index = bisect.bisect_left(order, use.consumer)
    if index == len(order) or order[index] != use.consumer:
        return None
    return index + use.ahead


def _nodes_above(number: int, outputs: Iterable[torch.Tensor]) -> dict[int, Node]:
    """Return the nodes that lead to ``outputs`` and were made after the node ``number``."""
    found: dict[int, Node] = {}
    left = [output.grad_fn for output in outputs]
    while left:
        node = left.pop()
        if node is None:
            continue
        own: int = node._sequence_nr()  # noqa: SLF001
        if number < own < _ACCUMULATES and own not in found:
            found[own] = node
            left += [after for after, _ in node.next_functions]
    return found
