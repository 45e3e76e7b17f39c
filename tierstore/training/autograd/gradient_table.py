"""The gradients of one model, by their parameters: what is known of them, made before who moves them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping

import torch

from tierstore.planning import Home
from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.planning.homes import CPU
from tierstore.training.autograd.gradient import (
    Gradient,
    GradientState,
    GradientStay,
    native_gradient,
    nbytes_of,
)
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.units import align_up


class GradientTable:
    """All gradients of one model.

    Attributes:
        has_changed: whether other parameters require gradients than when `trained` was asked last.
    """

    def __init__(self) -> None:
        self._of: dict[torch.Tensor, Gradient] = {}
        self._trained: dict[Hashable, int] | None = None  # bytes, by the ids of parameters
        self.has_changed = True

    def add(self, name: str, parameter: torch.nn.Parameter, home: Home) -> Gradient:
        """Return the gradient of one more parameter, whose stash lives at ``home``."""
        gradient = self._of[parameter] = Gradient(name, parameter, home)
        return gradient

    def find(self, parameter: torch.Tensor) -> Gradient | None:
        """Return the gradient of a parameter; ``None``: it is not one of the model's."""
        return self._of.get(parameter)

    def __getitem__(self, parameter: torch.Tensor) -> Gradient:
        return self._of[parameter]

    def __iter__(self) -> Iterator[Gradient]:
        return iter(self._of.values())

    def trained(self) -> Mapping[Hashable, int]:
        """Return a key and the bytes of each parameter that requires gradients; changes are told then."""
        if self._trained is None:
            trained = (each.parameter for each in self if each.parameter.requires_grad)
            self._trained = {id(each): memory_of(each).nbytes for each in trained}
        self.has_changed = False
        return self._trained

    def note_trained(self, parameter: torch.Tensor) -> None:
        """Take in whether a parameter requires gradients from now on."""
        if self._trained is None or parameter not in self._of:
            return
        if (id(parameter) in self._trained) is parameter.requires_grad:
            return
        self.has_changed = True
        if parameter.requires_grad:
            self._trained[id(parameter)] = memory_of(parameter).nbytes
        else:
            del self._trained[id(parameter)]

    def are_untouched(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether all of their gradients wait in the store and nobody has looked at one since."""
        return all(self._of[parameter].is_untouched for parameter in parameters)

    def staying_bytes(self) -> int:
        """Return the bytes of those that are ordinary tensors until they are zeroed."""
        stay = [each for each in self if each.stay is not GradientStay.IN_STORE]
        natives = [native_gradient(each.parameter) for each in stay if each.state is GradientState.ORDINARY]
        return sum(nbytes_of(native) for native in natives if native is not None)

    def came_bytes(self) -> int:
        """Return the bytes of those that backward has made so far, each once, but what the host needs."""
        came = (each.came_bytes for each in self if each.home.device != CPU)
        return sum(align_up(nbytes, ALIGNMENT_BYTES) for nbytes in came)

    def know_uses(self, parameters: Iterable[torch.Tensor]) -> None:
        """Take all uses until now for our own."""
        for parameter in parameters:
            self._of[parameter].know_uses()

    def usual_key_of(self, parameter: torch.Tensor) -> str:
        """Return the key that a parameter's gradient is under if it is the store's; ``""``: it never is."""
        gradient = self.find(parameter)
        return "" if gradient is None else gradient.usual_key

    def usual_datum_of(self, parameter: torch.Tensor) -> tuple[str, int]:
        """Return that key, and the bytes that are under it then: of the part that this process has."""
        return self.usual_key_of(parameter), memory_of(parameter).nbytes
