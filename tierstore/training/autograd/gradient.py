"""One parameter's gradient: its states, and who else has hold of it."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import Any

import torch

from tierstore.planning import Home
from tierstore.store import Store
from tierstore.torch_private import storage_use_count, tensor_use_count
from tierstore.training import locks
from tierstore.training.bundles.bindings import Binding, natively, set_data
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.locks import Rank
from tierstore.training.pytorch.own_work import ordinary_mode

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_get_grad: Callable[[torch.Tensor], torch.Tensor | None] = _Tensor.grad.__get__
_set_grad = _Tensor.grad.__set__


seen_by_autograd = _get_grad
"""What `native_gradient` does, for who is native already."""


def native_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient that autograd itself sees."""
    with natively():
        return _get_grad(parameter)


def set_native_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Set the gradient that autograd itself sees."""
    with natively():
        _set_grad(parameter, gradient)


def show_gradient(parameter: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let autograd see what is the gradient of a parameter already, whatever that looks like now.

    It may have been pointed at memory of another type or shape since: PyTorch leaves it its gradient then,
    and would not take that as a new one.
    """
    try:
        set_native_gradient(parameter, gradient)
    except RuntimeError:
        with natively():
            now = parameter.detach()
            set_data(
                parameter, torch.empty((), dtype=gradient.dtype, device=now.device).expand(gradient.shape)
            )
            try:
                _set_grad(parameter, gradient)
            finally:
                set_data(parameter, now)


def nbytes_of(gradient: torch.Tensor) -> int:
    """Return the bytes that a gradient takes; of a sparse one, those of its indices and values."""
    if gradient.layout is torch.strided:
        return memory_of(gradient).nbytes
    with ordinary_mode():  # a dispatch mode would see that somebody asks
        if gradient.layout is torch.sparse_coo:
            return gradient._indices().nbytes + gradient._values().nbytes  # noqa: SLF001 - the others coalesce
        return gradient.values().nbytes


class GradientStay(enum.Enum):
    """Where a gradient is while autograd does not work on it."""

    IN_STORE = enum.auto()  # stashed, unless there is room for all
    UNTIL_ZEROED = enum.auto()  # an ordinary tensor, until somebody clears it
    ALWAYS = enum.auto()  # an ordinary tensor: somebody reads it where no hook of ours can know


class GradientState(enum.Enum):
    """What may be done with a gradient."""

    ORDINARY = enum.auto()  # whatever autograd itself sees is all there is
    STASHED = enum.auto()  # used through its handle; autograd itself sees none
    LENT = enum.auto()  # autograd itself sees the handle, which has its bytes


_MOVES = {
    (GradientState.ORDINARY, GradientState.STASHED),  # put under a key
    (GradientState.STASHED, GradientState.LENT),  # autograd is about to add to it
    (GradientState.LENT, GradientState.STASHED),  # autograd is done with it
    (GradientState.STASHED, GradientState.ORDINARY),  # zeroed, replaced, or given back in the end
    (GradientState.LENT, GradientState.ORDINARY),  # the same, while autograd has it
}


class Gradient:
    """The gradient of one parameter.

    Attributes:
        name: the parameter's.
        home: where its stash lives.
        binding: ties the handle to the key, while a stash exists.
        state: what may be done with it; changed by `move`.
        stay: where it is while autograd does not work on it.
        flights: how many backward passes work on it now.
        accumulations: how many backward passes have added to it since the last step.
        came_bytes: the most that came to the store; 0: none ever did.
        stepper: the thread whose optimizer steps with it now; ``None``: there is none.
        given_address: of the memory of the store's in which it was given back; 0: it never was.
        known_uses: of the binding, by accumulation and by the optimizer.
        lock: guards all of these, and the gradient that autograd itself sees while no pass works on it.
    """

    __slots__ = (
        "_lent_with",
        "accumulations",
        "binding",
        "came_bytes",
        "flights",
        "given_address",
        "home",
        "known_uses",
        "lock",
        "name",
        "parameter",
        "state",
        "stay",
        "stepper",
    )

    def __init__(self, name: str, parameter: torch.nn.Parameter, home: Home) -> None:
        self.name = name
        self.home = home
        self.parameter = parameter
        self.binding: Binding | None = None
        self.state = GradientState.ORDINARY
        self.stay = GradientStay.IN_STORE
        self.flights = 0
        self.accumulations = 0
        self.came_bytes = 0
        self.known_uses = 0
        self.stepper: int | None = None
        self.given_address = 0
        self.lock = locks.new_lock(Rank.GRADIENT)
        self._lent_with = (0, 0)

    def move(self, state: GradientState) -> None:
        """Change what may be done with it."""
        assert (self.state, state) in _MOVES, (self.state, state)
        self.state = state

    @property
    def is_untouched(self) -> bool:
        """Whether it waits in the store and nobody has looked at it since."""
        return self.binding is not None and self.binding.uses == self.known_uses

    def may_be_shared(self, values: torch.Tensor) -> bool:
        """Say whether values lie in memory of somebody's whom nobody can see, such as an array of numpy's.

        That is memory that PyTorch has not allocated, but what the store has given.
        """
        storage = values.untyped_storage()
        return not storage.resizable() and storage.data_ptr() != self.given_address

    def know_uses(self) -> None:
        """Take the uses until now for our own."""
        assert self.binding is not None
        self.known_uses = self.binding.uses

    @property
    def handle(self) -> torch.Tensor | None:
        """What ``p.grad`` is while it is stashed."""
        return None if self.binding is None else self.binding.tensors[0]

    def note_holders(self) -> None:
        """It is lent now: remember how many refer to the handle."""
        self._lent_with = self._holders()

    @property
    def has_new_holders(self) -> bool:
        """Whether more refer to the handle, or to its bytes through it, than when it was lent.

        They may have its address (an array of numpy has), or have saved it for a backward pass of their own.
        """
        return any(now > then for now, then in zip(self._holders(), self._lent_with, strict=True))

    def _holders(self) -> tuple[int, int]:
        assert self.binding is not None
        return tensor_use_count(self.binding.tensors[0]), sys.getrefcount(self.binding.tensors[0])

    @property
    def usual_key(self) -> str:
        """The key that it is under: the same one in every step, as plans know it by name."""
        return f"grad/{self.name}"

    def new_key(self, store: Store) -> str:
        """Return a key that nothing is under."""
        key = self.usual_key
        while key in store:  # somebody still has an alias of an older gradient
            key += "'"
        return key


def is_alone(parameter: torch.Tensor) -> bool:
    """Whether nothing but a parameter refers to the gradient that autograd sees, or to its memory.

    To be called while one local variable of the caller's refers to it.
    """
    return all(now <= alone for now, alone in zip(_count_holders(parameter), _ALONE, strict=True))


def _count_holders(parameter: torch.Tensor) -> tuple[int, int, int]:
    # The gradient itself is handed to no function of Python: where frames are evaluated by somebody else,
    # as once torch.compile was used, an argument is counted twice.
    gradient = native_gradient(parameter)
    assert gradient is not None
    storage = gradient.untyped_storage()
    uses = storage_use_count(storage._cdata) + sys.getrefcount(storage)  # noqa: SLF001
    return tensor_use_count(gradient), sys.getrefcount(gradient), uses


def _count_of_one_alone() -> tuple[int, int, int]:
    parameter = torch.nn.Parameter(torch.zeros(1))
    parameter.grad = torch.zeros(1)
    gradient = native_gradient(parameter)
    counts = _count_holders(parameter)
    del gradient
    return counts


def _count_own_references() -> int:
    """Return what ``sys.getrefcount(binding.tensors[0])`` is when nobody else has the handle.

    The binding's tuple, the guard's table of guarded tensors, and the call's own argument.
    """
    holder = (object(),)
    table = {0: holder[0]}
    count = sys.getrefcount(holder[0])
    del table
    return count


_ALONE = _count_of_one_alone()
_OWN_REFERENCES = _count_own_references()


def is_kept(binding: Binding) -> bool:
    """Whether somebody else has a stash's handle, which autograd itself does not see."""
    references = sys.getrefcount(binding.tensors[0])
    # What saved it for a backward pass has no reference that Python counts.
    return references > _OWN_REFERENCES or tensor_use_count(binding.tensors[0]) > 1
