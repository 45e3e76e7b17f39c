"""Tensors of files under other names, and none but these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import torch

from tierstore.formats.safetensors_files import TensorSource
from tierstore.formats.sharded_weights import open_source


class RenamedTensors:
    """Some tensors of files under the names that a model has for them.  A context manager, again and again.

    Args:
        path: of the files, as of `tierstore.formats.sharded_weights.open_source`.
        names: what each tensor is called in them, by the name that it gets.

    Attributes:
        path: what messages name.
        names: of the tensors, the new ones.
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self.path = path
        self._there = dict(names)
        self.names: Sequence[str] = tuple(self._there)
        self._opened: TensorSource | None = None

    @property
    def _source(self) -> TensorSource:
        """The files, open; opened when they are first asked for.

        Raises:
            UsageError: they cannot be read any more.
        """
        if self._opened is None:
            self._opened = open_source(self.path)
        return self._opened

    @property
    def faults(self) -> Sequence[str]:
        """What is wrong with the files as a whole."""
        return self._source.faults

    def shape(self, name: str) -> tuple[int, ...]:
        """Return a tensor's sizes without reading it."""
        return self._source.shape(self._there[name])

    def dtype(self, name: str) -> torch.dtype | None:
        """Return a tensor's element type without reading it; ``None``: one that PyTorch has not."""
        return self._source.dtype(self._there[name])

    def read(self, name: str) -> torch.Tensor:
        """Return one tensor; see `TensorFile.read`."""
        return self._source.read(self._there[name])

    def read_rows(self, name: str, begin: int, end: int) -> torch.Tensor:
        """Return some of a tensor's rows; see `TensorFile.read_rows`."""
        return self._source.read_rows(self._there[name], begin, end)

    def __enter__(self) -> Self:
        """Return the tensors."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files; whoever asks again opens them again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.__exit__(*exception)
