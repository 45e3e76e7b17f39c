"""Tensors that autograd saves for backward: an alias of a bundle is saved as a reference to it.

Without this a saved weight would keep its memory until backward, and evicting it would free nothing.

1. A saved alias of a parameter's bundle becomes a `Reference`; backward brings the bundle again.  So does a
   parameter that is saved while its bytes are away, by where it lies in its bundle.  Of a ``DTensor`` that
   tensor parallel computes with, that is its local tensor (`PartReference`).
2. A saved alias of a gradient or of optimizer state is copied: its key may be gone by then.
3. Everything else goes to whoever's hooks were there before, or is kept as it is.  ``save_on_cpu`` need not
   see bundles of an accelerator; what is in host memory it keeps as it is, so it is shown that.  A user's
   hooks see all that plain PyTorch shows them, and what their unpack hook returns is used; of what they
   packed only aliases of bundles are replaced by references, until they are unpacked.  So it is where hooks
   of ours came between (`Inside`).
   ``torch.utils.checkpoint`` is shown everything, too: what it computes again may be another weight, or the
   same one with other values.  What it keeps of that is a stand-in, which refers to the bundle.
4. Where hooks are forbidden (``disable_saved_tensors_hooks``, and so ``torch.func.grad`` and its like), what
   is saved keeps its bundle here as long as the graph lives.
5. So it is in a backward pass that makes a graph (``create_graph=True``): what its nodes save of a bundle are
   references again.  What they are given of one shares the version counter of a tensor of it.
6. A tensor that was changed in place since it was saved raises what PyTorch raises.  (PyTorch does
   not look where hooks are in force.)
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch.autograd import graph

from tierstore.torch_private import (
    disabled_torch_function,
    make_wrapper_subclass,
    set_versions,
    tree_map_only,
)
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.bundles.bindings import Binding, Bindings, natively, set_data
from tierstore.training.bundles.layout import TensorLayout
from tierstore.training.bundles.tensor_slots import Lies, how_it_lies, is_sharded_kind, lying, memory_of
from tierstore.training.faults import guard
from tierstore.training.pytorch.function_modes import (
    are_function_modes_on,
    are_hooks_allowed,
    in_sight,
    out_of_sight,
)
from tierstore.training.pytorch.own_work import detached, ordinary_mode
from tierstore.training.pytorch.saved_tensor_hooks import (
    Hook,
    InForce,
    Inside,
    bring_into_force,
    chain,
    is_checkpoints,
    onwards,
    pop_hooks,
    top_hooks,
    whose,
)
from tierstore.uncompiled import uncompiled


class Reference(NamedTuple):
    """An alias of a bundle's bytes, without the bytes."""

    binding: Binding
    places: Sequence[TensorLayout]  # of the bundle, as it was laid out then
    owners: Sequence[torch.Tensor]  # whose version counter tells of changes; of several one, not known which
    version: int | None  # None: the alias had a counter of its own
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class PartReference(NamedTuple):
    """A ``DTensor`` whose local tensor is an alias of a bundle's bytes, without the bytes."""

    local: Reference
    lies: Lies


class Kept(NamedTuple):
    """A tensor kept as it is."""

    tensor: torch.Tensor
    version: int


class Delegated(NamedTuple):
    """What the hooks that were there before made of a tensor."""

    packed: object
    unpack: Hook


class Displayed:
    """What a user's hook made of a tensor, with others in the place of what we keep: see `in_packed`."""

    __slots__ = ("packed", "unpack")

    def __init__(self, packed: object, unpack: Hook) -> None:
        self.packed = packed
        self.unpack = unpack


def in_packed(kind: type, change: Hook, packed: object) -> Any:  # noqa: ANN401 - of any kind
    """Change every object of a kind in what a hook has packed, also in what other hooks are to unpack."""

    def changed(each: object) -> object:
        if isinstance(each, Displayed):
            return Displayed(in_packed(kind, change, each.packed), each.unpack)
        return change(each)

    return tree_map_only((kind, Displayed), changed, packed)


class AwayAlias:
    """What is not there among what a user's hook has packed, such as a bundle's alias."""

    __slots__ = ("bring",)

    def __init__(self, bring: Callable[[], torch.Tensor]) -> None:
        self.bring = bring


class StandIn(torch.Tensor):
    """What ``torch.utils.checkpoint`` keeps of a bundle's alias: its looks, and no bytes.

    It may give one to backward itself, where hooks of ours packed what is computed again and not what was
    there before (a checkpoint that a hook of the module begins): an operator on it brings the bytes.

    Attributes:
        packed: what it stands for.
        bring: returns it.
    """

    packed: Reference
    bring: Callable[[Reference], torch.Tensor]
    __torch_function__ = disabled_torch_function

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # declared without its class there
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        """Run an operator on what it stands for."""
        del types
        args, kwargs = tree_map_only(cls, lambda each: each.bring(each.packed), (args, kwargs or {}))
        return func(*args, **kwargs)


def _stand_in(packed: Reference, bring: Callable[[Reference], torch.Tensor]) -> StandIn:
    with natively(), ordinary_mode():
        made = make_wrapper_subclass(
            StandIn,
            packed.shape,
            packed.stride,
            dtype=packed.dtype,
            device=packed.owners[0].device,
        )
    assert isinstance(made, StandIn)
    made.packed, made.bring = packed, bring
    return made


def keep(tensor: torch.Tensor) -> Kept:
    """Return what keeps a saved tensor as it is."""
    if are_function_modes_on():
        with out_of_sight():
            return keep(tensor)
    # A node must not keep its own output: the alias shares its bytes and its version counter.
    if tensor.grad_fn is None:
        return Kept(tensor, tensor._version)  # noqa: SLF001
    return Kept(detached(tensor), tensor._version)  # noqa: SLF001


def _copied(tensor: torch.Tensor) -> Kept:
    """Return what keeps the values that a tensor has now: in memory of the program's, that a meter counts."""
    return Kept(tensor.detach().clone(), 0)


def restore(packed: Kept | Delegated) -> torch.Tensor:
    """Return the tensor that was kept as it is, or that others have packed.

    Raises:
        RuntimeError: it was changed in place since; the text is PyTorch's.
    """
    if isinstance(packed, Delegated):
        with in_sight():
            return cast("torch.Tensor", packed.unpack(packed.packed))
    kept = packed.tensor
    refuse_if_changed(kept.dtype, kept.shape, kept._version, packed.version)  # noqa: SLF001
    return kept


class SavedTensors:
    """Watches what autograd saves while a module's window is open.

    Args:
        bindings: of the model.
        before_unpacking: what is called first whenever backward comes for a tensor.
    """

    def __init__(self, bindings: Bindings, before_unpacking: Callable[[], None]) -> None:
        self._bindings = bindings
        self.before_unpacking = before_unpacking
        self._pack: Hook = self.pack
        self._unpack: Hook = self.unpack

    # --- being in force -----------------------------------------------------------------------

    def push(self) -> InForce | None:
        """Come into force in this thread, unless nobody was since; return what is to be undone."""
        if not are_hooks_allowed():
            return None
        top = top_hooks()
        if top is None:
            return bring_into_force(self._pack, self._unpack)
        if getattr(top[0], "saved", getattr(top[0], "__self__", None)) is self:
            return None
        kind = _kind_of(top[0], are_on_host=self._bindings.store.device.type == "cpu")
        return bring_into_force(kind(self, top), self._unpack)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Be in force inside the context."""
        pushed = self.push()
        try:
            yield
        finally:
            if pushed is not None:
                pop_hooks()  # what came into force inside has gone; no call of Python's, for an interrupt

    # --- packing ------------------------------------------------------------------------------

    @uncompiled
    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        reference = self.refer_whole_or_part(tensor)
        if reference is not None:
            return reference
        return keep(tensor)

    def refer_whole_or_part(self, tensor: torch.Tensor) -> Reference | PartReference | Kept | None:
        """Return what `refer` does, also of a ``DTensor`` whose part lies in leased bytes, or is guarded."""
        if not is_sharded_kind(type(tensor)):
            return self.refer(tensor)
        local = self.refer(memory_of(tensor)) or self._refer_away(tensor)
        if isinstance(local, Kept):
            return Kept(lying(local.tensor, how_it_lies(tensor)), local.version)
        return None if local is None else PartReference(local, how_it_lies(tensor))

    def refer(self, tensor: torch.Tensor) -> Reference | Kept | None:
        """Return a reference to a bundle, or a copy, if ``tensor`` lies in leased bytes or is guarded.

        A guarded one is given by custom functions that save it while no window is open: it is never asked
        itself, as its guard would bring its bytes, and answers for where it would lie in memory of its own.
        """
        if are_function_modes_on():
            with out_of_sight():
                return self.refer(tensor)
        try:
            with natively():
                binding = self._bindings.find(tensor)
        except (NotImplementedError, RuntimeError):  # fake and functional tensors have no storage
            return None
        if binding is None:
            return self._refer_away(tensor)
        if not binding.is_saved_by_reference:
            return _copied(tensor)
        with natively():
            return _refer(binding, tensor, is_alone=not self._bindings.are_several)

    def _refer_away(self, tensor: torch.Tensor) -> Reference | Kept | None:
        """Return a reference to a guarded tensor whose bytes are away, or a copy; ``None``: it is none."""
        guarded_tensor = guard.guarded_tensor_of(tensor)
        if guarded_tensor is None or not guard.is_poisoned(guarded_tensor):
            return None
        if not guarded_tensor.binding.is_saved_by_reference:
            return _copied(tensor)
        place = guarded_tensor.place
        with natively():
            owner = memory_of(tensor)
            version = owner._version  # noqa: SLF001
        return Reference(
            guarded_tensor.binding,
            guarded_tensor.binding.places,
            [owner],
            version,
            place.dtype,
            place.shape,
            place.stride,
            place.offset,
            place.is_conj,
            place.is_neg,
        )

    @uncompiled
    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that was packed.

        Raises:
            RuntimeError: it was changed in place since; the text is PyTorch's.
        """
        if are_function_modes_on():
            with out_of_sight():
                return self.unpack(packed)
        self.before_unpacking()
        if isinstance(packed, Displayed):
            brought = in_packed(AwayAlias, lambda away: away.bring(), packed.packed)
            with in_sight():
                unpacked = cast("torch.Tensor", packed.unpack(brought))
            return self._bring_for_backward(unpacked.packed) if isinstance(unpacked, StandIn) else unpacked
        if isinstance(packed, PartReference):
            return lying(self.unpack(packed.local), packed.lies)
        if isinstance(packed, Reference):
            with natively():
                now = [owner._version for owner in packed.owners]  # noqa: SLF001
            if packed.version not in now:
                refuse_if_changed(packed.dtype, packed.shape, max(now), packed.version)
            return self._bring_for_backward(packed)
        assert isinstance(packed, Kept | Delegated)
        return restore(packed)

    def bring(self, packed: Reference) -> torch.Tensor:
        """Return what a stand-in stands for, to an operator of backward that was given one."""
        with out_of_sight():
            self.before_unpacking()
            return self._bring_for_backward(packed)

    def _bring_for_backward(self, packed: Reference) -> torch.Tensor:
        brought = self._bring(packed)
        if torch.is_grad_enabled() and is_in_backward():
            brought = self._bring_into_graph(packed, brought)
        return brought

    def _bring_into_graph(self, packed: Reference, brought: torch.Tensor) -> torch.Tensor:
        """A node of a pass that makes a graph runs: let that save references; return what the node gets."""
        if top_hooks() is None:
            self.push()  # PyTorch puts its own state back when the node is done
        with natively(), ordinary_mode():
            owner = packed.owners[0]
            if packed.version != owner._version or owner.dtype is not packed.dtype:  # noqa: SLF001
                return brought
            counted = owner.detach()
            set_data(counted, brought)
            return counted

    def away(self, tensor: torch.Tensor) -> torch.Tensor | AwayAlias:
        """Return what a user's hook keeps in the place of a tensor that it packed."""
        packed = self.refer_whole_or_part(tensor)
        if packed is None:
            return tensor
        if isinstance(packed, Kept):
            return AwayAlias(lambda: packed.tensor)
        if isinstance(packed, PartReference):
            return AwayAlias(lambda: lying(self._bring(packed.local), packed.lies))
        return AwayAlias(lambda: self._bring(packed))

    def _bring(self, packed: Reference) -> torch.Tensor:
        flat = self._bindings.reach(packed.binding)
        offset = packed.offset if packed.places is packed.binding.places else _offset_now(packed)
        with ordinary_mode():
            shown = packed.binding.storages
            assert shown is not None  # while something refers to the bytes
            view = shown.alias(
                packed.dtype,
                packed.shape,
                packed.stride,
                offset,
                is_conj=packed.is_conj,
                is_neg=packed.is_neg,
            )
            del flat
            return view


class PacksBefore(Inside):
    """What packs before hooks that were in force already.

    Args:
        saved: whose bundles become references.
        outer: the hooks that were there.
    """

    def __init__(self, saved: SavedTensors, outer: tuple[Hook, Hook]) -> None:
        self.saved = saved
        self.outer = outer
        self._pack_before, self._unpack_before = outer


class Chained(PacksBefore):
    """Packs bundles, and leaves the rest to the hooks that were there before."""

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        reference = self.saved.refer_whole_or_part(tensor)
        if reference is not None:
            return reference
        return Delegated(self._pack_before(tensor), self._unpack_before)


class PacksShown(PacksBefore):
    """Shows everything to a user's hooks; of what they pack, aliases of bundles become references."""

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        packed = in_packed(torch.Tensor, self.saved.away, self._pack_before(tensor))
        return Displayed(packed, self._unpack_before)


class Repeated(PacksBefore):
    """Lets ``torch.utils.checkpoint`` count all that is saved; what it keeps of bundles are stand-ins."""

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        reference = self.saved.refer(tensor)
        if reference is None:
            return Delegated(self._pack_before(tensor), self._unpack_before)
        if isinstance(reference, Kept):
            return Displayed(self._pack_before(reference.tensor), self._unpack_before)
        return Displayed(self._pack_before(_stand_in(reference, self.saved.bring)), self._unpack_before)


def _kind_of(hook: Hook, *, are_on_host: bool) -> Callable[[SavedTensors, tuple[Hook, Hook]], Hook]:
    """Return what comes before a hook.

    Args:
        hook: that is in force.
        are_on_host: whether the model's tensors are.
    """
    if is_checkpoints(hook):
        return Repeated
    return PacksShown if sees_all(hook, are_on_host=are_on_host) else Chained


def sees_all(hook: Hook, *, are_on_host: bool) -> bool:
    """Say whether a hook, or the one that it leaves the rest to, is to see every tensor that is saved.

    Args:
        hook: that is in force.
        are_on_host: whether the model's tensors are.
    """
    *_, last = onwards(hook)
    return _is_a_users(last) or (are_on_host and _keeps_on_host(last))


def _keeps_on_host(hook: Hook) -> bool:
    """Say whether a hook is ``save_on_cpu``'s, which keeps the host's tensors as they are."""
    name = getattr(hook, "__qualname__", "")
    return getattr(hook, "__module__", None) == graph.__name__ and name.startswith("save_on_cpu.")


def _is_a_users(hook: Hook) -> bool:
    """Say whether a hook is neither PyTorch's own nor ours, so that somebody may tell what it is shown."""
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return str(module).partition(".")[0] not in ("torch", "tierstore")


def refers() -> SavedTensors | None:
    """Return whoever turns aliases of bundles into references in this thread; ``None``: nobody does."""
    for owner in map(whose, chain()):
        found = owner.saved if isinstance(owner, PacksBefore) else owner
        if isinstance(found, SavedTensors):
            return found
    return None


def _offset_now(packed: Reference) -> int:
    """Return where a saved alias begins in a bundle that was laid out anew since.

    Raises:
        RuntimeError: the parameter itself looks different now.
    """
    number = next(
        n for n, tensor in enumerate(packed.binding.tensors) if memory_of(tensor) is packed.owners[0]
    )
    then, now = packed.places[number], packed.binding.places[number]
    if then.looks != now.looks:
        raise RuntimeError(
            f"{now.name!r} was pointed at memory of another shape or type between forward and backward: "
            "what backward needs is gone, as it is offloaded. Do this before the forward, or after backward."
        )
    return packed.offset + (now.begin_bytes - then.begin_bytes) // packed.dtype.itemsize


def _counting_with(alias: torch.Tensor, owners: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return those tensors whose version counter is that of an alias: equal numbers do not say so."""
    version = alias._version  # noqa: SLF001
    try:
        set_versions((alias,), (version + 1,))
        return [owner for owner in owners if owner._version != version]  # noqa: SLF001
    finally:
        set_versions((alias,), (version,))


def _refer(binding: Binding, tensor: torch.Tensor, *, is_alone: bool) -> Reference:
    """Return a reference to an alias of leased bytes.  Called natively.

    Args:
        binding: of the bytes.
        tensor: the alias.
        is_alone: whether no other thread looks at versions now.
    """
    begin_bytes = binding.begin_bytes(tensor)
    regions = binding.regions
    region = regions[bisect.bisect_right(regions, begin_bytes, key=lambda each: each.begin_bytes) - 1]
    version = tensor._version  # noqa: SLF001
    owners = [memory_of(binding.tensors[number]) for number in region.members]
    sharers = [owner for owner in owners if owner._version == version]  # noqa: SLF001
    if sharers and is_alone:
        sharers = _counting_with(tensor, sharers)
    is_known = bool(sharers)
    return Reference(
        binding,
        binding.places,
        sharers or owners,
        version if is_known else None,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        begin_bytes // tensor.element_size(),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def refuse_if_changed(dtype: torch.dtype, shape: torch.Size, now: int, then: int | None) -> None:
    """Raise what PyTorch raises if a saved tensor is not at the version that it was saved at.

    Args:
        dtype: of the tensor, for the message.
        shape: as well.
        now: its version.
        then: its version when it was saved; ``None``: nobody knows.
    """
    if then is None or now == then:
        return
    raise RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{dtype} {list(shape)}] is at version {now}; expected version {then} instead. Hint: enable anomaly "
        "detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
