"""Tensors as bytes: what can be stored, how it is described, and how bytes become a tensor again.

Shape, dtype and the layout of the strides are kept; a tensor that is not dense (with gaps or
overlaps) is stored contiguous.  Knows nothing of tiers.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tierstore.errors import BackendError, IntegrityError, UsageError


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a stored tensor looks like.

    Attributes:
        shape: its sizes.
        dtype: its element type.
        nbytes: elements times bytes an element.
        stride: in elements; dense.
        device: where it was when it was put, and where `Store.get` returns it by default.
        unread: the text that was found in the place of this description, if that does not describe what is
            there: the rest is then that of plain bytes, and reading them is an `IntegrityError`.
    """

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int
    stride: tuple[int, ...] = ()
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable
    unread: str | None = None


def describe(tensor: torch.Tensor) -> TensorSpec:
    """Return the spec under which ``tensor`` would be stored.

    Raises:
        UsageError: it is not a tensor whose bytes can be copied; the message says why.
    """
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"not a tensor: {type(tensor).__name__}. Convert it with torch.as_tensor first.")
    reason = _why_not_storable(tensor)
    if reason is not None:
        raise UsageError(f"a {reason} cannot be stored: it has no plain storage of bytes to copy.")
    nbytes = tensor.numel() * tensor.element_size()
    return _shared(tensor.shape, tensor.dtype, nbytes, dense_stride(tensor), tensor.device)


# The keys of a model have few specs, of 260 B each.
_shared = functools.lru_cache(maxsize=1024)(TensorSpec)


@functools.lru_cache(maxsize=1024)
def to_text(spec: TensorSpec) -> str:
    """Put a spec into text that `from_text` reads back, in any later process."""
    if spec.unread is not None:
        return spec.unread
    fields = {
        "dtype": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "stride": list(spec.stride),
        "device": str(spec.device),
    }
    return json.dumps(fields, separators=(",", ":"))


@functools.lru_cache(maxsize=1024)
def from_text(text: str) -> TensorSpec:
    """Read what `to_text` wrote.  A device that is not there any more becomes the CPU.

    Raises:
        BackendError: it is not a spec; the message quotes it.
    """
    try:
        fields = json.loads(text)
        dtype = getattr(torch, fields["dtype"])
        shape = torch.Size(fields["shape"])
        stride = tuple(int(each) for each in fields["stride"])
        nbytes = shape.numel() * dtype.itemsize
        device = torch.device(fields["device"])
    except (ValueError, TypeError, KeyError, AttributeError, RuntimeError) as error:
        raise BackendError(f"not the description of a tensor: {text[:200]!r} ({error})") from error
    return TensorSpec(shape, dtype, nbytes, stride, device if _is_there(device) else torch.device("cpu"))


@functools.lru_cache(maxsize=1024)
def found_spec(text: str, nbytes: int) -> TensorSpec:
    """Return what ``text`` says of ``nbytes`` that were found with it: see `TensorSpec.unread`.

    What cannot be understood is so for one key alone, and must not keep the others from being found.
    """
    try:
        spec = from_text(text)
    except BackendError:
        spec = None
    if spec is not None and spec.nbytes == nbytes and _is_dense(spec):
        return spec
    return TensorSpec(torch.Size([nbytes]), torch.uint8, nbytes, (1,), unread=text)


def check_known(key: str, spec: TensorSpec) -> None:
    """See to it that it is known what the bytes of ``key`` are.

    Raises:
        IntegrityError: it is not; the message quotes what was found in its place.
    """
    if spec.unread is not None:
        raise IntegrityError(
            f"nobody knows what tensor the {spec.nbytes} bytes of {key!r} are: their description was lost or "
            f"damaged, {spec.unread[:200]!r} was found. Other keys are readable; drop this one or replace it",
            key=key,
        )


def _is_dense(spec: TensorSpec) -> bool:
    """Whether the strides lead to each of the bytes and no further."""
    if len(spec.stride) != len(spec.shape) or min((*spec.shape, *spec.stride), default=0) < 0:
        return False
    if not spec.nbytes:
        return True
    expected = 1
    for stride, length in sorted(zip(spec.stride, spec.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
    return True


@functools.cache
def _is_there(device: torch.device) -> bool:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError):  # torch built without it asserts
        return False
    return True


def _why_not_storable(tensor: torch.Tensor) -> str | None:
    kinds = {
        "meta tensor": tensor.is_meta,
        f"sparse tensor ({tensor.layout})": tensor.layout is not torch.strided,
        f"quantised tensor ({tensor.dtype})": tensor.is_quantized,
        "nested tensor": tensor.is_nested,
        f"wrapper subclass ({type(tensor).__name__})": is_traceable_wrapper_subclass(tensor),
    }
    reason = next((kind for kind, applies in kinds.items() if applies), None)
    return reason or _why_no_storage(tensor)


def _why_no_storage(tensor: torch.Tensor) -> str | None:
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()  # a wrapper that does not say that it is one has a storage without memory
    except (NotImplementedError, RuntimeError):
        return f"tensor without memory of its own ({type(tensor).__name__}), as inside torch.vmap"
    nbytes = storage.nbytes()
    if nbytes == 0 and tensor.numel() > 0:
        return f"tensor whose storage was freed ({type(tensor).__name__})"
    return None


def dense_stride(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the tensor's strides if it is dense without overlap, else those of a contiguous one."""
    stride = tensor.stride()
    expected = 1
    order = sorted(range(tensor.dim()), key=lambda dim: (stride[dim], tensor.shape[dim]))
    for dim in order:
        if tensor.shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return contiguous_stride(tensor.shape)
        expected *= tensor.shape[dim]
    return stride


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of ``shape``."""
    stride: list[int] = []
    step = 1
    for length in reversed(shape):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def view_bytes(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View a slot's bytes (one-dimensional uint8) as the tensor they are."""
    return memory.view(spec.dtype).as_strided(spec.shape, spec.stride)


def is_whole(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a tensor is all that its storage holds, in the layout in which it would be stored."""
    is_plain = tensor.stride() == spec.stride and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.untyped_storage().nbytes() == spec.nbytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as the bytes that it consists of, in the order of its storage."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
