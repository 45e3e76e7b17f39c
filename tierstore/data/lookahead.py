"""A loader whose batches are told to tables before they come.

1. Batches, their order and number, and what is raised are the loader's: what it raises for a batch that was
   asked for ahead comes when that batch is due, after those before it.
2. When a batch is handed out, tables know it and ``depth`` that follow it; of no batch they are told twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, Final, Generic, NamedTuple, TypeVar

import torch

from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.quoting import quoted
from tierstore.torch_private import tree_flatten

BatchT = TypeVar("BatchT")
Where = Hashable | Callable[[Any], torch.Tensor]
"""Of a batch, where its ids are: a key, an index, or a function that returns them."""

_INTEGERS: Final = (torch.int64, torch.int32)


class _Due(NamedTuple, Generic[BatchT]):
    """A batch that was asked for ahead, or what was raised in its place."""

    batch: BatchT | None
    error: Exception | None


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
        """Yield the loader's batches."""
        batches = iter(self.loader)
        due: deque[_Due[BatchT]] = deque()
        more = True
        while more or due:
            while more and len(due) <= self._depth:
                more = self._ask(batches, due)
            if not due:
                return
            batch, error = due.popleft()
            if error is not None:
                raise error
            yield batch  # type: ignore[misc]  # None only where the loader's is

    def _ask(self, batches: Iterator[BatchT], due: deque[_Due[BatchT]]) -> bool:
        """Take the next batch and tell it to the tables; say whether more may come."""
        try:
            batch = next(batches)
        except StopIteration:
            return False
        except Exception as error:  # noqa: BLE001 - it is raised where it is due
            due.append(_Due(None, error))
            return False
        try:
            for table, where in self._tables.items():
                table.prefetch(_ids_in(batch, where))
        except Exception as error:  # noqa: BLE001 - likewise
            due.append(_Due(None, error))
            return False
        due.append(_Due(batch, None))
        return True


def lookahead(
    loader: Iterable[BatchT], tables: EmbeddingTable | Mapping[EmbeddingTable, Where], depth: int = 1
) -> Lookahead[BatchT]:
    """Let tables bring the rows of coming batches while those before are computed with.

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
        UsageError: while it is iterated: ids are not where they are said to be.
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
