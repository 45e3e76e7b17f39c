"""Loaders that tell tables what comes: the loader's batches, and each of them told in time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tierstore.data import lookahead
from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable


class Told(EmbeddingTable):
    """A table that notes what it is told."""

    def __init__(self) -> None:
        super().__init__(1000, 2)
        self.told: list[list[int]] = []

    def prefetch(self, ids: Tensor) -> None:
        super().prefetch(ids)
        self.told.append(ids.flatten().tolist())


def _batches(count: int) -> list[Tensor]:
    return [torch.tensor([number, number + 100]) for number in range(count)]


@given(count=st.integers(0, 9), depth=st.integers(1, 12))
def test_a_batch_is_told_depth_batches_before_it_comes_and_once(count: int, depth: int) -> None:
    table, batches = Told(), _batches(count)
    loader = lookahead(batches, table, depth)
    assert len(loader) == count
    for _ in range(2):
        table.told.clear()
        seen = []
        for number, batch in enumerate(loader):
            seen.append(batch)
            assert len(table.told) == min(count, number + 1 + depth)
        assert all(found is batch for found, batch in zip(seen, batches, strict=True))
        assert table.told == [batch.tolist() for batch in batches]


@given(count=st.integers(0, 6), depth=st.integers(1, 8))
def test_what_the_loader_raises_comes_when_it_is_due(count: int, depth: int) -> None:
    def broken() -> Iterator[Tensor]:
        yield from _batches(count)
        raise OSError("a file is gone")

    one_by_one = iter(lookahead(broken(), Told(), depth))
    for number in range(count):
        assert next(one_by_one)[0] == number
    with pytest.raises(OSError, match="a file is gone"):
        next(one_by_one)
    with pytest.raises(StopIteration):
        next(one_by_one)


def test_who_stops_early_leaves_the_rest() -> None:
    taken: list[int] = []

    def endless() -> Iterator[Tensor]:
        number = 0
        while True:
            taken.append(number)
            yield torch.tensor([number])
            number += 1

    for batch in lookahead(endless(), Told(), 2):
        if batch[0] == 3:
            break
    assert taken == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_of_pytorch(workers: int) -> None:
    ids, labels = torch.arange(20).view(10, 2), torch.rand(10)
    loader = DataLoader(TensorDataset(ids, labels), batch_size=4, num_workers=workers)
    table = Told()
    found = list(lookahead(loader, {table: 0}))
    assert [len(batch[0]) for batch in found] == [4, 4, 2]
    assert torch.equal(torch.cat([batch[0] for batch in found]), ids)
    assert [each for told in table.told for each in told] == list(range(20))


class Fields(NamedTuple):
    """A batch."""

    wide: Tensor
    deep: Tensor
    label: Tensor


BATCH = Fields(torch.tensor([1, 2]), torch.tensor([[3]], dtype=torch.int32), torch.tensor([0.5]))
WHERE: dict[str, tuple[Any, Any, list[int]]] = {
    "an index": (BATCH, 1, [3]),
    "a key": ({"wide": BATCH.wide, "deep": BATCH.deep}, "wide", [1, 2]),
    "a function": (BATCH, lambda batch: torch.cat([batch.wide, batch.deep[0]]), [1, 2, 3]),
}


@pytest.mark.parametrize("kind", WHERE)
def test_ids_are_where_they_are_said_to_be(kind: str) -> None:
    batch, where, expected = WHERE[kind]
    table, other = Told(), Told()
    assert list(lookahead([batch], {table: where, other: lambda each: BATCH.wide})) == [batch]
    assert (table.told, other.told) == ([expected], [[1, 2]])


@pytest.mark.parametrize(
    "batch", [BATCH.wide, (BATCH.label, BATCH.wide), {"x": {"y": [BATCH.wide]}, "z": BATCH.label, "n": 3}]
)
def test_of_one_table_the_only_integers_are_the_ids(batch: Any) -> None:  # noqa: ANN401
    table = Told()
    list(lookahead([batch], table))
    assert table.told == [[1, 2]]


WRONG: dict[str, tuple[Callable[[EmbeddingTable], Any], Any, str]] = {
    "two": (
        lambda table: table,
        BATCH,
        r"has 2 tensors of integers \(torch.int64 \[2\], torch.int32 \[1, 1\], ",
    ),
    "none": (lambda table: table, [1.0], r"has 0 tensors of integers \(no tensor\): say where"),
    "no key": (lambda table: {table: "ids"}, {"x": BATCH.wide}, "a batch has nothing at 'ids'"),
    "no index": (lambda table: {table: 5}, BATCH, "a batch has nothing at 5"),
    "no tensor": (lambda table: {table: 0}, [[1, 2]], r"at 0 of a batch there is \[1, 2\], no tensor of ids"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_ids_that_are_not_there_are_an_error_when_their_batch_is_due(kind: str) -> None:
    tables, batch, message = WRONG[kind]
    table = Told()
    batches = iter(lookahead([torch.tensor([1])] * (kind in {"two", "none"}) + [batch], tables(table)))
    if kind in {"two", "none"}:
        assert next(batches).tolist() == [1]
    with pytest.raises(UsageError, match=message):
        next(batches)


def test_ids_of_a_wrong_type_are_an_error_of_the_table() -> None:
    with pytest.raises(TypeError, match=r"ids are of torch\.float32"):
        list(lookahead([torch.ones(1)], {Told(): lambda batch: batch}))


def test_arguments_that_are_wrong_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="depth=0: it has to be at least 1"):
        lookahead([], Told(), 0)
    with pytest.raises(TypeError, match="depth=True: it has to be an int"):
        lookahead([], Told(), depth=True)
    for tables in ([Told()], {torch.nn.Embedding(2, 2): 0}, None):
        with pytest.raises(TypeError, match="it has to be an EmbeddingTable, or a mapping"):
            lookahead([], tables)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="len"):
        len(lookahead(iter([]), Told()))
