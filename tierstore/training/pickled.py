"""What is pickled of an alias of leased bytes: what plain PyTorch pickles, and not its whole bundle.

PyTorch pickles a tensor with all of its storage.  That of an alias (``p.data``, ``p.detach()``) is the
bundle's.  So an alias is pickled with a storage of its own: a copy of its region, which is one for all
aliases of it that are in one file.  ``copy.copy`` asks for the same and shares memory in plain PyTorch, so
it does here.
"""

from __future__ import annotations

import bisect
import copy
import functools
import sys
import weakref
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tierstore.training.binding import Bindings, natively
from tierstore.training.homes import Binding
from tierstore.training.identity import has_bytes
from tierstore.training.layout import place_of, span_of
from tierstore.training.parts import storage_of

_copies: weakref.WeakKeyDictionary[Bindings, dict[tuple[Binding, int], StorageWeakRef]]
_copies = weakref.WeakKeyDictionary()
"""By bundle and the byte where a region begins: while whoever pickles has it."""


def watch(bindings: Bindings) -> None:
    """Let aliases of bundles be pickled with their own bytes alone."""
    _copies[bindings] = {}


def _with_own_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return what is pickled for an alias of leased bytes; ``None``: it is none, or of several regions."""
    if not has_bytes(tensor):
        return None
    for bindings, copies in list(_copies.items()):
        with bindings.alone(), natively(), torch.no_grad():
            binding = bindings.find(tensor)
            if binding is None:
                continue
            begin_bytes = int(tensor.storage_offset()) * tensor.element_size()
            regions = binding.regions
            region = regions[bisect.bisect_right(regions, begin_bytes, key=lambda each: each.begin_bytes) - 1]
            if begin_bytes + span_of(tensor) > region.end_bytes:
                return None
            assert binding.flat is not None
            here = binding.flat[region.begin_bytes : region.end_bytes]
            own = _copy_of(here, copies, (binding, region.begin_bytes))
            made = place_of("", tensor, begin_bytes).view(own, region.begin_bytes)
            made.requires_grad_(tensor.requires_grad)
            made.__class__ = type(tensor)
            vars(made).update(vars(tensor))
            return made
    return None


def _copy_of(
    here: torch.Tensor, copies: dict[tuple[Binding, int], StorageWeakRef], key: tuple[Binding, int]
) -> torch.Tensor:
    """Return a copy of a region's bytes: the former one, brought up to date, while anybody has it."""
    known = copies.get(key)
    storage = None if known is None else storage_of(known)
    if storage is None:
        for gone in [each for each, reference in copies.items() if reference.expired()]:
            del copies[gone]
        own = here.clone()
        copies[key] = StorageWeakRef(own.untyped_storage())
        return own
    own = torch.empty(0, dtype=torch.uint8, device=here.device).set_(storage)
    return own.copy_(here)


def _let_aliases_be_pickled() -> None:
    in_torch: Any = torch.Tensor.__reduce_ex__

    @functools.wraps(in_torch)
    def seen(self: torch.Tensor, protocol: int) -> object:
        is_for_a_copy = sys._getframe(1).f_code is copy.copy.__code__  # noqa: SLF001 - there is no other way
        own = None if is_for_a_copy or not _copies else _with_own_bytes(self)
        return in_torch(self if own is None else own, protocol)

    torch.Tensor.__reduce_ex__ = cast("Any", seen)  # type: ignore[method-assign]


_let_aliases_be_pickled()
