"""Selective checkpointing whose ``CPU_OFFLOAD`` policies offload.

In eager mode PyTorch takes ``MUST_CPU_OFFLOAD`` and ``PREFER_CPU_OFFLOAD`` for "recompute".  Here an
operator's output goes into the store and comes back when its region is recomputed; everything else is
PyTorch's own (`torch.utils.checkpoint.create_selective_checkpoint_contexts`).

1. The copy down begins when the operator returns; the device's memory is given up a few operators later, at
   the latest at the end of the region, which waits for the copy.
2. Recomputing a region begins with the way back of all its outputs.
3. What is not an operator's own is cached as PyTorch's ``SAVE`` policies do: views of what it was given, what
   it changed in place, what lies on another device, and what is smaller than `SMALL_BYTES`.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from tierstore.errors import UsageError
from tierstore.torch_private import CachedDispatchMode, CachingDispatchMode, OpOverload, tree_map
from tierstore.training.activations.runtime.operators import (
    is_changing,
    is_plain,
    tensors_in,
    versions_are_shared,
    written,
)
from tierstore.training.activations.swapping.activation_store import ActivationStore, OffloadedTensor
from tierstore.training.modules.crossings import is_inside_host_module
from tierstore.training.pytorch.live_storages import LiveStorages

SMALL_BYTES = 4096
"""Outputs below this are cached where they are."""

_RELEASE_AFTER = 3  # operators, as for swapped activations that come back one node ahead

Policy = Callable[..., CheckpointPolicy | bool | str]
Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]

_OFFLOADED = {
    "MUST_CPU_OFFLOAD": CheckpointPolicy.MUST_SAVE,
    "PREFER_CPU_OFFLOAD": CheckpointPolicy.PREFER_SAVE,
}
"""By name: not every version of PyTorch has them, and the text does as well."""


def create_selective_checkpoint_contexts(
    policy_fn_or_list: Policy | Sequence[OpOverload],
    allow_cache_entry_mutation: bool = False,
    *,
    activation_store: ActivationStore | None = None,
) -> Contexts:
    """Return what a checkpointed function runs in, and what its recomputing runs in.

    To be passed as ``context_fn`` to ``torch.utils.checkpoint.checkpoint``, or to whatever passes it on
    (``checkpoint_wrapper``), as PyTorch's function of this name, which in eager mode recomputes what it is
    told to offload::

        from tierstore.training import ActivationStore, create_selective_checkpoint_contexts


        def policy(context, operator, *args, **kwargs):
            if operator is torch.ops.aten.addmm.default:
                return CheckpointPolicy.MUST_CPU_OFFLOAD
            return CheckpointPolicy.PREFER_RECOMPUTE


        activation_store = ActivationStore(ts.Store(ts.StoreConfig.default()))
        context_fn = functools.partial(
            create_selective_checkpoint_contexts, policy, activation_store=activation_store
        )
        output = checkpoint(layer, x, use_reentrant=False, context_fn=context_fn)

    Args:
        policy_fn_or_list: says of each operator what becomes of its output, or lists the operators whose
            output is saved; as PyTorch's.  ``"MUST_CPU_OFFLOAD"`` and ``"PREFER_CPU_OFFLOAD"`` as text do
            where PyTorch's enum has no such members.
        allow_cache_entry_mutation: as PyTorch's: what is saved may be changed in place.  What is offloaded
            may not: recomputing then raises what PyTorch raises.
        activation_store: where offloaded outputs go; one for all regions of a model.

    Raises:
        TypeError: neither a function nor a list.
        ValueError: the list has something that is no ``OpOverload``.
        UsageError: an operator is to be offloaded, and there is no activation store; raised where it runs.
    """
    if not callable(policy_fn_or_list) or torch.compiler.is_compiling():
        return cast(
            "Contexts",
            checkpoint.create_selective_checkpoint_contexts(
                policy_fn_or_list,
                allow_cache_entry_mutation,
            ),
        )
    storage: dict[Any, Any] = _torch_storage(policy_fn_or_list)
    offloaded: list[OffloadedTensor] = []
    policy = _Policy(policy_fn_or_list)
    return (
        _Caching(policy, storage, offloaded, activation_store),
        _Cached(policy, storage, allow_cache_entry_mutation, offloaded),
    )


def _torch_storage(policy: Policy) -> dict[Any, Any]:
    """Return what PyTorch's modes share, made as PyTorch makes it."""
    caching, _ = checkpoint.create_selective_checkpoint_contexts(policy)
    return cast("dict[Any, Any]", caching.storage)


class _Policy:
    """The user's policy, as PyTorch's modes understand it.

    Attributes:
        is_offloaded: whether the last answer was to offload.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self.is_offloaded = False

    def __call__(self, *args: object, **kwargs: object) -> CheckpointPolicy | bool:
        answer = self._policy(*args, **kwargs)
        saved = _OFFLOADED.get(answer if isinstance(answer, str) else getattr(answer, "name", ""))
        self.is_offloaded = saved is not None
        return answer if saved is None else saved  # type: ignore[return-value]


class _OffloadedValue:
    """A cached value that is in the store: what PyTorch's modes ask for values, they ask of this.

    Attributes:
        is_changed: whether it was changed in place, whatever its version says: the pieces that
            ``unsafe_chunk`` returns count versions each for itself.
    """

    def __init__(self, offloaded: OffloadedTensor, operator: str) -> None:
        self.is_changed = False
        self._kept = offloaded
        self._operator = operator

    def get_val(self, allow_cache_entry_mutation: bool) -> torch.Tensor:
        """Return the value, when its bytes are here."""
        del allow_cache_entry_mutation
        if self.is_changed:
            raise RuntimeError(
                f"what {self._operator} returned was offloaded and has been modified by an inplace operation "
                "since. Let the policy save or recompute it."
            )
        return self._kept.take()


class _Caching(CachingDispatchMode):
    """What the forward runs in."""

    def __init__(
        self,
        policy: _Policy,
        storage: MutableMapping[Any, Any],
        offloaded: list[OffloadedTensor],
        activation_store: ActivationStore | None,
    ) -> None:
        super().__init__(policy, storage)
        self._offloading = policy
        self._activation_store = activation_store
        self._kept = offloaded
        self._due: collections.deque[tuple[int, OffloadedTensor]] = collections.deque()
        self._offloaded: LiveStorages[_OffloadedValue] = LiveStorages()
        self._operators = 0

    # torch's signature: the types of arguments and result are those of the operation.
    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:  # noqa: ANN401
        """Run the operation, cache what comes out of it, and offload that if the policy says so."""
        self._operators += 1
        self._release(self._operators - _RELEASE_AFTER)
        self._offloading.is_offloaded = False
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if self._offloading.is_offloaded and isinstance(func, OpOverload):
            self._offload(func, (args, kwargs or {}))
        if self._offloaded and isinstance(func, OpOverload) and is_changing(func):
            self._note_change(written(func, args, kwargs or {}))
        return result

    def _note_change(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in filter(is_plain, tensors):
            away = self._offloaded.get(tensor.untyped_storage())
            if away is not None:
                away.is_changed = True

    def _offload(self, func: OpOverload, given: object) -> None:
        if self._activation_store is None:
            raise UsageError(
                f"the policy offloads the output of {func}, and there is nowhere to: pass "
                "activation_store=ActivationStore(store)."
            )
        own = {id(tensor.untyped_storage()) for tensor in tensors_in(given) if is_plain(tensor)}
        entries = self.storage[func]
        last = next(reversed(entries)) if isinstance(entries, dict) else -1
        entries[last] = tree_map(lambda cached: self._away(cached, own, str(func)), entries[last])

    def _away(self, cached: Any, given: set[int], name: str) -> Any:  # noqa: ANN401 - torch's own entries
        tensor = cached.val
        if self._activation_store is None or not isinstance(tensor, torch.Tensor) or not is_plain(tensor):
            return cached
        storage = tensor.untyped_storage()
        is_own = id(storage) not in given and tensor.device == self._activation_store.store.device
        if not is_own or storage.nbytes() < SMALL_BYTES or is_inside_host_module():
            return cached
        with versions_are_shared():
            offloaded = self._activation_store.keep(tensor, f"activation/{name}/{self._operators}")
        self._kept.append(offloaded)
        self._due.append((self._operators, offloaded))
        away = _OffloadedValue(offloaded, name)
        self._offloaded.put(storage, away)
        return away

    def _release(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self._due.popleft()[1].release()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._release(float("inf"))


class _Cached(CachedDispatchMode):
    """What recomputing runs in."""

    def __init__(
        self,
        policy: _Policy,
        storage: MutableMapping[Any, Any],
        is_mutable: bool,
        offloaded: list[OffloadedTensor],
    ) -> None:
        super().__init__(policy, storage, is_mutable)
        self._kept = offloaded

    def __enter__(self) -> Any:  # noqa: ANN401 - torch's own
        for offloaded in self._kept:
            offloaded.bring()
        self._kept.clear()  # so that what was taken, and all else, can go
        return super().__enter__()  # type: ignore[no-untyped-call]
