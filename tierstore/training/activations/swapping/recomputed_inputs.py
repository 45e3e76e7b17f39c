"""What recomputed modules are given, in a tier of a store until they are run again: ``offload_checkpoint``.

1. Taken is what PyTorch's checkpoint saves when it begins to run a module, and nothing else.
2. A leaf of the graph stays, and so does a view of one: it is a parameter, or the program's own, as a batch
   and its mask are.  What swapping leaves alone stays as well (`storage_worth_a_key`).
3. What the module that began last was given stays on the device until the next one begins in the thread, or
   until the device's quota wants its room: it is wanted first.
4. When a module is run again, what the one that began before it was given begins to come back.

Knows nothing of modules but their numbers.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from tierstore.training.activations.runtime.saved_activations import Turn
from tierstore.training.activations.swapping.activation_store import (
    ActivationStore,
    OffloadedTensor,
    WeakOffloadedTensor,
)
from tierstore.training.activations.swapping.forward_pass import Unpacker, storage_worth_a_key
from tierstore.training.autograd.saved_tensors import sees_all
from tierstore.training.pytorch.saved_tensor_hooks import Hook


class OffloadedInput:
    """What a graph refers to instead of a tensor that a module was given: a `PackedTensor`."""

    __slots__ = ("_before", "_offloaded", "_unpacker")

    def __init__(
        self, offloaded: OffloadedTensor, unpacker: Unpacker, before: Sequence[WeakOffloadedTensor]
    ) -> None:
        self._offloaded = offloaded
        self._unpacker = unpacker
        self._before = before

    def tensor(self) -> torch.Tensor:
        """See `PackedTensor`."""
        self._unpacker.begin()
        tensor = self._offloaded.take()
        for each in self._before:
            each.bring()
        return tensor


class InputsOfCall:
    """Takes what one call of a module is given: a `SavePolicy`.

    Args:
        activation_store: where it goes.
        tier: of the store.
        name: of its keys.
        unpacker: that gives it back.
        before: what the call before it was given.

    Attributes:
        taken: what was.
    """

    turn = Turn.SWAP
    is_for_repetition = False

    def __init__(
        self,
        activation_store: ActivationStore,
        tier: str,
        name: str,
        unpacker: Unpacker,
        before: Sequence[WeakOffloadedTensor],
    ) -> None:
        self.taken: list[WeakOffloadedTensor] = []
        self._activation_store = activation_store
        self._tier = tier
        self._name = name
        self._unpacker = unpacker
        self._before = before

    def lets_see(self, hook: Hook) -> bool:
        """See `SavePolicy`: what is taken is not there any more."""
        return sees_all(hook, are_on_host=self._activation_store.store.device.type == "cpu")

    def pack(self, tensor: torch.Tensor) -> OffloadedInput | None:
        """See `SavePolicy`."""
        if _is_of_a_leaf(tensor) or storage_worth_a_key(tensor, self._activation_store.store.device) is None:
            return None
        name = f"{self._name}/{len(self.taken)}"
        offloaded = self._activation_store.keep(tensor, name, self._tier)
        self.taken.append(offloaded.weakly())
        return OffloadedInput(offloaded, self._unpacker, self._before)


class OffloadedInputs(threading.local):
    """What the recomputed modules of one model are given, in each thread that runs it.

    Args:
        activation_store: where it goes.
        tier: of the store, below the fastest.
    """

    def __init__(self, activation_store: ActivationStore, tier: str) -> None:
        self._activation_store = activation_store
        self._tier = tier
        self._unpacker = Unpacker(activation_store)
        self._last: Sequence[WeakOffloadedTensor] = ()

    def of_call(self, number: int) -> InputsOfCall:
        """Return what takes the inputs of the module of this number, which begins to run."""
        before = self._last
        for each in before:
            each.leave()
        name = f"activation/input/{number}"
        call = InputsOfCall(self._activation_store, self._tier, name, self._unpacker, before)
        self._last = call.taken
        return call


def _is_of_a_leaf(tensor: torch.Tensor) -> bool:
    base = tensor._base  # noqa: SLF001 - what it is a view of
    return tensor.is_leaf or (base is not None and base.is_leaf)
