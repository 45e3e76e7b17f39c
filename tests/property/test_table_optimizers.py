"""Optimizers on tables against the same, or PyTorch's, on ``nn.Embedding``: the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from tests.property.test_tables import DTYPES, ROWS, every_dtype, same
from tierstore.nn import EmbeddingTable
from tierstore.nn.table_weight import TableWeight
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.tables import RowStore, Visit

Make = Callable[..., torch.optim.Optimizer]

rates = st.sampled_from([1e-3, 0.1, 0.7])
adam = {
    "lr": rates, "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.0), (0.7, 0.9)]),
    "eps": st.sampled_from([1e-8, 1e-2]), "maximize": st.booleans(),
}  # fmt: skip
scaled = {"weight_decay": st.sampled_from([0.0, 0.1]), "loss_scale": st.sampled_from([1.0, 3.0])}
OPTIONS: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "SparseAdam": st.fixed_dictionaries(adam),
    "Adagrad": st.fixed_dictionaries(
        {
            "lr": rates, "lr_decay": st.sampled_from([0.0, 0.1]), "maximize": st.booleans(),
            "initial_accumulator_value": st.sampled_from([0.0, 0.1]), "eps": st.sampled_from([1e-10, 1e-2]),
        }
    ),
    "SGD": st.fixed_dictionaries({"lr": rates, "maximize": st.booleans()}),
    "LazyAdam": st.fixed_dictionaries({**adam, **scaled, "nesterov": st.booleans()}),
    "FTRL": st.fixed_dictionaries(
        {
            "lr": rates, "lr_power": st.sampled_from([-0.5, -0.3, 0.0]), "l1": st.sampled_from([0.0, 0.3]),
            "l2": st.sampled_from([0.0, 0.2]), "initial_accumulator_value": st.sampled_from([0.1, 1.0]),
            "maximize": st.booleans(), **scaled,
        }
    ),
}  # fmt: skip
OURS: dict[str, Make] = {
    "SparseAdam": SparseAdam, "Adagrad": Adagrad, "SGD": SGD, "LazyAdam": LazyAdam, "FTRL": FTRL,
}  # fmt: skip
THEIRS: dict[str, Make] = OURS | {
    name: getattr(torch.optim, name) for name in ("SparseAdam", "Adagrad", "SGD")
}
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning"
)  # PyTorch's own optimizers
every_kind = pytest.mark.parametrize("kind", OURS)

ids = st.one_of(st.sampled_from([0, 1, ROWS - 1]), st.integers(0, ROWS - 1))
batch_lists = st.lists(st.lists(st.lists(ids, max_size=50), min_size=1, max_size=2), min_size=1, max_size=6)
cases = st.data()


class InPieces(RowStore):
    """A store of which few rows are in place at once."""

    def visit(self, ids: Tensor) -> Iterator[Visit]:
        for begin in range(0, len(ids), 3):
            for visit in super().visit(ids[begin : begin + 3]):
                visit.part = slice(begin, min(begin + 3, len(ids)))
                yield visit


def _twins(width: int, dtype: torch.dtype, in_pieces: bool) -> tuple[EmbeddingTable, nn.Embedding]:
    table = EmbeddingTable(ROWS, width, dtype=dtype)
    rows = table.rows(torch.arange(ROWS))
    if in_pieces:
        table.weight.row_store = InPieces(ROWS, width, dtype, lambda index: rows[index])
    return table, nn.Embedding.from_pretrained(rows, freeze=False, sparse=True)


def _backward(module: nn.Module, batch: list[int], seed: int) -> None:
    out = module(torch.tensor(batch, dtype=torch.int64))
    chance = torch.Generator().manual_seed(seed)
    out.backward(torch.randn(out.shape, generator=chance, dtype=torch.float64).to(out.dtype))


def _same_states(table: EmbeddingTable, ours: Any, plain: nn.Embedding, theirs: Any) -> None:  # noqa: ANN401
    same(table.rows(torch.arange(ROWS)), plain.weight.detach())
    found, expected = ours.state_dict()["state"].get(0, {}), theirs.state_dict()["state"].get(0, {})
    for name, value in expected.items():
        if isinstance(value, Tensor) and value.ndim:
            same(found[name].dense(), value)
        elif value is not None:
            assert found[name] == value


@every_dtype
@every_kind
@given(data=st.data(), batches=batch_lists, width=st.sampled_from([1, 3, 16, 64]), in_pieces=st.booleans())
@settings(deadline=None, max_examples=25)
def test_every_step_has_the_bits_of_the_same_on_an_embedding(
    dtype: torch.dtype, kind: str, data: st.DataObject, batches: list[list[list[int]]], width: int,
    in_pieces: bool,
) -> None:  # fmt: skip
    options = data.draw(OPTIONS[kind])
    table, plain = _twins(width, dtype, in_pieces)
    ours, theirs = OURS[kind](table.parameters(), **options), THEIRS[kind](plain.parameters(), **options)
    for number, accumulated in enumerate(batches):
        for module, optimizer in ((table, ours), (plain, theirs)):
            optimizer.zero_grad()
            for batch in accumulated:
                _backward(module, batch, number)
            optimizer.step()
        _same_states(table, ours, plain, theirs)
        if number == 1:  # a gradient as somebody may have left it
            for module in (table, plain):
                assert module.weight.grad is not None
                module.weight.grad = module.weight.grad.coalesce()
            ours.step()
            theirs.step()
            _same_states(table, ours, plain, theirs)


@every_kind
@given(data=st.data(), steps=st.integers(1, 3), dtype=st.sampled_from(DTYPES), in_pieces=st.booleans())
@settings(deadline=None, max_examples=20)
def test_dense_gradients_change_all_rows_as_those_of_an_embedding(
    kind: str, data: st.DataObject, steps: int, dtype: torch.dtype, in_pieces: bool
) -> None:
    options = data.draw(OPTIONS[kind])
    table, plain = _twins(5, dtype, in_pieces)
    # PyTorch's SparseAdam refuses these.
    theirs = (OURS if kind == "SparseAdam" else THEIRS)[kind](plain.parameters(), **options)
    ours = OURS[kind](table.parameters(), **options)
    for seed in range(steps):
        gradient = torch.randn(ROWS, 5, generator=torch.Generator().manual_seed(seed)).to(dtype)
        table.weight.grad, plain.weight.grad = gradient, gradient
        ours.step()
        theirs.step()
    _same_states(table, ours, plain, theirs)


@every_kind
@given(data=st.data(), batches=batch_lists)
@settings(deadline=None, max_examples=15)
def test_tables_and_other_parameters_are_stepped_together(
    kind: str, data: st.DataObject, batches: list[list[list[int]]]
) -> None:
    """Those of a dense net, with dense gradients, and an embedding with sparse ones, in the same groups."""
    options = data.draw(OPTIONS[kind])
    table, plain = _twins(4, torch.float32, in_pieces=False)
    nets = [nn.ModuleList([nn.Linear(4, 1), nn.Embedding(ROWS, 4, sparse=True)]) for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    theirs: Make = OURS[kind] if kind == "SparseAdam" else THEIRS[kind]
    ours = OURS[kind]([*nets[0].parameters(), table.weight], **options)
    other = theirs([*nets[1].parameters(), plain.weight], **options)
    for accumulated in batches:
        for module, (linear, embedding), optimizer in ((table, nets[0], ours), (plain, nets[1], other)):
            optimizer.zero_grad()
            for batch in accumulated:
                index = torch.tensor(batch, dtype=torch.int64)
                linear(module(index) + embedding(index)).square().sum().backward()
            optimizer.step()
    same(table.rows(torch.arange(ROWS)), plain.weight.detach())
    for found, expected in zip(nets[0].parameters(), nets[1].parameters(), strict=True):
        same(found.detach(), expected.detach())


def test_pieces_are_pieces() -> None:
    table, _ = _twins(4, torch.float32, in_pieces=True)
    weight: TableWeight = table.weight
    parts = [visit.part for visit in weight.row_store.visit(torch.arange(7))]
    assert parts == [slice(0, 3), slice(3, 6), slice(6, 7)]
