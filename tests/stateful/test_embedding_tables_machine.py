"""Tables and their optimizers in few frames, on a disk that fails, against ``nn.Embedding``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor, nn

from tests.stores import make_store
from tierstore.errors import BackendError
from tierstore.nn import EmbeddingTable
from tierstore.optim import FTRL, SGD, Adagrad, LazyAdam, SparseAdam
from tierstore.spi import Backend
from tierstore.tables import LogPlace, StoreBlocks, TableHome
from tierstore.testing.faults import Faulty

_LARGE = 1 << 30
_PAGE = 4096
WIDTH = 260  # three rows a page; with two states, one
KINDS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "SparseAdam": (SparseAdam, torch.optim.SparseAdam),
    "Adagrad": (Adagrad, torch.optim.Adagrad),
    "SGD": (SGD, torch.optim.SGD),
    "LazyAdam": (LazyAdam, LazyAdam),
    "FTRL": (FTRL, FTRL),
}

ids = st.lists(st.integers(0, 30), max_size=20)


class EmbeddingTableMachine(RuleBasedStateMachine):
    """A table that is looked up, stepped, moved and grown, and the twin that is all in memory."""

    @initialize(
        num_rows=st.sampled_from([1, 7, 20, 30]),
        kind=st.sampled_from(list(KINDS)),
        seed=st.integers(0, 9),
        frames=st.integers(2, 6),
    )
    def make(self, num_rows: int, kind: str, seed: int, frames: int) -> None:
        self.wrapped: list[Faulty] = []

        def wrap(backend: Backend) -> Backend:
            self.wrapped.append(Faulty(backend))
            return self.wrapped[-1]

        self.store = make_store(1 << 20, _LARGE, wrap=wrap)
        self.table = EmbeddingTable(num_rows, WIDTH, seed=seed)
        self.large = EmbeddingTable(100, WIDTH, seed=seed)  # of which ours is the beginning
        self.twin = nn.Embedding.from_pretrained(
            self.large.rows(torch.arange(100)), freeze=False, sparse=True
        )
        ours, theirs = KINDS[kind]
        self.ours, self.theirs = ours(self.table.parameters(), lr=0.1), theirs(self.twin.parameters(), lr=0.1)
        self.is_attached = False
        self.steps = 0
        self.attach(frames, 2)

    def known(self, batch: list[int]) -> Tensor:
        """Return ids that there are."""
        return torch.tensor(batch, dtype=torch.int64) % self.table.num_embeddings

    def until_it_works(self, call: Callable[[], Any]) -> Any:  # noqa: ANN401
        """Try again where the disk fails, which it does once."""
        try:
            return call()
        except BackendError:
            return call()

    @precondition(lambda self: not self.is_attached)
    @rule(frames=st.integers(2, 6), block_pages=st.integers(1, 3))
    def attach(self, frames: int, block_pages: int) -> None:
        place = LogPlace(StoreBlocks(self.store), "table/deep/", block_pages * _PAGE)
        home = TableHome(torch.zeros(frames * _PAGE, dtype=torch.uint8), place)
        self.until_it_works(lambda: self.table.weight.row_store.attach(home))
        self.is_attached = True

    @precondition(lambda self: self.is_attached)
    @rule()
    def detach(self) -> None:
        self.until_it_works(self.table.weight.row_store.detach)
        self.is_attached = False

    @rule(calls=st.integers(1, 9))
    def let_the_disk_fail(self, calls: int) -> None:
        self.wrapped[-1].fail_next(calls)

    @rule(batch=ids)
    def look_up(self, batch: list[int]) -> None:
        index = self.known(batch)
        found = self.until_it_works(lambda: self.table(index))
        assert torch.equal(found, self.twin(index))

    @rule(batch=ids, seed=st.integers(0, 9))
    def backward(self, batch: list[int], seed: int) -> None:
        index = self.known(batch)
        cotangent = torch.randn(len(batch), WIDTH, generator=torch.Generator().manual_seed(seed))
        self.until_it_works(lambda: self.table(index)).backward(cotangent)
        self.twin(index).backward(cotangent)

    @rule(batches=st.lists(ids, min_size=1, max_size=3), fail_after=st.integers(0, 9), seed=st.integers(0, 9))
    def train(self, batches: list[list[int]], fail_after: int, seed: int) -> None:
        for batch in batches:
            self.backward(batch, seed)
            if fail_after:
                self.let_the_disk_fail(fail_after)
            self.step()

    @precondition(lambda self: self.table.weight.grad is not None)
    @rule()
    def step(self) -> None:
        self.until_it_works(self.ours.step)
        self.theirs.step()
        self.ours.zero_grad()
        self.theirs.zero_grad()
        self.steps += 1

    @rule(batch=ids)
    def prefetch(self, batch: list[int]) -> None:
        self.table.prefetch(self.known(batch))

    @rule(batch=ids, seed=st.integers(0, 9))
    def set_rows(self, batch: list[int], seed: int) -> None:
        index = self.known(batch)
        values = torch.randn(len(batch), WIDTH, generator=torch.Generator().manual_seed(seed))
        self.until_it_works(lambda: self.table.set_rows(index, values))
        with torch.no_grad():
            for row, value in zip(index.tolist(), values, strict=True):
                self.twin.weight[row] = value

    @precondition(lambda self: self.table.weight.grad is None)
    @rule(more=st.integers(0, 5))
    def grow(self, more: int) -> None:
        if self.table.num_embeddings + more <= 100:
            self.until_it_works(lambda: self.table.grow(self.table.num_embeddings + more))

    @invariant()
    def gradients_are_the_same(self) -> None:
        found, expected = self.table.weight.grad, self.twin.weight.grad
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert torch.equal(found._indices(), expected._indices())
            assert torch.equal(found._values(), expected._values())

    def teardown(self) -> None:
        if hasattr(self, "table"):
            every = torch.arange(self.table.num_embeddings)
            assert torch.equal(self.until_it_works(lambda: self.table.rows(every)), self.twin.weight[every])
            self.compare_states()
            self.table.weight.row_store.close()
            self.store.close()

    def compare_states(self) -> None:
        """See to it that what the optimizers keep is the same, of rows that there are."""
        if not self.steps:
            return
        found, expected = self.ours.state[self.table.weight], self.theirs.state[self.twin.weight]
        for name, value in expected.items():
            if isinstance(value, Tensor) and value.ndim:
                dense = self.until_it_works(found[name].dense)
                assert torch.equal(dense, value[: len(dense)])
            elif value is not None:
                assert found[name] == value


_MARK = pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # PyTorch's own optimizers
TestEmbeddingTables = _MARK(EmbeddingTableMachine.TestCase)
