"""Tables as files: shards of rows in the order of their ids, written and read a block at a time.

1. A directory holds ``rows-00001-of-00002.npy`` and so on; with states, files named by these beside them.
2. It is written under another name and renamed when it is complete: it is there as a whole, or not at all.
3. All shards are looked at before a row is changed: numbers, shapes and types have to be the table's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch

from tierstore.errors import BackendError, ConfigError, UsageError
from tierstore.formats.row_files import SUFFIXES, MatrixLook, check_format, open_rows, write_rows
from tierstore.nn.row_blocks import described, parts_of, write_part
from tierstore.quoting import listed, quoted
from tierstore.tables import ROWS, RowStore

_FORMATS: Final = {suffix[1:]: suffix for suffix in SUFFIXES}
_SHARD: Final = re.compile(
    r"(?P<column>\w+)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.npy|\.safetensors)"
)
_OF_OTHERS: Final = (ROWS, "weight")
"""What the rows may be called in a file: as we call them, and as PyTorch does."""


class _Shard(NamedTuple):
    """A file, and which rows of the table are in it."""

    path: Path
    span: slice


Blocks = Callable[[str, Iterable[slice]], Iterator[tuple[slice, torch.Tensor]]]
"""Yields all rows of a column in some spans of ids, which ascend."""


def export_table(
    store: RowStore,
    path: Path,
    format_: str,
    shard_bytes: int,
    state: bool,
    blocks: Blocks,
) -> None:
    """Write a table into a new directory.

    Args:
        store: of the table.
        path: of the directory; one that is there has to be empty.
        format_: ``"npy"`` or ``"safetensors"``.
        shard_bytes: what the rows of a file come to at most, but for one row.
        state: whether to write the states of its optimizer, too.
        blocks: reads all of its rows, wherever they are.

    Raises:
        ConfigError: the format is unknown, or the size is not above 0.
        UsageError: the directory is there and not empty, or the format cannot hold the table's type.
        BackendError: the file system failed; nothing is left there.
    """
    if format_ not in _FORMATS:
        raise ConfigError(f"format={quoted(format_)}: it has to be {' or '.join(map(repr, _FORMATS))}")
    if shard_bytes <= 0:
        raise ConfigError(f"shard_bytes={shard_bytes}: it has to be more than 0")
    check_format(_FORMATS[format_], store.dtype)
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise UsageError(f"{quoted(str(path), 500)} is there already: export writes a new directory")
    columns = [column.name for column in store.columns] if state else [ROWS]
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.mkdir(parents=True)
        for column in columns:
            _write_shards(store, column, partial, _FORMATS[format_], shard_bytes, blocks)
        _sync(partial)
        partial.rename(path)
        _sync(path.parent)
    except OSError as error:
        raise BackendError(f"the {described(store)} cannot be written to {str(path)!r}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def load_table(store: RowStore, path: Path, state: bool, agree: Callable[[], None]) -> None:
    """Read rows from a file, or from a directory of shards.

    Args:
        store: of the table.
        path: of a ``.npy`` or safetensors file, or of what `export_table` has written.
        state: whether to read the states of its optimizer, too; a directory has to have them all.
        agree: called when all is there, before anything is changed.

    Raises:
        UsageError: there is nothing to read, or numbers, shapes or types are not the table's; nothing was
            changed.
        BackendError: a file cannot be read any more; rows before it are changed.
    """
    columns = [column.name for column in store.columns] if state else [ROWS]
    shards = {column: _shards_of(store, column, path) for column in columns}
    agree()
    for column, each in shards.items():
        for shard in each:
            with open_rows(shard.path, _names_of(column)) as rows:
                for part in parts_of(store, shard.span):
                    begin, end = part.start - shard.span.start, part.stop - shard.span.start
                    write_part(store, column, part, rows.read(begin, end))


def _write_shards(
    store: RowStore, column: str, directory: Path, suffix: str, shard_bytes: int, blocks_of: Blocks
) -> None:
    rows = max(1, shard_bytes // (store.width * store.dtype.itemsize))
    spans = [slice(begin, min(begin + rows, store.num_rows)) for begin in range(0, store.num_rows, rows)]
    blocks = blocks_of(column, (part for span in spans for part in parts_of(store, span)))
    for number, span in enumerate(spans, 1):
        look = MatrixLook(span.stop - span.start, store.width, store.dtype)
        file = directory / f"{column}-{number:05}-of-{len(spans):05}{suffix}"
        write_rows(file, column, look, _until(span.stop, blocks))


def _until(end: int, blocks: Iterator[tuple[slice, torch.Tensor]]) -> Iterator[torch.Tensor]:
    """Yield blocks up to the one whose span ends there; the next ones stay."""
    for span, block in blocks:
        yield block
        if span.stop == end:
            return


def _shards_of(store: RowStore, column: str, path: Path) -> list[_Shard]:
    """Return the files of a column; what they hold is what the table takes."""
    files = _files_of(column, path) if path.is_dir() else [path]
    shards: list[_Shard] = []
    faults: list[str] = []
    begin = 0
    for file in files:
        with open_rows(file, _names_of(column)) as rows:
            look = rows.look
        if (look.width, look.dtype) != (store.width, store.dtype):
            due = f"{store.dtype} of width {store.width}"
            faults.append(f"{file.name} holds {look.dtype} of width {look.width}, not {due}")
        shards.append(_Shard(file, slice(begin, begin + look.num_rows)))
        begin += look.num_rows
    if begin != store.num_rows:
        faults.append(f"there are {begin} rows, not {store.num_rows}")
    if faults:
        what = listed(faults, 4, show=str, separator="; ")
        raise UsageError(f"{str(path)!r} does not fit the {described(store)}: {column}: {what}")
    return shards


def _files_of(column: str, directory: Path) -> list[Path]:
    """Return the shards of a column, which are all there, in order."""
    found = [match for each in directory.iterdir() if (match := _SHARD.fullmatch(each.name))]
    found = sorted((each for each in found if each["column"] == column), key=lambda each: int(each["number"]))
    if not found:
        raise UsageError(
            f"{str(directory)!r} holds no shards of {column!r}, such as {column}-00001-of-00001.npy"
        )
    numbers, counts = [int(each["number"]) for each in found], {int(each["count"]) for each in found}
    suffixes = {each["suffix"] for each in found}
    if len(counts) > 1 or len(suffixes) > 1 or numbers != list(range(1, max(counts) + 1)):
        names = listed([each[0] for each in found], 4, show=str)
        raise UsageError(
            f"{str(directory)!r} holds {names}: these are not all shards of one export of {column!r}"
        )
    return [directory / each[0] for each in found]


def _names_of(column: str) -> tuple[str, ...]:
    return _OF_OTHERS if column == ROWS else (column,)


def _sync(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
