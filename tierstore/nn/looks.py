"""Which functions of PyTorch only ask what a tensor is, which read its elements, and which write to them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

_ATTRIBUTES: Final = frozenset(
    {
        "device", "dtype", "grad", "grad_dtype", "grad_fn", "is_cpu", "is_cuda", "is_leaf", "is_meta",
        "is_mkldnn", "is_mps", "is_mtia", "is_nested", "is_quantized", "is_sparse", "is_sparse_csr", "is_xla",
        "is_xpu", "itemsize", "layout", "name", "names", "nbytes", "ndim", "output_nr", "requires_grad",
        "retains_grad", "shape",
    }
)  # fmt: skip
_CALLS: Final = frozenset(
    {
        "__format__", "__hash__", "__len__", "__repr__", "data_ptr", "dim", "dim_order", "element_size",
        "get_device", "has_names", "is_coalesced", "is_complex", "is_conj", "is_contiguous", "is_distributed",
        "is_floating_point", "is_inference", "is_neg", "is_pinned", "is_same_size", "is_shared", "is_signed",
        "nelement", "numel", "register_hook", "register_post_accumulate_grad_hook",
        "requires_grad_", "result_type", "retain_grad", "size",
        "storage_offset", "stride", "untyped_storage",
    }
)  # fmt: skip
LIKE: Final = frozenset({"new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros"})
"""What makes another tensor, of the type and on the device of the first."""
CONVERSIONS: Final = frozenset({"bfloat16", "contiguous", "cpu", "double", "float", "half", "to", "type"})
"""What returns its first argument itself, if it is like that already."""
_BINARY: Final = frozenset(
    f"__{each}__"
    for each in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "and",
        "or",
        "xor",
        "lshift",
        "rshift",
    )
)
_SETTABLE: Final = frozenset({"grad", "requires_grad"})
OF_MEMORY: Final = frozenset(
    {
        "const_data_ptr", "data_ptr", "is_contiguous", "is_shared", "is_pinned", "storage_offset", "stride",
        "untyped_storage",
    }
)  # fmt: skip
"""What is said of memory: of a tensor that is made when it is read, only then."""


def is_of_gradient(func: Callable[..., Any]) -> bool:
    """Whether a function gets the gradient of a parameter, sets or clears it."""
    owner = getattr(func, "__self__", None)
    return inspect.isgetsetdescriptor(owner) and owner.__name__ == "grad"


def is_look(func: Callable[..., Any]) -> bool:
    """Whether a function only asks what a parameter is, and not what its elements are."""
    owner = getattr(func, "__self__", None)
    if not inspect.isgetsetdescriptor(owner):
        return getattr(func, "__name__", "") in _CALLS
    name = owner.__name__
    if func.__name__ != "__get__":
        return name in _SETTABLE
    return name in _ATTRIBUTES or name.startswith("_")  # private ones are about the tensor, not its elements


def name_of(func: Callable[..., Any]) -> str:
    """Return what a program calls a function, or the attribute that it asks for."""
    owner = getattr(func, "__self__", None)
    of_what = owner if inspect.isgetsetdescriptor(owner) else func
    return str(getattr(of_what, "__name__", func))


def is_in_place(func: Callable[..., Any]) -> bool:
    """Whether a function writes to its first argument."""
    name = str(getattr(func, "__name__", ""))
    if name.startswith("__"):
        return name in ("__set__", "__setitem__") or (name[2] == "i" and f"__{name[3:]}" in _BINARY)
    return name.endswith("_")


def written_by(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operator would write to."""
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            for each in given if isinstance(given, list | tuple) else [given]:
                if isinstance(each, torch.Tensor):
                    yield each
