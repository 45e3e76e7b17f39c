"""Writes that nobody is told of, and how it is known that there were none.

Autograd's version counters tell of what PyTorch's functions write.  They do not tell of writes through NumPy,
DLPack, a pointer or a storage, of fused functions, or of kernels that somebody wrote.  If bytes cannot be
known to be unchanged, they are not clean:

1. Only PyTorch's own code is taken to write where the counters tell: modules of ``torch.nn``, of exactly that
   class, with nobody's hooks.  Functions whose schema says that they write are believed.  Batch norms write
   running statistics, and tell nobody: those are not taken to.
2. Where other code has had its hands on leased bytes (a user's module, a user's hook, an operator of a
   library, a dispatch mode), they are compared with what they were, by a digest, where the host can read
   them.  A digest is kept until the bytes are written, so that a frozen bundle is read once for each lease.
3. Where the host cannot read them they count as written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import xxhash
from torch import nn

from tierstore.torch_private import NormWithStatistics, global_forward_hooks, global_forward_pre_hooks
from tierstore.training.bundles.binding import Binding, natively, versions_of

_OWN_OPERATORS = frozenset({"aten", "prim", "prims", "c10d", "_c10d_functional", "profiler", "inductor"})


# ---------------------------------------------------------------------- whose code runs


def is_pytorchs_own(module: nn.Module) -> bool:
    """Whether nobody's code but PyTorch's runs between a module's first hook and its last."""
    if not _is_a_class_of_pytorch(type(module)) or "forward" in module.__dict__:
        return False
    if global_forward_hooks or global_forward_pre_hooks:
        return False
    hooks = (module._forward_pre_hooks, module._forward_hooks)  # noqa: SLF001 - there is no other way to ask
    return all(len(each) <= 1 or all(map(_is_ours, each.values())) for each in hooks)


def written_unseen(module: nn.Module, bindings: Iterable[Binding]) -> list[Binding]:
    """Return the bundles that a module of ``torch.nn`` writes though no counter tells."""
    if not isinstance(module, NormWithStatistics):
        return []
    return [each for each in bindings if not isinstance(each.tensors[0], nn.Parameter)]


def _is_a_class_of_pytorch(kind: type) -> bool:  # without a cache: a parametrized module's class holds it
    return kind.__module__.startswith("torch.nn.modules.")


def _is_ours(hook: Callable[..., object]) -> bool:
    return getattr(hook, "__module__", "").startswith("tierstore.")


def is_foreign_operator(func: Callable[..., object]) -> bool:
    """Whether a function is an operator of a library, whose schema may not say what it writes."""
    return getattr(func, "_schema", None) is not None and getattr(func, "namespace", "") not in _OWN_OPERATORS


def says_that_it_writes(func: Callable[..., object]) -> bool:
    """Whether an operator's schema says that it writes to its arguments."""
    return bool(getattr(getattr(func, "_schema", None), "is_mutable", False))


# ---------------------------------------------------------------------- what the bytes are


def watch(bindings: Iterable[Binding]) -> None:
    """Other code gets its hands on leased bytes: know what they are before."""
    for binding in bindings:
        if binding.flat is None or binding.is_watched:
            continue
        binding.is_watched = True
        if not (binding.is_dirty or _is_known(binding) or versions_of(binding) != binding.versions):
            _take_digest(binding)


def note_changes(binding: Binding) -> None:
    """A use of leased bytes has ended: let ``binding.is_dirty`` say whether they were written."""
    if binding.flat is not None and not binding.is_dirty:
        binding.is_dirty = versions_of(binding) != binding.versions or _may_have_changed(binding)
    binding.is_watched = False


def _may_have_changed(binding: Binding) -> bool:
    """Whether leased bytes that no counter says were written may be others than before."""
    if not binding.is_watched:
        return False
    if not _is_known(binding):
        return True
    former = binding.digest
    _take_digest(binding)
    return former != binding.digest


def _is_known(binding: Binding) -> bool:
    return binding.digest is not None and binding.digest[0] == binding.writes


def _take_digest(binding: Binding) -> None:
    """Keep the digest of leased bytes with how often they were written; none, if nobody can read them."""
    flat = binding.flat
    assert flat is not None
    if flat.device.type != "cpu":
        binding.digest = None
        return
    with natively():
        array: Any = flat.numpy()
    binding.digest = binding.writes, xxhash.xxh3_128_intdigest(array)
