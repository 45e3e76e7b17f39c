"""Tensors that autograd saves for backward: an alias of a bundle is saved as a reference to it.

Without this a saved weight would keep its memory until backward, and evicting it would free nothing.

1. A saved alias of a parameter's bundle becomes a `Reference`; backward brings the bundle again.
2. A saved alias of a gradient or of optimizer state is copied: its key may be gone by then.
3. Everything else goes to whoever's hooks were there before (``torch.utils.checkpoint``,
   ``save_on_cpu``), or is kept as it is.
4. A tensor that was changed in place since it was saved raises what PyTorch raises.  (PyTorch does
   not look where hooks are in force.)
"""

from __future__ import annotations

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch

from tierstore.training.binding import Binding, Bindings, natively

Hook = Callable[[Any], Any]

_autograd: Any = torch._C._autograd  # noqa: SLF001
push_hooks: Callable[[Hook, Hook], None] = _autograd._push_saved_tensors_default_hooks  # noqa: SLF001
pop_hooks: Callable[[], None] = _autograd._pop_saved_tensors_default_hooks  # noqa: SLF001


def top_hooks() -> tuple[Hook, Hook] | None:
    """Return the hooks that are in force in this thread."""
    found: tuple[Hook, Hook] | None = _autograd._top_saved_tensors_default_hooks(True)  # noqa: SLF001, FBT003
    return found


class Reference(NamedTuple):
    """An alias of a bundle's bytes, without the bytes."""

    binding: Binding
    owner: torch.Tensor  # whose version counter tells of changes
    version: int | None  # None: the alias had a counter of its own
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    is_conj: bool
    is_neg: bool


class Kept(NamedTuple):
    """A tensor kept as it is."""

    tensor: torch.Tensor
    version: int


class Delegated(NamedTuple):
    """What the hooks that were there before made of a tensor."""

    packed: object
    unpack: Hook


def keep(tensor: torch.Tensor) -> Kept:
    """Return what keeps a saved tensor as it is."""
    # A node must not keep its own output: the alias shares its bytes and its version counter.
    kept = tensor.detach() if tensor.grad_fn is not None else tensor
    return Kept(kept, tensor._version)  # noqa: SLF001


def restore(packed: Kept | Delegated) -> torch.Tensor:
    """Return the tensor that was kept as it is, or that others have packed.

    Raises:
        RuntimeError: it was changed in place since; the text is PyTorch's.
    """
    if isinstance(packed, Delegated):
        return cast("torch.Tensor", packed.unpack(packed.packed))
    kept = packed.tensor
    refuse_if_changed(kept.dtype, kept.shape, kept._version, packed.version)  # noqa: SLF001
    return kept


class SavedTensors:
    """Watches what autograd saves while a module's window is open.

    Args:
        bindings: of the model.
    """

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self._pack: Hook = self.pack
        self._unpack: Hook = self.unpack

    # --- being in force -----------------------------------------------------------------------

    def push(self) -> bool:
        """Come into force in this thread, unless nobody was since; return whether `pop` is due."""
        top = top_hooks()
        if top is None:
            push_hooks(self._pack, self._unpack)
            return True
        if getattr(top[0], "saved", getattr(top[0], "__self__", None)) is self:
            return False
        push_hooks(Chained(self, *top), self._unpack)
        return True

    def pop(self) -> None:
        """Be in force no more."""
        pop_hooks()

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Be in force inside the context."""
        is_pushed = self.push()
        try:
            yield
        finally:
            if is_pushed:
                self.pop()

    # --- packing ------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        reference = self.refer(tensor)
        if reference is not None:
            return reference
        return keep(tensor)

    def refer(self, tensor: torch.Tensor) -> object | None:
        """Return a reference to a bundle, or a copy, if ``tensor`` lies in leased bytes."""
        try:
            binding = self._bindings.find(tensor)
        except (NotImplementedError, RuntimeError):  # fake and functional tensors have no storage
            return None
        if binding is None:
            return None
        if not binding.is_saved_by_reference:
            return Kept(tensor.detach().clone(), 0)
        return _refer(binding, tensor)

    def unpack(self, packed: object) -> torch.Tensor:
        """Return the tensor that was packed.

        Raises:
            RuntimeError: it was changed in place since; the text is PyTorch's.
        """
        if isinstance(packed, Reference):
            with natively():
                now = packed.owner._version  # noqa: SLF001
            refuse_if_changed(packed.dtype, packed.shape, now, packed.version)
            return self._bring(packed)
        assert isinstance(packed, Kept | Delegated)
        return restore(packed)

    def _bring(self, packed: Reference) -> torch.Tensor:
        flat = self._bindings.reach(packed.binding)
        view = flat.view(packed.dtype).as_strided(packed.shape, packed.stride, packed.offset)
        if packed.is_conj:
            view = torch._conj(view)  # noqa: SLF001 - sets the bit, as the saved tensor had it
        return torch._neg_view(view) if packed.is_neg else view  # noqa: SLF001


class Chained:
    """Packs bundles, and leaves the rest to the hooks that were there before.

    Attributes:
        pack_before: theirs.
    """

    def __init__(self, saved: SavedTensors, pack: Hook, unpack: Hook) -> None:
        self.saved = saved
        self.pack_before = pack
        self._unpack_before = unpack

    def __call__(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        reference = self.saved.refer(tensor)
        if reference is not None:
            return reference
        return Delegated(self.pack_before(tensor), self._unpack_before)


def refers() -> SavedTensors | None:
    """Return whoever turns aliases of bundles into references in this thread; ``None``: nobody does."""
    top = top_hooks()
    hook = None if top is None else top[0]
    while hook is not None:
        owner = hook.saved if isinstance(hook, Chained) else getattr(hook, "__self__", None)
        if isinstance(owner, SavedTensors):
            return owner
        hook = getattr(hook, "pack_before", None)
    return None


def packs_the_rest() -> Hook | None:
    """Return the hook in this thread that packs what aliases no bundle; ``None``: nobody does.

    A hook that packs some tensors and leaves the rest to others says to whom: by its ``pack_before``.
    """
    top = top_hooks()
    hook = None if top is None else top[0]
    while hook is not None and (before := getattr(hook, "pack_before", None)) is not None:
        hook = before
    return hook


def _refer(binding: Binding, tensor: torch.Tensor) -> Reference:
    begin_bytes = tensor.storage_offset() * tensor.element_size()
    places = binding.places
    index = bisect.bisect_right(places, begin_bytes, key=lambda place: place.offset_bytes) - 1
    owner = binding.tensors[index]
    with natively():
        version = owner._version  # noqa: SLF001
    return Reference(
        binding,
        owner,
        version if version == tensor._version else None,  # noqa: SLF001
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
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
