"""A loader whose batches are told to tables before they come.

1. Batches, their order and number, and what is raised are the loader's: what it raises for a batch that was
   asked for ahead comes when that batch is due, after those before it.
2. When a batch is handed out, tables know it and ``depth`` that follow it; of no batch they are told twice.
3. Where asking ahead would change what is computed, and this can be seen, it is refused
   (`tierstore.data.foreseen`, `tierstore.nn.asked_ahead`).
4. Who stops and goes on, with the same iterator or with another lookahead over it, loses nothing
   (`tierstore.data.streams`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from tierstore.data.foreseen import BatchWatch
from tierstore.data.streams import due_of
from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.nn.asked_ahead import asking_ahead
from tierstore.quoting import quoted
from tierstore.torch_private import tree_flatten

BatchT = TypeVar("BatchT")
Where = Hashable | Callable[[Any], torch.Tensor]
"""Of a batch, where its ids are: a key, an index, or a function that returns them."""

_INTEGERS: Final = (torch.int64, torch.int32)


class _Due(NamedTuple, Generic[BatchT]):
    """A batch that was asked for ahead, or what was raised in its place.

    Attributes:
        batch: that.
        error: or this.
        told: where the ids of those tables are that were told of it.
    """

    batch: BatchT | None
    error: Exception | None
    told: Mapping[EmbeddingTable, Where | None]


class Lookahead(Generic[BatchT]):
    """See `lookahead`.

    Attributes:
        loader: what it reads.
    """

    def __init__(
        self, loader: Iterable[BatchT], tables: Mapping[EmbeddingTable, Where | None], depth: int
    ) -> None:
        self.loader = loader
        self._tables = dict(tables)
        self._depth = depth

    def __len__(self) -> int:
        """Return how many batches the loader says that it has."""
        return len(self.loader)  # type: ignore[arg-type]  # it raises as the loader's does

    def __iter__(self) -> Iterator[BatchT]:
        """Return what yields the loader's batches."""
        return _Ahead(self.loader, self._tables, self._depth)


class _Ahead(Generic[BatchT]):
    """One way through a loader."""

    def __init__(
        self, loader: Iterable[BatchT], tables: Mapping[EmbeddingTable, Where | None], depth: int
    ) -> None:
        self._tables = tables
        self._depth = depth
        self._batches = iter(loader)
        self._due: deque[_Due[BatchT]] = due_of(loader, self._batches)
        self._is_at_end = False
        self._refused: UsageError | None = None

    def __iter__(self) -> Iterator[BatchT]:
        """Return itself."""
        return self

    def __next__(self) -> BatchT:
        """Hand a batch out, and ask for those that follow it."""
        if self._refused is not None:
            raise self._refused
        self._tell_more()
        try:
            while not self._is_at_end and len(self._due) <= self._depth and not self._is_broken:
                self._ask()
        except UsageError as refused:
            self._refused = refused
            raise
        if not self._due:
            self._is_at_end = False  # as the loader's own iterator, which may have more one day
            raise StopIteration
        batch, error, _ = self._due.popleft()
        if error is not None:
            raise error
        return batch  # type: ignore[return-value]  # None only where the loader's is

    @property
    def _is_broken(self) -> bool:
        """Whether the loader has raised: nobody asks it for more before that was handed out."""
        return bool(self._due) and self._due[-1].error is not None

    def _tell_more(self) -> None:
        """Tell our tables what another lookahead over the same iterator has asked for."""
        for place, due in enumerate(self._due):
            if due.error is None and due.told != self._tables:
                self._due[place] = self._told(due.batch)  # type: ignore[arg-type]  # likewise

    def _ask(self) -> None:
        """Take the next batch and tell it to the tables."""
        watch = BatchWatch([each.batch for each in self._due])
        try:
            with asking_ahead() if self._due else contextlib.nullcontext():
                batch = next(self._batches)
        except StopIteration:
            self._is_at_end = True
        except Exception as error:  # noqa: BLE001 - it is raised where it is due
            self._due.append(_Due(None, error, self._tables))
        else:
            self._due.append(self._told(batch))
        watch.end()

    def _told(self, batch: BatchT) -> _Due[BatchT]:
        try:
            for table, where in self._tables.items():
                table.prefetch(_ids_in(batch, where))
        except Exception as error:  # noqa: BLE001 - likewise
            return _Due(None, error, self._tables)
        return _Due(batch, None, self._tables)


def lookahead(
    loader: Iterable[BatchT], tables: EmbeddingTable | Mapping[EmbeddingTable, Where], depth: int = 1
) -> Lookahead[BatchT]:
    """Let tables bring the rows of coming batches while those before are computed with.

    What the loader does for a batch, it does ``depth`` batches earlier than without.  So its batches are
    those of the bare loader, and what is computed the same bit for bit, if they depend neither on what the
    program does in between nor on when they are made.  Refused, as it can be seen: a loader that draws from
    the generators that the program draws from; that writes to tensors or arrays of batches that it has given
    before; that looks up a table that learns.  What cannot be seen: a loader that reads anything else that
    steps change (other parameters, files that they write), or writes to batches inside of objects that
    ``torch.utils._pytree`` does not know.

    An iterator of it that is kept goes on where it was; so does another lookahead over the same iterator (a
    generator, say).  Who reads such an iterator directly is given what comes ``depth`` batches later.  To
    resume, count the batches that were handed out and let the loader skip these: what a loader says of itself
    (its ``state_dict``) is ``depth`` batches ahead.

    Args:
        loader: a ``DataLoader``, or anything that yields batches; workers and pinned memory are its matter.
        tables: a table, if each batch has one tensor of integers, which are its ids; else where each table's
            ids are: a key or index of the batch, or a function of it.
        depth: how many batches ahead, at least 1.

    Returns:
        what yields the loader's batches, as often as it is iterated.

    Raises:
        TypeError: there are no tables, or ``depth`` is no int.
        ConfigError: ``depth`` is below 1.
        UsageError: while it is iterated: ids are not where they are said to be; or the loader does what it
            must not do ahead, which is raised before the step on a batch that was handed out before.
    """
    if isinstance(depth, bool) or not isinstance(depth, int):
        raise TypeError(f"depth={quoted(depth)}: it has to be an int")
    if depth < 1:
        raise ConfigError(f"depth={depth}: it has to be at least 1")
    if isinstance(tables, EmbeddingTable):
        return Lookahead(loader, {tables: None}, depth)
    given: object = tables
    if not isinstance(given, Mapping) or not all(isinstance(each, EmbeddingTable) for each in given):
        raise TypeError(
            f"tables={quoted(given)}: it has to be an EmbeddingTable, or a mapping from some to where in a "
            "batch their ids are"
        )
    return Lookahead(loader, tables, depth)


def _ids_in(batch: Any, where: Where | None) -> torch.Tensor:  # noqa: ANN401 - whatever the loader's are
    """Return a table's ids."""
    if where is None:
        return _only_integers_of(batch)
    if callable(where):
        found: object = where(batch)
    else:
        try:
            found = batch[where]
        except (LookupError, TypeError) as error:
            raise UsageError(
                f"a batch has nothing at {quoted(where)}: {type(batch).__name__}, {error}"
            ) from error
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"at {quoted(where)} of a batch there is {quoted(found)}, no tensor of ids")
    return found


def _only_integers_of(batch: object) -> torch.Tensor:
    values, _ = tree_flatten(batch)
    tensors = [each for each in values if isinstance(each, torch.Tensor)]
    found = [each for each in tensors if each.dtype in _INTEGERS]
    if len(found) != 1:
        there = ", ".join(f"{each.dtype} {list(each.shape)}" for each in tensors) or "no tensor"
        raise UsageError(
            f"a batch has {len(found)} tensors of integers ({there}): say where the table's ids are, as in "
            "lookahead(loader, {table: 0})"
        )
    return found[0]
