"""Whether an optimizer refuses a step in its midst: known before the first bundle is stepped.

Optimizers that treat each parameter by itself may refuse some: those with sparse gradients or with dense
ones, complex and empty ones.  They raise when they come to one, or to its group.  A bundle at a time that
would be after other parameters than in plain PyTorch, so such a step is left to the optimizer as a whole.

1. The optimizer is asked itself: a double of it steps a stand-in of one element, or of none, for each kind of
   parameter that is unusual, with the options of its group.
2. Only those of ``torch.optim`` are asked.  What users register is not run on trial.
3. So is a step with a gradient that has no dense dimensions: only guards see it added (`sparse_adds`).

Knows nothing of bundles.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import NamedTuple

import torch

from tierstore.training.ahead import Entries, step_alone
from tierstore.training.binding import natively
from tierstore.training.grads import Gradients
from tierstore.training.known import is_of_torch
from tierstore.training.own_work import ordinary_mode
from tierstore.training.turns import Group, options_of

_USUAL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_KEPT = "momentum_buffer"  # the state of PyTorch's that is a gradient itself: SGD's

log = logging.getLogger("tierstore")


class Look(NamedTuple):
    """How a tensor is stored.

    Attributes:
        layout: as PyTorch calls it.
        sparse_dim: how many dimensions are sparse; 0 where that says nothing.
    """

    layout: torch.layout
    sparse_dim: int


class Kind(NamedTuple):
    """What an optimizer may look at before it refuses a parameter.

    Attributes:
        shape: the parameter's, with 1 for all that is more.
        dtype: the parameter's.
        gradient: its look.
        kept: that of the former gradient in the state; ``None``: there is none.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    gradient: Look
    kept: Look | None


def refuses(optimizer: torch.optim.Optimizer, gradients: Gradients, device: torch.device) -> bool:
    """Say whether a step of an optimizer is to be left to it as a whole: it is going to raise, most likely.

    Args:
        optimizer: as its groups are now.
        gradients: of the model.
        device: where it would compute.
    """
    if not is_of_torch(optimizer):
        return False
    return any(_is_refused(optimizer, group, kind, device) for group, kind in _unusual(optimizer, gradients))


def _unusual(optimizer: torch.optim.Optimizer, gradients: Gradients) -> Iterator[tuple[Group, Kind]]:
    """Yield each kind that some optimizer may refuse, once for each group; others cost next to nothing."""
    is_dense_usual = not isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        found: dict[Kind, None] = {}
        keeps = isinstance(optimizer, torch.optim.SGD) and group.get("momentum", 0) != 0
        with natively():
            for parameter in group["params"]:
                gradient = gradients.in_sight(parameter)
                kept = optimizer.state.get(parameter, {}).get(_KEPT) if keeps else None
                is_usual = (
                    is_dense_usual
                    and (gradient is None or gradient.layout is torch.strided)
                    and (kept is None or kept.layout is torch.strided)
                    and parameter.dtype in _USUAL_DTYPES
                    and parameter.numel() > 0
                )
                if not is_usual and gradients.has(parameter):
                    shape = tuple(min(size, 1) for size in parameter.shape)
                    former = None if kept is None else _look_of(kept)
                    found[Kind(shape, parameter.dtype, _look_of(gradient), former)] = None
        yield from ((group, kind) for kind in found)


def _look_of(tensor: torch.Tensor | None) -> Look:
    if tensor is None or tensor.layout is torch.strided:
        return Look(torch.strided, 0)
    with ordinary_mode():  # a dispatch mode would see that somebody asks
        return Look(tensor.layout, tensor.sparse_dim() if tensor.layout is torch.sparse_coo else 0)


def _is_refused(optimizer: torch.optim.Optimizer, group: Group, kind: Kind, device: torch.device) -> bool:
    if kind.gradient.layout is torch.sparse_coo and kind.gradient.sparse_dim == len(kind.shape):
        return True
    try:
        with ordinary_mode():
            values = torch.ones(kind.shape, dtype=kind.dtype, device=device)
            stand_in = torch.nn.Parameter(torch.zeros_like(values))
            stand_in.grad = _looking(values, kind.gradient)
            state: dict[torch.Tensor, Entries] = {}
            if kind.kept is not None:
                state[stand_in] = {_KEPT: _looking(values, kind.kept)}
            step_alone(optimizer, [{**copy.deepcopy(options_of(group)), "params": [stand_in]}], state)
    except Exception:
        log.debug("%s refuses %s: its step runs as a whole", type(optimizer).__name__, kind, exc_info=True)
        return True
    return False


def _looking(values: torch.Tensor, look: Look) -> torch.Tensor:
    """Return a copy of a dense tensor with another look."""
    if look.layout is torch.strided:
        return values.clone()
    return values.to_sparse(look.sparse_dim) if look.sparse_dim else values.to_sparse(layout=look.layout)
