"""When gradients go: around each accumulation of each backward pass.

A gradient is autograd's own from before its accumulation node runs until that node and every hook behind
it are done (`tierstore.training.autograd.gradients`).

1. A hook on the parameter is called before the node runs: the gradient is lent.
2. It is taken when the node is provably done: at the pass's next accumulation or next use of a saved tensor
   in the same thread, when another node runs there; at the latest when the pass ends, however it ends.
   So one gradient more than are worked on waits at a time, in each thread of a pass.
3. A backward pass inside another one, in a hook, is a pass of its own: it says nothing of the outer one.
4. A pass ends when what it was asked to call at its end is called, after what others asked for meanwhile,
   or is forgotten: PyTorch drops it when an error ends the pass.  Then the next use of the model takes
   what is left.

Safe from any thread: autograd runs backward in threads of its own.
"""

from __future__ import annotations

import enum
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple, Protocol

import torch

from tierstore.torch_private import call_after_backward, current_autograd_node, current_graph_task
from tierstore.training.autograd.gradient import Gradient
from tierstore.training.pytorch.function_modes import out_of_sight


def is_in_backward() -> bool:
    """Whether this thread runs a backward pass, as in a hook that autograd has called."""
    return current_graph_task() >= 0


class PassEnd(enum.Enum):
    """How a backward pass is over."""

    COMPLETE = enum.auto()
    INTERRUPTED = enum.auto()  # by an error


class Keeper(Protocol):
    """Who gives autograd gradients, and takes them."""

    @property
    def counts_passes(self) -> bool:
        """Whether it matters how a pass ends that nothing was lent to."""
        ...

    def begin_pass(self) -> None:
        """A backward pass begins to use the model."""
        ...

    def go_on(self) -> None:
        """Autograd goes on to something else than the next accumulation."""
        ...

    def lend(self, parameter: torch.Tensor) -> Gradient | None:
        """Autograd is about to add to a gradient; return the one that `take` is due for when it is done."""
        ...

    def take(self, gradient: Gradient) -> None:
        """A pass that `lend` was for is done with a gradient."""
        ...


class _GradientInAutograd(NamedTuple):
    """A gradient that autograd works on."""

    gradient: Gradient
    node: object  # that accumulates it


class _PassEndHook:
    """What autograd calls when a pass ends, and drops however it ends.

    Args:
        end: to be called once all is done that was asked for during the pass.
    """

    __slots__ = ("__weakref__", "_end", "_is_last")

    def __init__(self, end: Callable[[], None]) -> None:
        self._end = end
        self._is_last = False

    def __call__(self) -> None:
        if self._is_last:
            with out_of_sight():
                self._end()
        else:
            self._is_last = True
            self.ask_for()

    def ask_for(self) -> None:
        """Let autograd call this at the end of the pass that runs now, after what it was asked for before."""
        call_after_backward(self)


class _Pass(NamedTuple):
    """A backward pass that runs, or was interrupted."""

    flights: dict[int, _GradientInAutograd]  # by thread
    ending: weakref.ref[_PassEndHook]


class Accumulation:
    """Lends gradients to autograd and takes them again.

    Args:
        keeper: of the model's gradients.
        begin: called before an accumulation.
        landed: told of every gradient that was taken.
        ended: called when a pass is over, when all are taken; told how.
    """

    def __init__(
        self,
        keeper: Keeper,
        begin: Callable[[], None],
        landed: Callable[[torch.Tensor], None],
        ended: Callable[[PassEnd], None],
    ) -> None:
        self._keeper = keeper
        self._begin = begin
        self._landed = landed
        self._ended = ended
        self._passes: dict[int, _Pass] = {}  # each step on it is atomic, and each flight is one thread's

    def lend(self, parameter: torch.Tensor) -> None:
        """A parameter's gradient is about to be accumulated.  Called by autograd, in its thread."""
        self._settle()
        self._begin()
        gradient = self._keeper.lend(parameter)
        if gradient is not None:
            number = current_graph_task()
            found = self._passes.get(number) or self._open(number)
            found.flights[threading.get_ident()] = _GradientInAutograd(gradient, current_autograd_node())

    def _open(self, number: int) -> _Pass:
        self._keeper.begin_pass()
        ending = _PassEndHook(lambda: self._end(number, PassEnd.COMPLETE))
        ending.ask_for()
        # Another thread of the pass may have been faster: either ending is as good.
        return self._passes.setdefault(number, _Pass({}, weakref.ref(ending)))

    def settle(self) -> None:
        """Take every gradient that autograd is known to be done with, as it does something else now.

        Raises:
            CapacityError: there is no room for one in the store; it stays autograd's.
        """
        self._keeper.go_on()
        self._settle()

    def _settle(self) -> None:
        if self._keeper.counts_passes and is_in_backward() and current_graph_task() not in self._passes:
            self._open(current_graph_task())
        if not self._passes:
            return
        current, thread = current_graph_task(), threading.get_ident()
        for number, each in list(self._passes.items()):
            if each.ending() is None:
                self._end(number, PassEnd.INTERRUPTED)
            elif number == current:
                flight = each.flights.get(thread)
                if flight is not None and flight.node is not current_autograd_node():
                    del each.flights[thread]
                    self._take(flight)

    @property
    def is_under_way(self) -> bool:
        """Whether a pass runs that has begun to use the model."""
        return any(each.ending() is not None for each in self._passes.values())

    def _end(self, number: int, how: PassEnd) -> None:
        found = self._passes.pop(number, None)
        if found is None:
            return
        with ExitStack() as stack:  # one that fails keeps no other from being taken
            stack.callback(self._ended, how)
            for flight in found.flights.values():
                stack.callback(self._take, flight)

    def _take(self, flight: _GradientInAutograd) -> None:
        self._keeper.take(flight.gradient)
        self._landed(flight.gradient.parameter)
