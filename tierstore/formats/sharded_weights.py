"""Weights in several files: a directory of safetensors files, or the index that says which holds what.

The index (huggingface.co/docs/transformers/big_models, "Sharded checkpoints") is JSON: under ``weight_map``
the name of the file beside it that each tensor is in.

1. What a path means is never guessed: where a directory holds two sets of weights, it is refused.
2. Every file's header is read before anything else is done, and the file closed again: what is wrong with any
   of them is listed together.  At most two files are open while tensors are read.
3. An index says where each tensor is; a tensor that it does not name, or that its file has not, is a fault.
   Without an index a tensor that two files hold is one.
4. An index names files below its own directory, by relative paths.  That the files are links elsewhere, as in
   caches, is the file system's business.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import NamedTuple, Self

import torch

from tierstore.errors import UsageError
from tierstore.formats.bounded_json import read_json
from tierstore.formats.safetensors_files import TensorFile, TensorSource
from tierstore.quoting import listed, named, quoted

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".safetensors.index.json"
_SINGLE = "model.safetensors"
_MOST_OPEN = 2  # a module's tensors may lie on both sides of a cut


def open_source(path: Path) -> TensorSource:
    """Return what the weights under ``path`` are read from: a file, an index, or a directory of files.

    Raises:
        UsageError: there is nothing that could be read, or more than one set of weights.
    """
    if path.is_dir():
        return _open_directory(path)
    if path.suffix == ".json":
        return Shards.of_index(path)
    return TensorFile(path)


def _open_directory(path: Path) -> TensorSource:
    files = sorted(each.name for each in path.iterdir() if each.name.endswith((_SUFFIX, _INDEX_SUFFIX)))
    indices = [name for name in files if name.endswith(_INDEX_SUFFIX)]
    shards = [name for name in files if name.endswith(_SUFFIX)]
    if len(indices) > 1 or (indices and _SINGLE in shards):
        raise UsageError(
            f"{str(path)!r} holds more than one set of weights: {', '.join([*indices, _SINGLE][:4])}. "
            "Name the file or the index that is meant."
        )
    if indices:
        return Shards.of_index(path / indices[0])
    if _SINGLE in shards or len(shards) == 1:
        return TensorFile(path / (_SINGLE if _SINGLE in shards else shards[0]))
    if not shards:
        raise UsageError(
            f"{str(path)!r} holds no weights: accepted is a directory with *{_SUFFIX} files, with or without "
            f"an index (*{_INDEX_SUFFIX}) of them."
        )
    return Shards(path, path, shards)


class _ShardLook(NamedTuple):
    """What a file's header says of one tensor, and which file that is."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None


class Shards:
    """Several safetensors files that tensors are read from one at a time.  A context manager.

    Args:
        path: what messages name.
        directory: of the files.
        files: their names in it.
        where: which file each tensor is in; ``None``: no index says so.

    Attributes:
        names: of all tensors of all files.
        faults: what is wrong with them: see the module's rules.
    """

    def __init__(
        self, path: Path, directory: Path, files: Sequence[str], where: Mapping[str, object] | None = None
    ) -> None:
        self.path = path
        self._directory = directory
        self._looks: dict[str, _ShardLook] = {}
        self._open: OrderedDict[str, TensorFile] = OrderedDict()
        faults: list[str] = []
        for file in files:
            faults += self._look_into(file, where)
        if where is not None:
            faults += [
                f"missing in {quoted(file)}: {named(name)}"
                for name, file in where.items()
                if name not in self._looks
            ]
        self.faults: Sequence[str] = tuple(faults)

    @classmethod
    def of_index(cls, path: Path) -> Shards:
        """Return the files that an index names.

        Raises:
            UsageError: it is no index, or names what is not below its directory.
        """
        try:
            document = read_json(path)
        except (OSError, ValueError) as error:
            raise UsageError(f"cannot read the index {str(path)!r}: {error}") from error
        where = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(where, dict) or not where:
            raise UsageError(
                f"{str(path)!r} is no index of weights: it has no 'weight_map' from names to files."
            )
        foreign = sorted({quoted(file) for file in where.values() if not _is_below(file)})
        if foreign:
            raise UsageError(
                f"the index {str(path)!r} names {listed(foreign, 4, show=str)}: accepted are names of files "
                "in its own directory or below, as relative paths."
            )
        return cls(path, path.parent, list(dict.fromkeys(where.values())), where)

    def _look_into(self, file: str, where: Mapping[str, object] | None) -> list[str]:
        """Take in what a file's header says; return what is wrong with it."""
        try:
            opened = TensorFile(self._directory / file)
        except UsageError as error:
            return [str(error)]
        faults: list[str] = []
        with opened:
            for name in opened.names:
                if where is not None and where.get(name) != file:
                    faults.append(_misplaced(name, file, where))
                elif name in self._looks:
                    faults.append(
                        f"{named(name)} is in {quoted(self._looks[name].file)} and in {quoted(file)}"
                    )
                else:
                    self._looks[name] = _ShardLook(file, opened.shape(name), opened.dtype(name))
        return faults

    @property
    def names(self) -> Sequence[str]:
        """Of all tensors."""
        return tuple(self._looks)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        return self._looks[name].shape

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type without reading it; ``None``: one that PyTorch has not."""
        return self._looks[name].dtype

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor.

        Raises:
            UsageError: its file cannot be read any more.
        """
        return self._file_of(name).read(name)

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return some of a tensor's rows; see `TensorFile.read_rows`.

        Raises:
            UsageError: its file cannot be read any more.
        """
        return self._file_of(name).read_rows(name, begin, end)

    def _file_of(self, name: str) -> TensorFile:
        """Return the file that has a tensor, open."""
        file = self._looks[name].file
        if file not in self._open:
            while len(self._open) >= _MOST_OPEN:
                self._open.popitem(last=False)[1].__exit__(None, None, None)
            self._open[file] = TensorFile(self._directory / file).__enter__()
        self._open.move_to_end(file)
        return self._open[file]

    def __enter__(self) -> Self:
        """Return the files; each is opened when it is read."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close those that are open."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


def _is_below(file: object) -> bool:
    """Say whether an index may name ``file``: a relative path that does not leave its directory."""
    if not isinstance(file, str) or not file or "\0" in file:
        return False
    return not any(
        path.is_absolute() or path.drive or ".." in path.parts
        for path in (PurePosixPath(file), PureWindowsPath(file))
    )


def _misplaced(name: str, file: str, where: Mapping[str, object]) -> str:
    if name in where:
        return f"{named(name)} is in {quoted(file)}, and the index says {quoted(where[name])}"
    return f"{named(name)} is in {quoted(file)}, and the index does not name it"
