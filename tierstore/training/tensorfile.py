"""Safetensors files, written one tensor at a time, and what they must hold to fit a model.

The format (github.com/huggingface/safetensors, section "Format"): eight bytes, little endian, the
length of the header; the header, JSON, from each name to its dtype, shape and range of bytes; then the
bytes, row-major.  Headers are padded with spaces, so that the bytes begin at a multiple of eight.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, Self

import torch

from tierstore.errors import UsageError

_DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPE_OF = {text: dtype for dtype, text in _DTYPES.items()}
_ALIGNMENT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: what it is called and looks like."""

    name: str
    dtype: torch.dtype
    shape: Sequence[int]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> Entry:
        """Describe a tensor."""
        return cls(name, tensor.dtype, tuple(tensor.shape))

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def write_file(
    path: Path, entries: Sequence[Entry], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> None:
    """Write ``tensors``, which come in the order of ``entries``, and bring them to the disk.

    Only one tensor is looked at at a time.

    Raises:
        UsageError: a dtype that the format does not know.
        OSError: the file system failed.
    """
    header = _header(entries, metadata)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)))
        file.write(header)
        for entry, tensor in zip(entries, tensors, strict=True):
            assert (tuple(tensor.shape), tensor.dtype) == (tuple(entry.shape), entry.dtype), entry.name
            file.write(_bytes_of(tensor))
        file.flush()
        os.fsync(file.fileno())


def pack(
    entries: Sequence[Entry], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> torch.Tensor:
    """Return what `write_file` would write, as bytes in host memory.

    Raises:
        UsageError: a dtype that the format does not know.
    """
    header = _header(entries, metadata)
    content = bytearray(struct.pack("<Q", len(header)) + header)
    for tensor in tensors:
        content += _bytes_of(tensor)
    return torch.frombuffer(content, dtype=torch.uint8)


def unpack(flat: torch.Tensor) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors and the metadata that were packed.

    Raises:
        UsageError: it is something else.
    """
    try:
        array: Any = flat.numpy()
        content = memoryview(array)
        (header_bytes,) = struct.unpack_from("<Q", content)
        begin = 8 + header_bytes
        table: dict[str, Any] = json.loads(bytes(content[8:begin]))
        metadata = table.pop("__metadata__", {})
        return {name: _cut(flat[begin:], **what) for name, what in table.items()}, metadata
    except (ValueError, struct.error, TypeError, AttributeError, KeyError, RuntimeError) as error:
        raise UsageError(f"these {flat.numel()} bytes are not packed tensors: {error}") from error


def _cut(flat: torch.Tensor, dtype: str, shape: Sequence[int], data_offsets: Sequence[int]) -> torch.Tensor:
    begin, end = data_offsets
    return flat[begin:end].clone().view(_DTYPE_OF[dtype]).reshape(shape)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for entry in entries:
        if entry.dtype not in _DTYPES:
            raise UsageError(
                f"{entry.name!r} is {entry.dtype}, which a safetensors file cannot hold.", key=entry.name
            )
        begin, end = end, end + entry.nbytes
        table[entry.name] = {
            "dtype": _DTYPES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % _ALIGNMENT_BYTES)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg()
    array: Any = flat.view(-1).view(torch.uint8).numpy()
    return memoryview(array) if flat.numel() else memoryview(b"")


class TensorSource(Protocol):
    """One file or several that tensors are read from by name, one at a time.  A context manager.

    Attributes:
        path: what messages name.
        names: of all its tensors.
        faults: what is wrong with it as a whole, each in a few words.
    """

    @property
    def path(self) -> Path: ...  # noqa: D102 - above

    @property
    def names(self) -> Sequence[str]: ...  # noqa: D102

    @property
    def faults(self) -> Sequence[str]: ...  # noqa: D102

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        ...

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type without reading it; ``None``: one that PyTorch has not."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        ...

    def __enter__(self) -> Self:
        """Open it."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        ...


class TensorFile:
    """A safetensors file that tensors are read from one at a time.  A context manager.

    Raises:
        UsageError: it cannot be read.
    """

    faults: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened: Any = safe_open(str(path), framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read the weights in {str(path)!r}: {error}") from error
        self._file = opened
        self.path = path
        self.names = tuple(self._file.keys())
        self.metadata: Mapping[str, str] = self._file.metadata() or {}

    def __enter__(self) -> Self:
        """Open it."""
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._file.__exit__(*exception)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        return tuple(self._file.get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type without reading it; ``None``: one that PyTorch has not."""
        return _DTYPE_OF.get(self._file.get_slice(name).get_dtype())

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def check_names(
    source: TensorSource, wanted: Mapping[str, torch.Tensor], aliases: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return under which name each wanted tensor is in a source.

    Args:
        source: that is to be read.
        wanted: the tensors that are to get values, by name.
        aliases: other names of a tensor, any of which will do; several have to hold the same bytes.

    Raises:
        UsageError: names are missing, not expected, or of another shape or kind; all are listed.
    """
    there = set(source.names)
    known: set[str] = set()
    found: dict[str, list[str]] = {}
    faults = list(source.faults)
    for name in wanted:
        names = (name, *aliases.get(name, ()))
        known.update(names)
        held = [each for each in names if each in there]
        if held:
            found[name] = held
        else:
            faults.append(f"missing: {name}")
    faults += [f"not in the model: {name}" for name in source.names if name not in known]
    for name, held in found.items():
        mismatches = [fault for each in held for fault in _mismatches(source, each, wanted[name])]
        faults += mismatches or _differences(source, held)
    if faults:
        raise UsageError(f"{str(source.path)!r} does not fit the model: " + "; ".join(faults))
    return {name: held[0] for name, held in found.items()}


def _mismatches(source: TensorSource, name: str, wanted: torch.Tensor) -> Iterator[str]:
    shape, expected = source.shape(name), tuple(wanted.shape)
    if shape != expected:
        yield f"{name} is {list(shape)}, the model's is {list(expected)}"
    dtype = source.dtype(name)
    if dtype is None:
        yield f"{name} has an element type that PyTorch has not"
    elif not torch.can_cast(dtype, wanted.dtype):
        yield f"{name} is {dtype}, which cannot become the model's {wanted.dtype}"


def _differences(source: TensorSource, names: Sequence[str]) -> Iterator[str]:
    """Yield other names of one tensor that a source has other values under."""
    first = source.read(names[0]) if len(names) > 1 else None
    for name in names[1:]:
        other = source.read(name)
        assert first is not None
        if first.dtype != other.dtype or not torch.equal(_as_bytes(first), _as_bytes(other)):
            yield f"{names[0]} and {name} are one tensor in the model, and their values differ"


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
