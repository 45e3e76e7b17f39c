"""Safetensors files, written and read one tensor at a time, and what they must hold to fit a model.

`tierstore.formats.safetensors_headers` says what their headers are.  A file is read by its
descriptor, never mapped into memory: one that is cut short meanwhile is an error of the call that reads it,
not the process's end.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from tierstore.errors import BackendError, CapacityError, UsageError
from tierstore.formats import safetensors_headers
from tierstore.formats.safetensors_headers import LENGTH_BYTES, HeaderEntry, TensorLook
from tierstore.quoting import listed, named, quoted
from tierstore.regular import open_regular

__all__ = ["HeaderEntry", "TensorFile", "TensorSource", "check_names", "pack", "unpack", "write_file"]

_PIECE_BYTES = 1 << 30  # one call reads at most 2 GiB
_MOST_FAULTS = 1000
_COMPARED_BYTES = 1 << 22  # of each of two tensors, at a time


InBlocks = Iterator[torch.Tensor]
"""A tensor that comes in blocks of its rows, one after another."""


def write_file(
    path: Path,
    entries: Sequence[HeaderEntry],
    tensors: Iterable[torch.Tensor | InBlocks],
    metadata: Mapping[str, str],
) -> None:
    """Write ``tensors``, which come in the order of ``entries``, and bring them to the disk.

    Only one tensor, or one block of one, is looked at at a time.

    Raises:
        UsageError: a name or a dtype that the format cannot hold; nothing was written.
        OSError: the file system failed.
    """
    header = safetensors_headers.build(entries, metadata)
    with path.open("wb") as file:
        file.write(header)
        for entry, tensor in zip(entries, tensors, strict=True):
            blocks = (tensor,) if isinstance(tensor, torch.Tensor) else tensor
            rows = 0
            for block in blocks:
                assert (tuple(block.shape[1:]), block.dtype) == (tuple(entry.shape[1:]), entry.dtype), (
                    entry.name
                )
                rows += block.shape[0] if block.dim() else 1
                file.write(_bytes_of(block))
            assert rows == (entry.shape[0] if entry.shape else 1), entry.name
        file.flush()
        os.fsync(file.fileno())


def pack(
    entries: Sequence[HeaderEntry], tensors: Iterable[torch.Tensor], metadata: Mapping[str, str]
) -> torch.Tensor:
    """Return what `write_file` would write, as bytes in host memory.

    Raises:
        UsageError: a name or a dtype that the format cannot hold.
    """
    content = bytearray(safetensors_headers.build(entries, metadata))
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
        header_bytes = safetensors_headers.length_of(bytes(content[:LENGTH_BYTES]), len(content))
        begin = LENGTH_BYTES + header_bytes
        header = safetensors_headers.parse(bytes(content[LENGTH_BYTES:begin]), len(content) - begin)
        _require_dtypes(header.tensors)
        tensors = {name: _cut(flat[begin:], look) for name, look in header.tensors.items()}
        return tensors, dict(header.metadata)
    except (ValueError, TypeError, RuntimeError) as error:
        raise UsageError(f"these {flat.numel()} bytes are not packed tensors: {error}") from error


def _require_dtypes(tensors: Mapping[str, TensorLook]) -> None:
    faults = safetensors_headers.faults_of_dtypes(tensors.items())
    if faults:
        raise ValueError(listed(faults, show=str))


def _cut(flat: torch.Tensor, look: TensorLook) -> torch.Tensor:
    assert look.dtype is not None
    return flat[look.begin : look.end].clone().view(look.dtype).reshape(look.shape)


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

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return some of a tensor's rows, in memory of their own."""
        ...

    def __enter__(self) -> Self:
        """Open it."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        ...


class TensorFile:
    """A safetensors file that tensors are read from one at a time.  A context manager.

    Attributes:
        path: of the file.
        names: of its tensors, in the order of their bytes.
        metadata: texts that it has beside them.

    Raises:
        UsageError: it cannot be read, or is none: every rule of `safetensors_headers` is checked.
    """

    faults: Sequence[str] = ()

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            descriptor, file_bytes = open_regular(path)
            self._file = io.FileIO(descriptor)
            try:
                header = self._read_header(file_bytes)
            except BaseException:
                self._file.close()
                raise
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UsageError(f"cannot read the weights in {quoted(str(path), 500)}: {why}") from error
        self._looks = header.tensors
        self.names = tuple(header.tensors)
        self.metadata = header.metadata

    def _read_header(self, file_bytes: int) -> safetensors_headers.Header:
        prefix = os.pread(self._file.fileno(), LENGTH_BYTES, 0)
        header_bytes = safetensors_headers.length_of(prefix, file_bytes)
        content = os.pread(self._file.fileno(), header_bytes, LENGTH_BYTES)
        if len(content) != header_bytes:
            raise ValueError(f"of the {header_bytes} bytes of its header {len(content)} are there")
        self._begin = LENGTH_BYTES + header_bytes
        return safetensors_headers.parse(content, file_bytes - self._begin)

    def __enter__(self) -> Self:
        """Open it."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close it."""
        self._file.close()

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        return self._looks[name].shape

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type without reading it; ``None``: one that PyTorch has not."""
        return self._looks[name].dtype

    def require_dtypes(self) -> None:
        """See to it that every tensor can be read.

        Raises:
            UsageError: PyTorch has not the dtypes of some; they are listed.
        """
        try:
            _require_dtypes(self._looks)
        except ValueError as error:
            raise UsageError(f"cannot read the weights in {quoted(str(self.path), 500)}: {error}") from error

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor, in memory of its own.

        Raises:
            UsageError: PyTorch has not its dtype.
            CapacityError: there is no memory for it.
            BackendError: the disk failed, or the file was cut short since it was opened.
        """
        look = self._looks[name]
        return self._read(name, look, look.shape, look.begin)

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return some of a tensor's rows, in memory of their own.

        Args:
            name: of the tensor, which has a dimension at least.
            begin: the first row.
            end: the row after the last; at most as many as there are.

        Raises:
            UsageError: PyTorch has not its dtype.
            CapacityError: there is no memory for them.
            BackendError: the disk failed, or the file was cut short since it was opened.
        """
        look = self._looks[name]
        row_bytes = (look.end - look.begin) // max(look.shape[0], 1)
        return self._read(name, look, (end - begin, *look.shape[1:]), look.begin + begin * row_bytes)

    def _read(self, name: str, look: TensorLook, shape: tuple[int, ...], begin: int) -> torch.Tensor:
        if look.dtype is None:
            raise UsageError(f"{named(name)} is {quoted(look.kind)}, a dtype that PyTorch has not.", key=name)
        nbytes = math.prod(shape) * look.dtype.itemsize
        if not nbytes:
            return torch.empty(shape, dtype=look.dtype, device="cpu")
        try:
            array: Any = np.empty(
                nbytes, dtype=np.uint8
            )  # asks for huge pages, unlike torch: five times as fast
        except MemoryError as error:
            raise CapacityError(
                f"no memory for the {nbytes} bytes of {named(name)}", key=name, needed_bytes=nbytes
            ) from error
        self._fill(memoryview(array), self._begin + begin, name)
        return torch.from_numpy(array).view(look.dtype).reshape(shape)

    def _fill(self, memory: memoryview, offset: int, name: str) -> None:
        done = 0
        while done < len(memory):
            try:
                count = os.preadv(self._file.fileno(), [memory[done : done + _PIECE_BYTES]], offset + done)
            except OSError as error:
                raise BackendError(
                    f"{named(name)} of {str(self.path)!r} cannot be read: {error}", key=name
                ) from error
            if not count:
                raise BackendError(
                    f"{str(self.path)!r} was cut short while it was read: of the {len(memory)} bytes of "
                    f"{named(name)} {done} are there. What was read of it before is no longer what it holds.",
                    key=name,
                )
            done += count


def check_names(
    source: TensorSource, wanted: Mapping[str, torch.Tensor], aliases: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return under which name each wanted tensor is in a source.

    Args:
        source: that is to be read.
        wanted: the tensors that are to get values, by name.
        aliases: other names of a tensor, any of which will do; several have to hold the same bytes.

    Raises:
        UsageError: names are missing, not expected, or of another shape or kind; all are listed, of
            more than a thousand the first.
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
            faults.append(f"missing: {named(name)}")
    faults += [f"not in the model: {named(name)}" for name in source.names if name not in known]
    for name, held in found.items():
        mismatches = [fault for each in held for fault in _mismatches(source, each, wanted[name])]
        faults += mismatches or _differences(source, held)
    if faults:
        raise UsageError(
            f"{str(source.path)!r} does not fit the model: "
            + listed(faults, _MOST_FAULTS, show=str, separator="; ")
        )
    return {name: held[0] for name, held in found.items()}


def _mismatches(source: TensorSource, name: str, wanted: torch.Tensor) -> Iterator[str]:
    shape, expected = source.shape(name), tuple(wanted.shape)
    if shape != expected:
        yield f"{named(name)} is {quoted(list(shape))}, the model's is {list(expected)}"
    dtype = source.dtype(name)
    if dtype is None:
        yield f"{named(name)} has an element type that PyTorch has not"
    elif not torch.can_cast(dtype, wanted.dtype):
        yield f"{named(name)} is {dtype}, which cannot become the model's {wanted.dtype}"


def _differences(source: TensorSource, names: Sequence[str]) -> Iterator[str]:
    """Yield other names of one tensor that a source has other values under."""
    for name in names[1:]:
        are_equal = source.dtype(names[0]) == source.dtype(name) and all(
            torch.equal(one, other) for one, other in _pieces(source, names[0], name)
        )
        if not are_equal:
            yield f"{names[0]} and {name} are one tensor in the model, and their values differ"


def _pieces(source: TensorSource, one: str, other: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the bytes of two tensors of one shape and type; of large ones a few megabytes at a time."""
    shape, dtype = source.shape(one), source.dtype(one)
    assert dtype is not None
    if not shape:
        yield _as_bytes(source.read(one)), _as_bytes(source.read(other))
        return
    step = max(1, _COMPARED_BYTES // max(1, math.prod(shape[1:]) * dtype.itemsize))
    for begin in range(0, shape[0], step):
        end = min(begin + step, shape[0])
        yield _as_bytes(source.read_rows(one, begin, end)), _as_bytes(source.read_rows(other, begin, end))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)
