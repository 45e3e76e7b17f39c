"""What an optimizer keeps for its parameters, as bundles of the store under the parameters' own.

1. The tensors that an optimizer's adapter names (`tierstore.training.optimizers.adapters`) travel together,
   for all parameters of a bundle; they stay the same objects, whoever has them.
2. Everything else stays as it is: scalars and 0-d tensors, tensors in lists, state under other keys than
   parameters, an optimizer's own attributes and options.
3. Of tensors that a step makes, those stay as they are too which are not where it computes: an optimizer
   that keeps its state in host memory, beside parameters on a device, expects it there.
4. In the end state goes where its parameter goes.
5. Of an optimizer that is not known (`Taken.UNSHARED`), a tensor is taken only if nobody else refers to its
   memory: an alias of it, or a view into one flat buffer, would go stale.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tierstore.planning import Home
from tierstore.torch_private import storage_use_count, tensor_use_count
from tierstore.training.bundles.bindings import Binding
from tierstore.training.bundles.freed_memory import FreedMemory
from tierstore.training.bundles.layout import TensorLayout
from tierstore.training.faults import guard
from tierstore.training.faults.state_dict_entries import Links
from tierstore.training.modules.adopter import Adopter, is_deserted
from tierstore.training.optimizers.adapters import Taken, adapter_of

_ALONE = 2  # one tensor refers to the storage, beside the storage's object in Python

Order = Mapping[Binding, int]
"""The place of every bundle of parameters in the forward pass."""


class OptimizerState:
    """The state of one optimizer.

    Args:
        optimizer: whose.
        index: which of the model's optimizers it is.
        order: of the bundles of all parameters.
        adopter: that takes tensors into the store and gives them back.
        home_of: returns where state of a bundle lives.
        computes_on: returns the device on which the optimizer steps a bundle.

    Attributes:
        taken: which tensors go there.
        bindings: of what is there, by bundle of parameters.
        freed: what was taken in has left free.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        index: int,
        order: Order,
        adopter: Adopter,
        home_of: Callable[[Binding], Home],
        computes_on: Callable[[Binding], torch.device],
    ) -> None:
        self.optimizer = optimizer
        self.index = index
        self._order = order
        self._adopter = adopter
        self._home_of = home_of
        self._adapter = adapter_of(optimizer)
        self.taken = self._adapter.taken(optimizer)
        self._computes_on = computes_on
        self.bindings: dict[Binding, Binding] = {}
        self.freed = FreedMemory()
        self._counts: dict[torch.Tensor, int] = {}  # of tensors of each parameter, when last looked at

    def bundles(self) -> list[Binding]:
        """Return the bundles of the optimizer's parameters as its groups are now, in the order of forward."""
        found = {
            guarded_tensor.binding: None
            for parameter in (*_parameters(self.optimizer), *self.optimizer.state)
            if (guarded_tensor := guard.guarded_tensor_of(parameter)) is not None
            and guarded_tensor.binding in self._order
        }
        return sorted(found, key=self._order.__getitem__)

    # --- taking in ----------------------------------------------------------------------------

    def take_in_first(self) -> None:
        """Take in what is there before the run: with its parameter, or on the device that computes."""
        for bundle in self.bundles():
            origins = self._adopter.origins_of(bundle)
            device = self._computes_on(bundle).type
            self._take_in(bundle, self.taken, {p: (device, origin.type) for p, origin in origins.items()})

    def take_in_all(self) -> None:
        """Take in what steps have made."""
        for bundle in self.bundles():
            self.take_in(bundle)

    def take_in(self, bundle: Binding, stepped: Sequence[torch.Tensor] = ()) -> None:
        """Adopt state of a bundle that a step made or replaced since it was last looked at.

        Args:
            bundle: of parameters.
            stepped: those of them that a step was about; empty: it may have been about all.
        """
        if not stepped or not self._is_as_known(bundle, stepped):
            self._take_in(bundle, self.taken, self._devices_of_steps(bundle))

    def _is_as_known(self, bundle: Binding, parameters: Sequence[torch.Tensor]) -> bool:
        """Whether all that some parameters have is in the store, and they have as much as before."""
        counts = dict.fromkeys(parameters, 0)
        for each in self._adapter.state_tensors(self.optimizer, parameters):
            if not self.has(bundle, each.tensor):
                return False
            counts[each.parameter] += 1
        return all(self._counts.get(parameter) == count for parameter, count in counts.items())

    def _devices_of_steps(self, bundle: Binding) -> Mapping[torch.Tensor, tuple[str, ...]]:
        return dict.fromkeys(bundle.tensors, (self._computes_on(bundle).type,))

    def take_in_loaded(self, bundle: Binding, taken: Taken | None = None) -> None:
        """Adopt state of a bundle that was loaded, wherever it is: it belongs where its parameter is.

        Args:
            bundle: of parameters.
            taken: which tensors; ``None``: as ever.
        """
        self._take_in(bundle, taken or self.taken, None)

    def _take_in(
        self, bundle: Binding, taken: Taken, devices: Mapping[torch.Tensor, tuple[str, ...]] | None
    ) -> None:
        state = self.bindings.get(bundle)
        found = self._find(bundle, taken, devices)
        known = () if state is None else state.tensors
        self._counts.update(dict.fromkeys(bundle.tensors, 0))
        for parameter, _ in found:
            self._counts[parameter] += 1
        if len(found) == len(known) and all(a is b for a, b in zip(found.values(), known, strict=True)):
            return
        links = Links(state)
        if state is not None:
            # It is laid out anew: until then its tensors are ordinary ones.
            self._let_go(self.bindings.pop(bundle))
            links.note_memory()
        if not found:
            return
        named = [(f"the optimizer's {name!r} of {_name(p)}", value) for (p, name), value in found.items()]
        devices_in_the_end = self._adopter.origins_of(bundle)
        origins = [devices_in_the_end[parameter] for parameter, _ in found]
        key = state_key(self.index, bundle.key)
        home = self._home_of(bundle)
        adopted = self._adopter.adopt(key, named, home, origins=origins, owner=bundle)
        self._own(bundle, adopted)
        links.tie()
        self.freed.note(adopted.nbytes)

    def _let_go(self, state: Binding) -> None:
        """Make tensors ordinary ones again; those that were replaced, and that nobody has, need no bytes."""
        if is_deserted(state):
            self._adopter.forget(state)
        else:
            self._adopter.restore(state)

    def of(self, bundle: Binding) -> dict[tuple[torch.Tensor, str], torch.Tensor]:
        """Return the tensors of a bundle's state that are in the store, or are to be taken there."""
        return self._find(bundle, self.taken, self._devices_of_steps(bundle))

    def _find(
        self, bundle: Binding, taken: Taken, devices: Mapping[torch.Tensor, tuple[str, ...]] | None
    ) -> dict[tuple[torch.Tensor, str], torch.Tensor]:
        state = self.bindings.get(bundle)
        found: dict[tuple[torch.Tensor, str], torch.Tensor] = {}
        seen: set[int] = set()
        for parameter, name, value in self._adapter.state_tensors(self.optimizer, bundle.tensors):
            guarded_tensor = guard.guarded_tensor_of(value)
            is_ours = guarded_tensor is not None and guarded_tensor.binding is state
            is_there = devices is None or value.device.type in devices[parameter]
            is_free = guarded_tensor is None and is_there and _is_to_be_taken(value, taken)
            if id(value) not in seen and (is_ours or is_free):
                found[parameter, name] = value
                seen.add(id(value))
        return found

    def has(self, bundle: Binding, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the store as a bundle's state."""
        guarded_tensor = guard.guarded_tensor_of(tensor)
        return guarded_tensor is not None and guarded_tensor.binding is self.bindings.get(bundle)

    # --- from a checkpoint --------------------------------------------------------------------

    def bind(
        self,
        bundle: Binding,
        places: Sequence[TensorLayout],
        tensors: Sequence[torch.Tensor],
        origins: list[torch.device],
    ) -> None:
        """Tie the state of a bundle to bytes that are in the store already.

        Args:
            bundle: whose state it is.
            places: where each tensor lies in the bytes.
            tensors: of the optimizer's entries, in the same order; they have no bytes.
            origins: where each of them goes in the end.
        """
        key = state_key(self.index, bundle.key)
        home = self._home_of(bundle)
        self._own(bundle, self._adopter.bind(key, places, tensors, home, origins, bundle))

    def _own(self, bundle: Binding, state: Binding) -> None:
        state.is_saved_by_reference = False
        self.bindings[bundle] = state

    # --- the end ------------------------------------------------------------------------------

    def forget_others(self) -> None:
        """Drop the keys of state of parameters that the optimizer has no more.

        Tensors that somebody has, such as an optimizer that had its state in common with this one, become
        ordinary ones.
        """
        for bundle in set(self.bindings).difference(self.bundles()):
            self._let_go(self.bindings.pop(bundle))


def _is_to_be_taken(value: torch.Tensor, taken: Taken) -> bool:
    return value.layout is torch.strided and (taken is Taken.ALL or is_unshared(value))


def is_unshared(tensor: torch.Tensor) -> bool:
    """Whether a tensor's memory can be given back: all of it is the tensor's, and nobody else refers to it.

    Memory that others may know by its address (numpy's, a file's, another process's) cannot be resized.
    """
    is_plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.numel() > 0
    if not is_plain or tensor.requires_grad or tensor.is_inference() or tensor.is_conj() or tensor.is_neg():
        return False
    storage = tensor.untyped_storage()
    return (
        storage.resizable()
        and not storage.is_shared()
        and storage_use_count(storage._cdata) <= _ALONE  # noqa: SLF001
        and tensor_use_count(tensor) <= 1  # graphs save the tensor itself
        and storage.nbytes() == tensor.numel() * tensor.element_size()
    )


def state_key(index: int, bundle_key: str) -> str:
    """Return the key of the state that an optimizer keeps for a bundle."""
    return f"state/{index}/{bundle_key.removeprefix('param/')}"


def order_entries(optimizer: torch.optim.Optimizer, keys: Iterable[torch.Tensor]) -> None:
    """Let entries of an optimizer's state come in the order of their keys, after all others."""
    state = optimizer.state
    for key in keys:
        if key in state:
            state[key] = state.pop(key)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterable[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _name(parameter: torch.Tensor) -> str:
    guarded_tensor = guard.guarded_tensor_of(parameter)
    return repr(guarded_tensor.place.name) if guarded_tensor is not None else "a parameter"
