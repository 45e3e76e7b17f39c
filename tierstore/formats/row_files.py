"""One matrix in a file, read and written some rows at a time: ``.npy``, or a tensor of a safetensors file.

The format of ``.npy`` is NumPy's (numpy.org/doc/stable/reference/generated/numpy.lib.format.html), of which
matrices of floating point numbers in the order of C are taken.  Files are read by their descriptors and not
mapped, as in `tierstore.formats.safetensors_files`.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import torch

from tierstore.errors import BackendError, UsageError
from tierstore.formats import safetensors_headers
from tierstore.formats.safetensors_files import TensorFile
from tierstore.formats.safetensors_headers import HeaderEntry
from tierstore.quoting import listed, named, quoted
from tierstore.regular import open_regular

SUFFIXES: Final = (".npy", ".safetensors")
_NUMPY: Final = {torch.float16: "<f2", torch.float32: "<f4", torch.float64: "<f8"}
_TORCH: Final = {np.dtype(text): dtype for dtype, text in _NUMPY.items()}
_HEADERS: Final = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class MatrixLook(NamedTuple):
    """What a matrix is, before it is read or written.

    Attributes:
        num_rows: how many rows.
        width: elements of a row.
        dtype: of its elements.
    """

    num_rows: int
    width: int
    dtype: torch.dtype


class RowFile(Protocol):
    """A file that is open.

    Attributes:
        look: what its matrix is.
    """

    look: MatrixLook

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return rows: ``[end - begin, width]``, in memory of their own.

        Raises:
            BackendError: the disk failed, or the file was cut short since it was opened.
        """
        ...


@contextlib.contextmanager
def open_rows(path: Path, names: Iterable[str]) -> Iterator[RowFile]:
    """Open the matrix in a file.

    Args:
        path: its suffix says its format.
        names: what the matrix may be called where a file has several; the first that is there counts.

    Raises:
        UsageError: it cannot be read, is of another format, or has no such matrix.
    """
    if path.suffix == ".npy":
        with _open_npy(path) as file:
            yield file
    elif path.suffix == ".safetensors":
        with TensorFile(path) as tensors:
            yield _TensorRows(tensors, tuple(names))
    else:
        raise UsageError(f"{quoted(str(path), 500)}: rows are read from {' and '.join(SUFFIXES)}")


def write_rows(path: Path, name: str, look: MatrixLook, blocks: Iterable[torch.Tensor]) -> None:
    """Write a matrix, and bring it to the disk.

    Args:
        path: its suffix says its format.
        name: of the matrix, where the format has names.
        look: what it is.
        blocks: its rows, some at a time, in order.

    Raises:
        UsageError: the format cannot hold its dtype; nothing was written.
        OSError: the file system failed.
    """
    header = _npy_header(look) if path.suffix == ".npy" else _tensor_header(name, look)
    with path.open("wb") as file:
        file.write(header)
        for block in blocks:
            array: Any = block.contiguous().view(torch.uint8).numpy()
            file.write(memoryview(array))
        file.flush()
        os.fsync(file.fileno())


def check_format(suffix: str, dtype: torch.dtype) -> None:
    """Raise unless a format can hold a dtype.

    Raises:
        UsageError: it cannot.
    """
    if suffix == ".npy" and dtype not in _NUMPY:
        raise UsageError(f"NumPy has no {dtype}: use format='safetensors'")


# ---------------------------------------------------------------------- .npy


def _npy_header(look: MatrixLook) -> bytes:
    check_format(".npy", look.dtype)
    content = io.BytesIO()
    described = {"descr": _NUMPY[look.dtype], "fortran_order": False, "shape": (look.num_rows, look.width)}
    np.lib.format.write_array_header_1_0(content, described)
    return content.getvalue()


@contextlib.contextmanager
def _open_npy(path: Path) -> Iterator[RowFile]:
    with contextlib.ExitStack() as opened:
        try:
            descriptor, file_bytes = open_regular(path)
            file = opened.enter_context(open(descriptor, "rb"))  # noqa: PTH123 - it is opened already
            look = _read_npy_header(file, file_bytes)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UsageError(f"cannot read the rows in {quoted(str(path), 500)}: {why}") from error
        yield _NpyRows(path, file.fileno(), file.tell(), look)


def _read_npy_header(file: io.BufferedReader, file_bytes: int) -> MatrixLook:
    version = np.lib.format.read_magic(file)
    if version not in _HEADERS:
        raise ValueError(f"it is of version {version}; accepted: 1.0 and 2.0")
    shape, by_columns, dtype = _HEADERS[version](file)
    if len(shape) != 2 or by_columns or dtype not in _TORCH:
        order = "Fortran" if by_columns else "C"
        raise ValueError(
            f"it holds {quoted(str(dtype))} of shape {quoted(list(shape))} in the order of {order}; "
            "accepted: a matrix of float16, float32 or float64 in that of C"
        )
    found, due = file_bytes - file.tell(), shape[0] * shape[1] * dtype.itemsize
    if found != due:
        raise ValueError(f"{found} bytes follow its header, and {list(shape)} of {dtype} has {due}")
    return MatrixLook(shape[0], shape[1], _TORCH[dtype])


class _NpyRows:
    """A ``.npy`` file: see `RowFile`."""

    def __init__(self, path: Path, descriptor: int, begin: int, look: MatrixLook) -> None:
        self.look = look
        self._path = path
        self._descriptor = descriptor
        self._begin = begin

    def read(self, begin: int, end: int) -> torch.Tensor:
        """See `RowFile.read`."""
        rows = torch.empty(end - begin, self.look.width, dtype=self.look.dtype, device="cpu")
        array: Any = rows.view(torch.uint8).numpy()
        memory = memoryview(array).cast("B")
        offset, done = self._begin + begin * self.look.width * self.look.dtype.itemsize, 0
        while done < len(memory):
            try:
                count = os.preadv(self._descriptor, [memory[done:]], offset + done)
            except OSError as error:
                raise BackendError(f"{str(self._path)!r} cannot be read: {error}") from error
            if not count:
                raise BackendError(
                    f"{str(self._path)!r} was cut short while it was read: of the {len(memory)} bytes of "
                    f"rows {begin} to {end - 1}, {done} are there."
                )
            done += count
        return rows


# ---------------------------------------------------------------------- safetensors


def _tensor_header(name: str, look: MatrixLook) -> bytes:
    return safetensors_headers.build([HeaderEntry(name, look.dtype, (look.num_rows, look.width))], {})


class _TensorRows:
    """A tensor of a safetensors file: see `RowFile`."""

    def __init__(self, file: TensorFile, names: tuple[str, ...]) -> None:
        found = [name for name in names if name in file.names] or [*file.names]
        where = quoted(str(file.path), 500)
        if not found or (len(found) > 1 and found[0] not in names):
            held = listed(file.names, 4, show=named)
            raise UsageError(f"{where} holds {held}; accepted: one tensor, or one named {listed(names)}")
        self._file, self._name = file, found[0]
        shape, dtype = file.shape(self._name), file.dtype(self._name)
        if len(shape) != 2 or dtype is None:
            raise UsageError(f"{named(self._name)} of {where} is {dtype} of shape {list(shape)}, no matrix")
        self.look = MatrixLook(*shape, dtype)

    def read(self, begin: int, end: int) -> torch.Tensor:
        """See `RowFile.read`."""
        return self._file.read_rows(self._name, begin, end)
