"""What each use of a tensor asks for: its looks, its strides, its bytes, an address; which may write."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tierstore.training.bundles.unseen_writes import says_that_it_writes

Function = Callable[..., Any]

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
get_data: Function = _Tensor.data.__get__
"""What ``tensor.data`` does."""


def _members(names: Iterable[str]) -> set[Function]:
    """Return the functions by which ``__torch_function__`` knows attributes and methods of tensors."""
    found: set[Function] = set()
    for name in names:
        member = getattr(torch.Tensor, name, None)
        if member is None:
            continue
        if callable(member):
            found.add(member)
        else:
            found |= {member.__get__, member.__set__} if hasattr(member, "__set__") else {member.__get__}
    return found


PASSING = _members(
    """_backward_hooks _has_symbolic_sizes_strides _is_view _post_accumulate_grad_hooks _version __len__
    dim dtype device element_size get_device grad_dtype grad_fn is_complex is_cpu is_cuda
    is_floating_point is_inference is_leaf is_meta is_mkldnn is_nested is_quantized is_signed is_sparse
    is_sparse_csr is_xpu itemsize layout name names nbytes ndim ndimension nelement numel output_nr
    register_hook register_post_accumulate_grad_hook retain_grad retains_grad shape size sym_numel
    __dlpack_device__""".split()  # noqa: SIM905 - a table of sixty names
) | {torch.numel, torch.is_floating_point, torch.is_complex, torch.is_same_size, torch.Tensor.is_same_size}
LAYOUT = _members(["stride", "is_contiguous", "storage_offset", "sym_stride"])
CHANGES_REQUIRES_GRAD = {_Tensor.requires_grad.__set__, _Tensor.requires_grad_}
PASSING |= {_Tensor.requires_grad.__get__} | CHANGES_REQUIRES_GRAD
ESCAPES = _members(
    """data_ptr untyped_storage storage _typed_storage numpy __array__ __dlpack__ __cuda_array_interface__
    """.split()  # noqa: SIM905 - a table
)
ADDRESSES = _members(["data_ptr", "const_data_ptr", "mutable_data_ptr", "__cuda_array_interface__"])
EXPORTS = _members(["numpy", "__array__", "__dlpack__"])
RESIZES = _members(["resize_", "resize_as_"])
LISTWISE = ("_foreach_", "_amp_foreach_")
WRITES_UNSEEN = ("_fused_", "_amp_")


def may_write_unseen(func: Function, kwargs: dict[str, Any]) -> bool:
    """Whether ``func`` may write without telling autograd's version counter.

    Fused functions do not tell it, batch norms do not of their statistics, and under a ``TorchDispatchMode``
    those over lists do not either.
    """
    name = func.__name__
    is_in_place = name.endswith("_") and not name.endswith("__")
    return (
        is_in_place
        or func in ESCAPES
        or func is get_data
        or "out" in kwargs
        or name.startswith(WRITES_UNSEEN)
        or "batch_norm" in name
        or says_that_it_writes(func)
    )
