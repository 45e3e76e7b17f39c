"""Tensors as bytes: what can be stored, how it is described, and how bytes become a tensor again.

Shape, dtype and the layout of the strides are kept; a tensor that is not dense (with gaps or
overlaps) is stored contiguous.  Knows nothing of tiers.
"""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from tierstore.errors import BackendError, IntegrityError, UsageError
from tierstore.torch_private import is_traceable_wrapper_subclass

_LONGEST_TEXT: Final = 1 << 16  # of a spec; those that are kept are less than 1 KiB
_LARGEST_NUMBER: Final = 2**63 - 1  # of torch's own
_DEVICE: Final = re.compile(r"([a-z0-9_]{1,40})(?::([0-9]{1,3}))?", re.ASCII)
_QUANTISED: Final = {torch.qint8, torch.qint32, torch.quint8, torch.quint4x2, torch.quint2x4}
# By name: nothing else of the module can be meant.
_DTYPES: Final[Mapping[object, torch.dtype]] = {
    name: value
    for name, value in vars(torch).items()
    if isinstance(value, torch.dtype) and value not in _QUANTISED
}


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
    """Read what `to_text` wrote, whoever wrote it.  A device that is not there any more becomes the CPU.

    Imports nothing, and makes no device ready.

    Raises:
        BackendError: it is not a spec; the message quotes it.
    """
    try:
        if len(text) > _LONGEST_TEXT:
            raise ValueError(f"{len(text)} characters")  # noqa: TRY301 - the same as what follows
        return _read(json.loads(text))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise BackendError(f"not the description of a tensor: {text[:200]!r} ({error})") from error


def _read(fields: Mapping[str, object]) -> TensorSpec:
    """Return the spec of ``fields``; all that is looked up by a name is in a table of ours.

    Raises:
        ValueError: they are none; so do ``TypeError`` and ``KeyError``.
    """
    dtype = _DTYPES[fields["dtype"]]
    shape, stride = _lengths(fields["shape"]), _lengths(fields["stride"])
    nbytes = math.prod(shape) * dtype.itemsize  # of Python's numbers: torch's own come round again
    if nbytes > _LARGEST_NUMBER or math.prod(max(length, 1) for length in shape) > _LARGEST_NUMBER:
        raise ValueError("more bytes than there can be")
    return TensorSpec(torch.Size(shape), dtype, nbytes, stride, _device(fields["device"]))


def _lengths(given: object) -> tuple[int, ...]:
    if not isinstance(given, list) or not all(
        type(each) is int and 0 <= each <= _LARGEST_NUMBER for each in given
    ):
        raise ValueError("a shape or a stride that is no list of numbers")
    return tuple(given)


def _device(given: object) -> torch.device:
    """Return the device of a name if it is there; else the CPU.

    Asking torch for one by its name imports the module ``torch.<name>``, and some devices have no bytes.
    """
    found = _DEVICE.fullmatch(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError("a device that has no such name")
    kind, index = found[1], int(found[2] or 0)
    return torch.device(found[0]) if kind == "cpu" or index < _count_of(kind) else torch.device("cpu")


@functools.cache
def _accelerators() -> tuple[str, int]:
    """Return the kind of accelerator that this machine has, and how many: none of kind ``""``."""
    accelerator = torch.accelerator.current_accelerator()
    return ("", 0) if accelerator is None else (accelerator.type, torch.accelerator.device_count())


def _count_of(kind: str) -> int:
    known, count = _accelerators()
    return count if kind == known else 0


def found_spec(text: str, nbytes: int) -> TensorSpec:
    """Return what ``text`` says of ``nbytes`` that were found with it: see `TensorSpec.unread`.

    What cannot be understood is so for one key alone, and must not keep the others from being found.
    """
    return _found(text, nbytes) if len(text) <= _LONGEST_TEXT else _unread(text, nbytes)


@functools.lru_cache(maxsize=1024)
def _found(text: str, nbytes: int) -> TensorSpec:
    try:
        spec = from_text(text)
    except BackendError:
        spec = None
    return spec if spec is not None and spec.nbytes == nbytes and _is_dense(spec) else _unread(text, nbytes)


def _unread(text: str, nbytes: int) -> TensorSpec:
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
    if len(spec.stride) != len(spec.shape):
        return False
    if not spec.nbytes:
        return True
    expected = 1
    for stride, length in sorted(zip(spec.stride, spec.shape, strict=True)):
        if length > 1 and stride != expected:
            return False
        expected *= length
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
    elements = memory if spec.dtype is torch.uint8 else memory.view(spec.dtype)
    return elements.as_strided(spec.shape, spec.stride)


def is_whole(tensor: torch.Tensor, spec: TensorSpec) -> bool:
    """Return whether a tensor is all that its storage holds, in the layout in which it would be stored."""
    is_plain = tensor.stride() == spec.stride and not (tensor.is_conj() or tensor.is_neg())
    return is_plain and tensor.untyped_storage().nbytes() == spec.nbytes


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """View a dense tensor as the bytes that it consists of, in the order of its storage."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
