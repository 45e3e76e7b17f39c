"""Rows by their ids, against a dict of rows."""

from __future__ import annotations

import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tierstore.errors import UsageError
from tierstore.tables import Column, NormalRows, RowStore
from tierstore.tables.page_numbers import MOST_DENSE

_MOMENT = Column("exp_avg", 0.0)
_SUM = Column("sum", 0.1)


def _store(num_rows: int, width: int = 3, dtype: torch.dtype = torch.float32) -> RowStore:
    return RowStore(num_rows, width, dtype, NormalRows(width, dtype, seed=11), name="deep")


def _gather(store: RowStore, ids: list[int], column: str = "rows") -> torch.Tensor:
    """Return cells of ascending ids, whatever parts they come in."""
    parts = [torch.empty(0, store.width, dtype=store.dtype)]
    parts += [visit.gather(column) for visit in store.visit(torch.tensor(ids, dtype=torch.int64))]
    return torch.cat(parts)


def _scatter(store: RowStore, ids: list[int], column: str, values: torch.Tensor) -> None:
    for visit in store.visit(torch.tensor(ids, dtype=torch.int64)):
        visit.scatter(column, values[visit.part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rows_that_nobody_wrote_are_the_initial_ones(dtype: torch.dtype) -> None:
    store = _store(10_000, 5, dtype)
    ids = [0, 1, 77, 4096, 9_999]
    assert torch.equal(_gather(store, ids), NormalRows(5, dtype, 11)(torch.tensor(ids)))


def test_what_is_gathered_is_the_callers_own() -> None:
    store = _store(10)
    _gather(store, [3]).zero_()
    assert torch.equal(_gather(store, [3]), NormalRows(3, torch.float32, 11)(torch.tensor([3])))


def test_rows_are_gathered_into_memory_that_is_given() -> None:
    store = _store(10)
    out = torch.empty(2, 3)
    (visit,) = store.visit(torch.tensor([1, 8]))
    assert visit.part == slice(0, 2)
    assert visit.gather(out=out) is out
    assert torch.equal(out, _gather(store, [1, 8]))


def test_no_ids_have_no_parts() -> None:
    assert list(_store(10).visit(torch.empty(0, dtype=torch.int64))) == []


class _Twin:
    """A table, and a dict of what was written to it."""

    def __init__(self, num_rows: int, width: int) -> None:
        self.store = _store(num_rows, width)
        self.num_rows, self.width = num_rows, width
        self.written: dict[tuple[int, str], torch.Tensor] = {}

    def scatter(self, ids: list[int], column: str, values: torch.Tensor) -> None:
        _scatter(self.store, ids, column, values)
        self.written.update({(id_, column): values[place] for place, id_ in enumerate(ids)})

    def drop(self, names: set[str]) -> None:
        self.store.drop_columns(names)
        self.written = {key: value for key, value in self.written.items() if key[1] not in names}

    def expected(self, id_: int, column: Column) -> torch.Tensor:
        if column.name == "rows":
            initial = NormalRows(self.width, torch.float32, 11)(torch.tensor([id_]))[0]
        else:
            initial = torch.full((self.width,), column.initial)
        return self.written.get((id_, column.name), initial)

    def check(self, others: set[int]) -> None:
        ids = sorted({id_ for id_, _ in self.written} | {self.num_rows - 1} | others)
        for column in self.store.columns:
            wanted = torch.stack([self.expected(id_, column) for id_ in ids])
            assert torch.equal(_gather(self.store, ids, column.name), wanted)


@settings(max_examples=60)
@given(st.data())
def test_a_table_is_a_dict_of_rows(data: st.DataObject) -> None:
    base = data.draw(st.sampled_from([0, MOST_DENSE * 1000]))
    width = data.draw(st.sampled_from([1, 3, 64, 1500]))
    twin = _Twin(base + data.draw(st.integers(1, 3000)), width)
    for number in range(data.draw(st.integers(1, 8))):
        some_ids = st.sets(st.integers(max(0, base - 50), twin.num_rows - 1), max_size=60)
        match data.draw(st.sampled_from(["scatter", "grow", "ensure", "drop"])):
            case "scatter":
                ids = sorted(data.draw(some_ids))
                values = torch.randn(len(ids), width, generator=torch.Generator().manual_seed(number))
                twin.scatter(ids, data.draw(st.sampled_from(twin.store.columns)).name, values)
            case "grow":
                twin.num_rows += data.draw(st.integers(0, 2000))
                twin.store.grow(twin.num_rows)
            case "ensure":
                twin.store.ensure_columns(data.draw(st.sampled_from([(), (_MOMENT,), (_SUM, _MOMENT)])))
            case "drop":
                names = [column.name for column in twin.store.columns]
                twin.drop(data.draw(st.sets(st.sampled_from(names))) - {"rows"})
        twin.check(data.draw(some_ids))


def test_a_table_of_2_to_the_40_rows_costs_what_is_touched() -> None:
    store = _store(2**40, 64)
    store.ensure_columns([_MOMENT, _SUM])
    ids = [0, 12_345_678_901, 2**40 - 1]
    _scatter(store, ids, "sum", torch.ones(3, 64))
    assert torch.equal(_gather(store, ids), NormalRows(64, torch.float32, 11)(torch.tensor(ids)))
    assert store.stats().pages == 3
    store.grow(2**41)
    assert torch.equal(_gather(store, ids, "sum"), torch.ones(3, 64))


@pytest.mark.parametrize("begin", [1, 9, 5000])
def test_new_rows_are_those_of_a_table_that_was_made_with_them(begin: int) -> None:
    grown, made = _store(begin), _store(begin + 1000)
    _gather(grown, list(range(begin)))  # the last page has room for the first of them
    grown.grow(begin + 1000)
    assert torch.equal(_gather(grown, list(range(begin + 1000))), _gather(made, list(range(begin + 1000))))


def test_the_initialiser_is_asked_for_rows_of_the_table_only() -> None:
    weights = torch.randn(10, 3)
    store = RowStore(10, 3, torch.float32, lambda ids: weights[ids])
    assert torch.equal(_gather(store, [0, 9]), weights[[0, 9]])


def test_a_table_that_was_small_grows_large() -> None:
    store = _store(5)
    _scatter(store, [4], "rows", torch.ones(1, 3))
    store.grow(2**40)
    assert torch.equal(_gather(store, [4]), torch.ones(1, 3))
    assert torch.equal(_gather(store, [2**39]), NormalRows(3, torch.float32, 11)(torch.tensor([2**39])))


def test_a_column_of_another_value_is_refused_and_nothing_changes() -> None:
    store = _store(5)
    store.ensure_columns([_SUM])
    with pytest.raises(UsageError, match=r"'deep': the column 'sum' starts with 0.1, not with 0.5"):
        store.ensure_columns([_MOMENT, Column("sum", 0.5)])
    assert store.columns == (Column("rows", 0.0), _SUM)


def test_what_is_not_there_is_refused_by_name() -> None:
    store = _store(5)
    with pytest.raises(UsageError, match="no column 'sum': there are rows"):
        _gather(store, [1], "sum")
    with pytest.raises(UsageError, match="no column 'sum'"):
        store.drop_columns(["sum"])
    with pytest.raises(UsageError, match="'rows' is the table itself"):
        store.drop_columns(["rows"])
    with pytest.raises(UsageError, match="5 rows cannot grow to 4"):
        store.grow(4)


@pytest.mark.parametrize(
    "values", [torch.ones(1, 3), torch.ones(2, 4), torch.ones(2, 3, dtype=torch.float64), torch.ones(3)]
)
def test_values_of_another_kind_are_refused(values: torch.Tensor) -> None:
    store = _store(5)
    (visit,) = store.visit(torch.tensor([1, 3]))
    before = visit.gather()
    with pytest.raises(UsageError, match=r"values: .* not torch.float32 \[2, 3\] on cpu"):
        visit.scatter("rows", values)
    with pytest.raises(UsageError, match="out: "):
        visit.gather(out=values)
    assert torch.equal(visit.gather(), before)


def test_rows_written_with_a_gradient_have_none() -> None:
    store = _store(5)
    _scatter(store, [2], "rows", torch.ones(1, 3, requires_grad=True) * 2)
    assert not _gather(store, [2]).requires_grad


def test_a_table_that_inference_touched_first_can_be_trained() -> None:
    store = _store(5)
    with torch.inference_mode():
        _gather(store, [0, 4])
    _scatter(store, [4], "rows", torch.ones(1, 3))
    assert torch.equal(_gather(store, [4]), torch.ones(1, 3))


def test_the_initialisers_can_be_pickled() -> None:
    rows = NormalRows(3, torch.float32, 11)
    assert pickle.loads(pickle.dumps(rows)) == rows
