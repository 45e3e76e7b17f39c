"""Which optimizers treat each parameter by itself, so that they can be stepped a bundle at a time.

1. Those of ``torch.optim`` do, but for ``LBFGS``: exactly these classes, with the ``step`` that PyTorch gave
   them.  ``Adafactor`` does not where a group has parameters of several types and no ``eps`` of its own: it
   takes that of the first one's type for all.
2. So does what users register.  A subclass is not covered by its base's registration: it may do more in its
   ``step``.  Ours (`tierstore.optim`) are as PyTorch's.
3. Any other runs its own ``step`` once, as it is (`tierstore.training.optimizers.whole_steps`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam

Step = Callable[..., object]
Optimizer = torch.optim.Optimizer

_NAMES = (
    "ASGD",
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Muon",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
    "SparseAdam",
)


def unhooked_step(kind: type[Optimizer]) -> Step:
    """Return the ``step`` of a class without what PyTorch puts around it to call hooks."""
    step: Step = kind.step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    return step


_kinds: list[type[Optimizer]] = [
    *(kind for name in _NAMES if (kind := getattr(torch.optim, name, None)) is not None),
    *(FTRL, SGD, Adagrad, LazyAdam, SparseAdam),
]
_steps: dict[type[Optimizer], Step] = {kind: unhooked_step(kind) for kind in _kinds}
"""PyTorch's and ours, each with its ``step`` as it was at first: whoever replaces that may do more."""

_registered: dict[type[Optimizer], bool] = {}


def register_optimizer(cls: type[Optimizer], per_parameter: bool = True) -> None:
    """Let the optimizers of a class be stepped a bundle at a time: they treat each parameter by itself.

    That is fastest, and needs no more at once than one bundle's parameters, gradients and state.  It is right
    if ``step`` gives the same bits when it is called with few parameters at a time as when it is called with
    all of them: nothing in it depends on other parameters, on how often it is called, or on the order of
    random numbers.  A closure is called once, before all steps.

    It may be called again, before or after optimizers are made; what is offloaded already stays as it is.

    Args:
        cls: a subclass of ``torch.optim.Optimizer``; its own subclasses are not covered.
        per_parameter: ``False``: they run their own ``step`` once, as those of unknown classes do.

    Raises:
        UsageError: ``cls`` is no class of optimizers.
    """
    given: object = cls
    if not (isinstance(given, type) and issubclass(given, Optimizer)):
        raise UsageError(
            f"register_optimizer({cls!r:.80}): it takes a class, a subclass of torch.optim.Optimizer."
        )
    _registered[cls] = bool(per_parameter)


def is_known(optimizer: Optimizer) -> bool:
    """Whether it is PyTorch's or ours, treats each parameter by itself, and is as it was made."""
    kind = type(optimizer)
    is_as_made = kind in _steps and _steps[kind] is unhooked_step(kind)
    return is_as_made and not any(map(_takes_eps_of_the_first, optimizer.param_groups))


def _takes_eps_of_the_first(group: dict[str, Any]) -> bool:
    """Whether a group, ``Adafactor``'s as no other has two, has several types and leaves ``eps`` to them."""
    eps = group.get("eps")
    return (
        isinstance(eps, tuple | list)
        and eps[0] is None
        and len({parameter.dtype for parameter in group["params"]}) > 1
    )


def has_come_to_depend(optimizer: Optimizer) -> bool:
    """Whether parameters that are pointed at another type now are no longer treated each by itself."""
    return type(optimizer) not in _registered and any(map(_takes_eps_of_the_first, optimizer.param_groups))


def is_per_parameter(optimizer: Optimizer) -> bool:
    """Whether an optimizer may be stepped a bundle at a time."""
    return _registered.get(type(optimizer), is_known(optimizer))
