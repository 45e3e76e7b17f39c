"""The runs that are open, by their models; and ``offload(...)`` of a model that has one: a cell runs again.

The new call takes the place of the run that is there where nothing is lost by that: its state becomes
ordinary tensors, which the new run takes over as they are.  Where something would be, the call is refused,
and the message says by name what has the model and what to do.
"""

from __future__ import annotations

import logging
import weakref
from typing import Protocol

from torch import nn

from tierstore.callers import opener
from tierstore.errors import UsageError
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.given import Together
from tierstore.training.optimizers.step_units import runs_of_step
from tierstore.training.session import Session

_ACTIVATIONS = "activation/"

log = logging.getLogger("tierstore")


class OpenRun(Protocol):
    """An open run, as this module sees it.

    Attributes:
        opened_by: which call made it.
        is_entered: whether its ``with`` block is under way.
    """

    opened_by: str
    is_entered: bool

    def close(self, restore: bool | None = None) -> None:
        """End it; ``restore``: everything is brought back, or nothing is."""
        ...


_open: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[OpenRun], weakref.ref[Session]]]
_open = weakref.WeakKeyDictionary()


class NotedRun:
    """Notes that a model has a run, until this is removed; keeps the run, so that it can be closed.

    Args:
        model: that is offloaded.
        run: by which.
        session: the run's, which is to keep this.
    """

    def __init__(self, model: nn.Module, run: OpenRun, session: Session) -> None:
        self._models = weakref.WeakSet(_each(model))
        self._run = run
        for each in self._models:
            _open[each] = weakref.ref(run), weakref.ref(session)

    def remove(self) -> None:
        """Forget it: the run has ended."""
        for model in tuple(self._models):
            _open.pop(model, None)


def _each(model: nn.Module) -> tuple[nn.Module, ...]:
    """Return the model, and those that it stands for."""
    return (model, *model.children()) if isinstance(model, Together) else (model,)


def make_way(model: nn.Module) -> None:
    """Close the runs that a model has, if it has any, for another to take their place.

    Raises:
        UsageError: something would be lost, or is under way.
        TierStoreError: closing it failed.
    """
    for each in _each(model):
        if each in _open:
            _close_for_another(_open[each])


def _close_for_another(references: tuple[weakref.ref[OpenRun], weakref.ref[Session]]) -> None:
    run, session = references[0](), references[1]()
    if run is None or session is None:
        return
    reason = _why_not(run, session)
    if reason:
        raise UsageError(
            f"the model is offloaded already: {run.opened_by}, did so, and that run cannot be replaced, for "
            f"{reason}. Call run.close() on what that call returned, and then this again."
        )
    log.warning(
        "the run that %s, opened was closed: %s, takes its place", run.opened_by, opener() or "another call"
    )
    run.close(restore=True)


def _why_not(run: OpenRun, session: Session) -> str:
    """Say what stands in the way of closing a run for another; empty: nothing."""
    session.sweep_activations()
    shortage = session.leaving.shortage()
    waits = any(key.startswith(_ACTIVATIONS) for key in session.store)
    reasons = {
        "its with block has not ended": run.is_entered,
        "it is durable, and what was trained since its last checkpoint would be taken back to it": (
            session.durable is not None
        ),
        "the model, a backward pass or a step is under way": not session.windows.is_outermost
        or is_in_backward()
        or any(map(runs_of_step, session.optimizers)),
        "swapped activations wait for backward": waits,
        f"it does not fit into memory: {shortage}": shortage is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), "")
