"""What a run that was released has left with optimizers and gradients, when its model is offloaded again.

1. Training that goes on from a checkpoint has its state: what optimizers have of a released run is let go,
   and so are released gradients, which are no part of a checkpoint.
2. Training that does not cannot step with state that is not there: that is refused by name.
3. If the run does not open after all, everything is as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.training.autograd.gradient import native_gradient, set_native_gradient
from tierstore.training.bundles.placeholders import Placeholder, placeholder_of

Optimizers = Sequence[torch.optim.Optimizer]


@contextlib.contextmanager
def let_go(model: nn.Module, optimizers: Optimizers, *, is_resumed: bool) -> Iterator[None]:
    """Let go of what a released run has left; give it back if the context is left by an exception.

    Args:
        model: that is offloaded again.
        optimizers: that train it.
        is_resumed: whether it goes on from a checkpoint.

    Raises:
        UsageError: it does not, and an optimizer has state that was released.
    """
    if not is_resumed:
        _refuse_released_state(optimizers)
        yield
        return
    former = [(optimizer, dict(optimizer.state)) for optimizer in optimizers]
    gradients = [(p, g) for p in model.parameters() if (g := _released_gradient(p)) is not None]
    try:
        for optimizer, state in former:
            for parameter in [each for each, entries in state.items() if _released_in(entries) is not None]:
                del optimizer.state[parameter]
        for parameter, _ in gradients:
            set_native_gradient(parameter, None)
        yield
    except BaseException:
        for optimizer, state in former:
            optimizer.state.clear()
            optimizer.state.update(state)
        for parameter, gradient in gradients:
            set_native_gradient(parameter, gradient)
        raise


def _released_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    gradient = native_gradient(parameter)
    return gradient if gradient is not None and placeholder_of(gradient) is not None else None


def _released_in(entries: object) -> Placeholder | None:
    """Return what is known of the first entry of a parameter's state that was released."""
    for value in entries.values() if isinstance(entries, dict) else ():
        if isinstance(value, torch.Tensor) and (own := placeholder_of(value)) is not None:
            return own
    return None


def _refuse_released_state(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        for entries in optimizer.state.values():
            if (own := _released_in(entries)) is not None:
                raise UsageError(
                    f"{type(optimizer).__name__} has state without values: {own.text} Or begin with a new "
                    "optimizer.",
                    key=own.name,
                )
