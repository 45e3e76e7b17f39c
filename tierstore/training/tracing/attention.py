"""Attention of a model that is nowhere: the kernel that a processor would take.

PyTorch chooses among kernels by where tensors are, and for those that are nowhere takes the formula, which
has a matrix of all queries and keys.  Here it is asked which it would take for tensors of the same form that
are in host memory; the kernel's own rule then says what it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from tierstore.modes import Unseen

_FLASH = 1  # torch.nn.attention.SDPBackend.FLASH_ATTENTION
_SOME = 2  # positions are enough to choose by
_attend = functional.scaled_dot_product_attention


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Do what ``scaled_dot_product_attention`` does, with the kernel of host memory."""
    tensors = (query, key, value, *(() if attn_mask is None else (attn_mask,)))
    if not all(each.is_meta for each in tensors) or not _takes_flash(
        *map(_form_of, (query, key, value)),
        None if attn_mask is None else _form_of(attn_mask),
        dropout_p,
        is_causal,
        scale,
        enable_gqa,
    ):
        return _attend(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        zero, never = (torch.tensor(each, dtype=query.dtype, device="meta") for each in (0.0, float("-inf")))
        attn_mask = torch.where(attn_mask, zero, never)
    found: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(  # noqa: SLF001 - an operator
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]
    return found


Form = tuple[tuple[int, ...], bool, torch.dtype, bool]


def _form_of(tensor: torch.Tensor) -> Form:
    is_last_dense = tensor.dim() == 0 or tensor.stride(-1) == 1
    return tuple(tensor.shape), is_last_dense, tensor.dtype, tensor.requires_grad


@functools.lru_cache(maxsize=1024)
def _takes_flash(
    query: Form,
    key: Form,
    value: Form,
    mask: Form | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> bool:
    """Ask PyTorch about small tensors of the same form."""
    with Unseen(), torch.DisableTorchFunction():
        made = [_like(form) for form in (query, key, value)]
        choice = torch.ops.aten._fused_sdp_choice(  # noqa: SLF001 - an operator
            *made,
            None if mask is None else _like(mask, is_mask=True),
            dropout_p,
            is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    return int(choice) == _FLASH


def _like(form: Form, *, is_mask: bool = False) -> torch.Tensor:
    """Return a tensor with few positions and one batch."""
    shape, is_last_dense, dtype, requires_grad = form
    few = tuple(min(each, _SOME) for each in shape[-2:])
    if len(shape) == 4:
        shape = (min(shape[0], 1), shape[1], *(few if is_mask else (few[0], shape[3])))
    elif is_mask:
        shape = (*shape[:-2], *few)
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if not is_last_dense:
        tensor = torch.empty((*shape, 2), dtype=dtype, device="cpu")[..., 0]
    return tensor.requires_grad_(requires_grad)


class Questions(TorchFunctionMode):
    """Sees the functions of PyTorch's that a model calls.

    Args:
        values_of: what ``tolist()`` returns for a tensor that is nowhere.
    """

    def __init__(self, values_of: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self._values_of = values_of

    # torch's signature: the types of arguments and result are those of the function.
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        """Call the function, or what stands in for it."""
        del types
        if func is _attend:
            return attend(*args, **(kwargs or {}))
        if func is torch.Tensor.tolist and args[0].is_meta:
            return self._values_of(args[0])
        return func(*args, **(kwargs or {}))


@contextmanager
def attention_of_the_host() -> Iterator[None]:
    """Let ``torch.nn.functional`` have the stand-in: function modes are not in force in a recomputation."""
    former = functional.scaled_dot_product_attention
    functional.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = former
