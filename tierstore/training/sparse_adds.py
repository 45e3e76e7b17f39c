"""Sparse tensors that are added to dense ones in place, where these begin in the midst of a storage.

PyTorch's kernel for the host adds a tensor without dense dimensions at twice the storage's offset: to other
memory than the dense tensor's.  Tensors of a bundle have offsets that those of the program did not have.  So
the sum is made in memory of its own, where it has the same bits, and copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tierstore.training.own_work import ordinary_mode

_ADD: frozenset[Callable[..., Any]] = frozenset(
    {
        torch.Tensor.add_,
        torch.Tensor.sub_,
        torch.Tensor.subtract_,
        torch.Tensor.__iadd__,
        torch.Tensor.__isub__,
    }
)
_ADD_LISTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch._foreach_add_: torch.Tensor.add_,
    torch._foreach_sub_: torch.Tensor.sub_,
}
"""Functions over lists, with what they do to each."""


def _is_without_dense_dimensions(tensor: object) -> bool:
    """Whether a tensor is one that PyTorch adds to other memory than it is told to."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        return False
    with ordinary_mode():  # a dispatch mode would see that somebody asks
        return tensor.dense_dim() == 0


def adds_sparse(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether a function adds such a tensor to its first argument, or some of them to those of a list."""
    if func in _ADD_LISTS:
        others = args[1] if len(args) > 1 and isinstance(args[1], list | tuple) else ()
        return any(map(_is_without_dense_dimensions, others))
    if func not in _ADD or len(args) < 2 or not _is_without_dense_dimensions(args[1]):
        return False
    return not (torch.is_grad_enabled() and args[0].requires_grad)  # which PyTorch refuses


def add_beside(func: Callable[..., Any], to: Any, other: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
    """Do what ``func(to, other, ...)`` means, for a guarded tensor or a list with some."""
    if func in _ADD_LISTS:
        for one, its_other in zip(to, other, strict=True):
            _ADD_LISTS[func](one, its_other, *args, **kwargs)
        return None
    with torch.no_grad():
        return to.copy_(func(to.clone(), other, *args, **kwargs))
