"""Whether an optimizer refuses a step in its midst: known before the first bundle is stepped.

Optimizers that treat each parameter by itself may refuse some: those with sparse gradients or with dense
ones, complex and empty ones, expanded ones (no operator writes to those in place), those whose gradient
or state is of another type than they are since they were pointed elsewhere.  They raise when they come to
one, or to its group.  A bundle at a time that would be after other parameters than in plain PyTorch, so
such a step is left to the optimizer as a whole.

1. The optimizer is asked itself: a double of it steps a stand-in of one element, or of none, for each kind of
   parameter that is unusual, with the options of its group and state of the same kind.
2. Only those of ``torch.optim`` and ours are asked.  What users register is not run on trial.
3. Left to the optimizer without being asked: a step with a gradient or state of another shape than its
   parameter, one that treats parameters by the first of their group since their types differ
   (``Adafactor``), and one of fused ``SGD`` that is the first with momentum for some of a group.

Tables are stepped by an optimizer's own step in any case, and checked there.  Knows nothing of bundles.
"""

from __future__ import annotations

import copy
import logging
import operator
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from tierstore.errors import UsageError
from tierstore.nn.table_weight import TableWeight
from tierstore.training.autograd.gradient import show_gradient
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.bundles.bindings import natively
from tierstore.training.faults.guarded_tensors import guarded_tensor_of
from tierstore.training.optimizers.doubles import Entries, step_alone
from tierstore.training.optimizers.registered import has_come_to_depend, is_known
from tierstore.training.optimizers.step_units import Group, options_of
from tierstore.training.pytorch.own_work import ordinary_mode

_USUAL_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})

_STATE = frozenset(
    {
        *("momentum_buffer", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "square_avg", "grad_avg"),
        *("acc_delta", "sum", "ax", "prev", "step_size", "row_var", "col_var", "variance"),
        *("accumulator", "linear"),
    }
)
"""What these optimizers compute with, beside the gradient: each has an element for the parameter's."""

Alike = Callable[[torch.Size, torch.Size], bool]
"""Says whether state of a shape may be that of a parameter with another."""

log = logging.getLogger("tierstore")


class StorageLook(NamedTuple):
    """How a tensor is stored.

    Attributes:
        dtype: of its elements.
        layout: as PyTorch calls it.
        sparse_dim: how many dimensions are sparse; 0 where that says nothing.
        is_expanded: whether several elements are one in memory, so that no operator writes to it in place.
    """

    dtype: torch.dtype
    layout: torch.layout
    sparse_dim: int
    is_expanded: bool


class RefusalKind(NamedTuple):
    """What an optimizer may look at before it refuses a parameter.

    Attributes:
        device: the parameter's, as it says itself.
        shape: the parameter's, with 1 for all that is more.
        look: the parameter's.
        gradient: its look.
        state: the names of what the optimizer computes with, and their looks.
        is_fitting: whether gradient and state have the parameter's shape.
    """

    device: torch.device
    shape: tuple[int, ...]
    look: StorageLook
    gradient: StorageLook
    state: tuple[tuple[str, StorageLook], ...]
    is_fitting: bool

    @property
    def is_expanded(self) -> bool:
        """Whether any of them is."""
        return any(look.is_expanded for look in (self.look, self.gradient, *dict(self.state).values()))


def refuses(optimizer: torch.optim.Optimizer, gradients: Gradients) -> bool:
    """Say whether a step of an optimizer is to be left to it as a whole: it is going to raise, most likely.

    Args:
        optimizer: as its groups are now.
        gradients: of the model.

    Raises:
        UsageError: the step is fused, and something that it computes with is expanded.
    """
    if not is_known(optimizer):
        return has_come_to_depend(optimizer)
    return _is_first_for_some(optimizer, gradients) or any(
        _is_refused(optimizer, group, kind, entries)
        for group, kind, entries in _unusual(optimizer, gradients)
    )


def _is_first_for_some(optimizer: torch.optim.Optimizer, gradients: Gradients) -> bool:
    """Whether fused ``SGD`` has momentum for some parameters of a group, and for others none yet."""
    if not isinstance(optimizer, torch.optim.SGD):
        return False
    groups = [group for group in optimizer.param_groups if group["fused"] and group["momentum"]]
    for group in groups:
        with natively():
            stepped = [each for each in group["params"] if gradients.look_at(each) is not None]
        if len({_has_momentum(optimizer, each) for each in stepped}) > 1:
            return True
    return False


def _has_momentum(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> bool:
    return optimizer.state.get(parameter, {}).get("momentum_buffer") is not None


def _unusual(
    optimizer: torch.optim.Optimizer, gradients: Gradients
) -> Iterator[tuple[Group, RefusalKind, Entries]]:
    """Yield each kind that some optimizer may refuse, once for each group, with the first one's state.

    Others cost next to nothing.
    """
    is_alike: Alike = _is_mean_of if isinstance(optimizer, torch.optim.Adafactor) else operator.eq
    takes_sparse = isinstance(optimizer, torch.optim.SparseAdam)
    for group in optimizer.param_groups:
        found: dict[RefusalKind, Entries] = {}
        with natively():
            for parameter in group["params"]:
                gradient = None if isinstance(parameter, TableWeight) else gradients.look_at(parameter)
                if gradient is None:
                    continue
                entries = optimizer.state.get(parameter, {})
                if takes_sparse or not _is_usual(parameter, gradient, entries, is_alike):
                    found.setdefault(_kind_of(parameter, gradient, entries, is_alike), entries)
        yield from ((group, kind, entries) for kind, entries in found.items())


def _is_usual(parameter: torch.Tensor, gradient: torch.Tensor, entries: Entries, is_alike: Alike) -> bool:
    """Whether any optimizer that takes dense gradients takes a parameter.  For every one of every step."""
    dtype, shape = parameter.dtype, parameter.shape
    if (
        dtype not in _USUAL_DTYPES
        or gradient.dtype is not dtype
        or gradient.layout is not torch.strided
        or gradient.shape != shape
        or 0 in shape
        or _is_expanded(parameter)
        or _is_expanded(gradient)
    ):
        return False
    for name, value in entries.items():  # no generator: it would take half of the time
        if (
            name in _STATE
            and isinstance(value, torch.Tensor)
            and (
                value.dtype is not dtype
                or value.layout is not torch.strided
                or not is_alike(value.shape, shape)
                or _is_expanded(value)
            )
        ):
            return False
    return True


def _kind_of(
    parameter: torch.Tensor, gradient: torch.Tensor, entries: Entries, is_alike: Alike
) -> RefusalKind:
    state = {name: entries[name] for name in sorted(entries) if _is_computed_with(name, entries[name])}
    return RefusalKind(
        parameter.device,
        tuple(min(size, 1) for size in parameter.shape),
        _look_of(parameter),
        _look_of(gradient),
        tuple((name, _look_of(value)) for name, value in state.items()),
        gradient.shape == parameter.shape
        and all(is_alike(value.shape, parameter.shape) for value in state.values()),
    )


def _is_computed_with(name: str, value: object) -> bool:
    return name in _STATE and isinstance(value, torch.Tensor)


def _is_mean_of(shape: torch.Size, whole: torch.Size) -> bool:
    """Whether a mean over some dimensions of ``whole``, as ``Adafactor`` keeps, has that shape."""
    return len(shape) == len(whole) and all(
        size in (1, full) for size, full in zip(shape, whole, strict=True)
    )


def _look_of(tensor: torch.Tensor) -> StorageLook:
    if tensor.layout is torch.strided:
        return StorageLook(tensor.dtype, torch.strided, 0, _is_expanded(tensor))
    with ordinary_mode():  # a dispatch mode would see that somebody asks
        sparse_dim = tensor.sparse_dim() if tensor.layout is torch.sparse_coo else 0
        return StorageLook(tensor.dtype, tensor.layout, sparse_dim, is_expanded=False)


def _is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements are one in memory: of the tensor itself, not of what stands for its bytes."""
    stride = tensor.stride()
    if 0 not in stride or not tensor.numel():
        return False
    guarded_tensor = guarded_tensor_of(tensor)
    if guarded_tensor is not None and not guarded_tensor.is_abroad:
        return guarded_tensor.place.is_expanded
    return any(size > 1 and not step for size, step in zip(tensor.shape, stride, strict=True))


def _is_refused(optimizer: torch.optim.Optimizer, group: Group, kind: RefusalKind, entries: Entries) -> bool:
    if not kind.is_fitting:
        return True
    if group.get("fused") and kind.is_expanded:
        raise UsageError(
            f"fused {type(optimizer).__name__} would go beyond the end of an expanded tensor, and change "
            "others: its kernel does not look at strides. The tensor is a parameter, its gradient or its "
            "state. Make it one with memory of its own, as clone() does, or take fused=False."
        )
    try:
        with ordinary_mode():
            values = torch.ones(kind.shape, dtype=kind.look.dtype, device=kind.device)
            stand_in = torch.nn.Parameter(_looking(torch.zeros_like(values), kind.look))
            show_gradient(stand_in, _looking(values, kind.gradient))
            state: dict[torch.Tensor, Entries] = {
                stand_in: {**_small(entries), **{n: _looking(values, look) for n, look in kind.state}}
            }
            step_alone(optimizer, [{**copy.deepcopy(options_of(group)), "params": [stand_in]}], state)
    except Exception:
        log.debug("%s refuses %s: its step runs as a whole", type(optimizer).__name__, kind, exc_info=True)
        return True
    return False


def _small(entries: Entries) -> Entries:
    """Return what an optimizer has beside what it computes with: counts, and what others have put there."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) and value.dim() == 0 else value
        for name, value in entries.items()
        if not _is_computed_with(name, value)
    }


def _looking(values: torch.Tensor, look: StorageLook) -> torch.Tensor:
    """Return a copy of a dense tensor with another look."""
    values = values.to(look.dtype, copy=True)
    if look.layout is torch.strided:
        return values.expand([2] * values.dim()) if look.is_expanded else values
    return values.to_sparse(look.sparse_dim) if look.sparse_dim else values.to_sparse(layout=look.layout)
