"""Loaders that tell tables what comes: the loader's batches, and each of them told in time."""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tierstore.data import lookahead
from tierstore.data.streams import waiting_iterators
from tierstore.errors import ConfigError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.torch_private import tree_flatten


class Told(EmbeddingTable):
    """A table that notes what it is told."""

    def __init__(self) -> None:
        super().__init__(1000, 2, seed=0)  # draws none from the generator that is compared
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


# ---------------------------------------------------------------------- as the bare loader


@pytest.mark.parametrize("kind", ["generator", "zip"])
@given(count=st.integers(0, 9), stops=st.lists(st.integers(0, 4), max_size=5), depth=st.integers(1, 3))
def test_who_stops_and_goes_on_over_the_same_iterator_loses_nothing(
    kind: str, count: int, stops: list[int], depth: int
) -> None:
    def read(over: Callable[[Iterator[Any]], Any]) -> list[list[Any]]:
        stream: Any = zip(_batches(count), strict=True) if kind == "zip" else iter(n for n in _batches(count))
        pieces: list[list[Any]] = []
        for stop in [*stops, 99]:
            pieces.append([])
            for number, batch in enumerate(over(stream)):
                pieces[-1].append(batch)
                if number == stop:
                    break
        return pieces

    tables = [Told(), Told()]
    turns = iter(range(99))

    def ahead(stream: Iterator[Any]) -> Any:  # noqa: ANN401 - a lookahead
        return lookahead(stream, tables[next(turns) % 2], depth)

    def first(batch: Any) -> int:  # noqa: ANN401 - a tensor, or a tuple of one
        return int(batch[0][0] if kind == "zip" else batch[0])

    bare, seen = read(lambda stream: stream), read(ahead)
    assert [[first(batch) for batch in piece] for piece in seen] == [
        [first(batch) for batch in piece] for piece in bare
    ]
    for table, pieces in zip(tables, (seen[::2], seen[1::2]), strict=True):
        handed_out = [first(batch) for piece in pieces for batch in piece]
        assert set(handed_out) <= {each[0] for each in table.told}


def test_an_iterator_that_is_kept_goes_on_where_it_was() -> None:
    kept = iter(lookahead(_batches(6), Told(), 2))
    found = []
    for stop in (1, 0, 9):
        for number, batch in enumerate(kept):
            found.append(int(batch[0]))
            if number == stop:
                break
    assert found == [0, 1, 2, 3, 4, 5]


def test_of_iterators_that_nobody_has_none_is_kept() -> None:
    for _ in range(5):
        next(iter(lookahead(zip(_batches(4), strict=True), Told())))
    assert waiting_iterators() <= 1
    stream = (batch for batch in _batches(4))
    next(iter(lookahead(stream, Told())))
    gone = weakref.ref(stream)
    del stream
    assert gone() is None


class Shaky:
    """An iterator that fails for some batches and goes on."""

    def __init__(self) -> None:
        self.number = -1

    def __iter__(self) -> Shaky:
        return self

    def __next__(self) -> Tensor:
        self.number += 1
        if self.number in {1, 3}:
            raise OSError(self.number)
        if self.number == 5:
            raise StopIteration
        return torch.tensor([self.number])


def _numbers_or_failures(batches: Iterator[Tensor]) -> Iterator[int]:
    while True:
        try:
            yield int(next(batches))
        except OSError as error:
            yield -int(str(error))
        except StopIteration:
            return


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_a_loader_that_fails_for_one_batch_and_goes_on_does_so_as_the_bare_one(depth: int) -> None:
    found = list(_numbers_or_failures(iter(lookahead(Shaky(), Told(), depth))))
    assert found == list(_numbers_or_failures(Shaky())) == [0, -1, 2, -3, 4]


def _drawing(kind: str) -> Iterator[Tensor]:
    while True:
        if kind == "torch":
            yield torch.randint(0, 9, (3,))
        elif kind == "random":
            yield torch.tensor([random.randint(0, 9)])
        else:
            yield torch.from_numpy(np.random.randint(0, 9, 3))


@pytest.mark.parametrize("kind", ["torch", "random", "numpy"])
def test_a_loader_that_draws_beside_the_program_is_refused_before_the_first_step(kind: str) -> None:
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    next(_drawing(kind))
    due = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    batches = iter(lookahead(_drawing(kind), Told()))
    for _ in range(2):
        with pytest.raises(UsageError, match=f"draws random numbers from {kind}.*num_workers=1"):
            next(batches)
    assert (torch.rand(1).item(), random.random(), np.random.rand()) == due


class Negatives(torch.utils.data.Dataset[Tensor]):
    """Ids of which some are drawn at random."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, place: int) -> Tensor:
        return torch.cat([torch.tensor([place]), torch.randint(0, 900, (2,))])


@pytest.mark.parametrize("advice", ["workers", "shuffle", "generator"])
def test_what_is_advised_has_the_numbers_of_the_bare_loader(advice: str) -> None:
    def epochs(over: Callable[[Any], Any]) -> list[list[float]]:
        torch.manual_seed(3)
        mine = torch.Generator().manual_seed(5)
        loader: Any = DataLoader(Negatives(), 3, num_workers=1)
        if advice != "workers":
            ids = TensorDataset(torch.arange(24).view(12, 2))
            loader = DataLoader(ids, 3, shuffle=True, generator=mine if advice == "generator" else None)
        if advice == "generator":  # one stream over several epochs
            loader = (batch for _ in range(2) for batch in DataLoader(ids, 3, shuffle=True, generator=mine))
        seen = []
        for _ in range(1 if advice == "generator" else 2):
            for batch in over(loader):
                dropped = torch.rand(4)
                seen.append([*tree_flatten(batch)[0][0].flatten().tolist(), *dropped.tolist()])
        return seen

    assert epochs(lambda loader: lookahead(loader, Told(), 2)) == epochs(lambda loader: loader)


def _refilling(kind: str) -> Iterator[Any]:
    numbers = np.zeros(4, dtype=np.int64)
    buffers = [torch.zeros(4, dtype=torch.int64) for _ in range(3)]
    for count in range(9):
        if kind == "numpy":
            numbers[:] = count
            yield torch.from_numpy(numbers)
        elif kind == "arrays":
            numbers[:] = count
            yield {"ids": torch.tensor([count]), "x": numbers}
        elif kind == "three by turns":
            yield buffers[count % 3].fill_(count)
        else:
            yield [buffers[0].fill_(count).view(2, 2)]


@pytest.mark.parametrize(
    ("kind", "depth"), [("numpy", 1), ("arrays", 1), ("three by turns", 3), ("one by views", 2)]
)
def test_a_loader_that_fills_its_buffers_again_is_refused_before_the_first_step(
    kind: str, depth: int
) -> None:
    with pytest.raises(UsageError, match="writes to a batch that it has given before"):
        next(iter(lookahead(_refilling(kind), {Told(): lambda batch: torch.tensor([1])}, depth)))


def test_buffers_that_are_filled_when_their_batch_is_done_are_fine() -> None:
    found = [int(ids[0]) for ids in lookahead(_refilling("three by turns"), Told(), 2)]
    assert found == list(range(9))


def test_one_batch_many_times_is_fine_and_so_is_a_program_that_writes_to_it() -> None:
    def read(over: Callable[[Any], Any]) -> list[int]:
        found = []
        for ids in over([torch.tensor([1])] * 4):
            found.append(int(ids))
            ids.mul_(2)
        return found

    assert read(lambda loader: lookahead(loader, Told())) == read(lambda loader: loader) == [1, 2, 4, 8]


@pytest.mark.parametrize("how", ["lookup", "rows"])
def test_a_loader_that_asks_the_table_is_refused_after_the_last_step_that_is_right(how: str) -> None:
    table = Told()

    def hard() -> Iterator[Tensor]:
        for batch in _batches(3):
            found = table(batch) if how == "lookup" else table.rows(batch)
            yield batch[found.sum(1).argsort()]

    batches = iter(lookahead(hard(), table))
    assert sorted(next(batches).tolist()) == [0, 100]
    table(torch.tensor([0]))
    with pytest.raises(UsageError, match="by the loader that lookahead asks for a batch ahead"):
        next(batches)
    table.weight.requires_grad_(False)  # noqa: FBT003 - PyTorch's own
    assert len(list(lookahead(hard(), table))) == 3
