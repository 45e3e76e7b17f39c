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
from typing import Any

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


class TensorFile:
    """A safetensors file that tensors are read from one at a time.  A context manager.

    Raises:
        UsageError: it cannot be read.
    """

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

    def __enter__(self) -> TensorFile:
        """Open it."""
        self._file.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._file.__exit__(*exception)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor."""
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor


def check_names(
    file: TensorFile, wanted: Mapping[str, torch.Tensor], aliases: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return under which name each wanted tensor is in a file.

    Args:
        file: that is to be read.
        wanted: the tensors that are to get values, by name.
        aliases: other names of a tensor, any of which will do.

    Raises:
        UsageError: names are missing, not expected, or of another shape; all are listed.
    """
    there = set(file.names)
    found: dict[str, str] = {}
    missing: list[str] = []
    for name in wanted:
        names = [each for each in (name, *aliases.get(name, ())) if each in there]
        if names:
            found[name] = names[0]
        else:
            missing.append(name)
    known = {each for name in wanted for each in (name, *aliases.get(name, ()))}
    faults = [f"missing: {name}" for name in missing]
    faults += [f"not in the model: {name}" for name in file.names if name not in known]
    faults += _shape_faults(file, wanted, found)
    if faults:
        raise UsageError(f"{str(file.path)!r} does not fit the model: " + "; ".join(faults))
    return found


def _shape_faults(
    file: TensorFile, wanted: Mapping[str, torch.Tensor], found: Mapping[str, str]
) -> Iterator[str]:
    for name, other in found.items():
        shape, expected = file.shape(other), tuple(wanted[name].shape)
        if shape != expected:
            yield f"{other} is {list(shape)}, the model's is {list(expected)}"
