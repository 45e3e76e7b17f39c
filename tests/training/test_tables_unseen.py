"""What a table does inside is the library's own work: nobody who measures a program's operators sees it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from tests.training.table_models import STEPPERS
from tierstore.modes import Unseen
from tierstore.nn import EmbeddingTable
from tierstore.nn.row_blocks import blocks_of, write_part
from tierstore.torch_private import TorchDispatchMode, tree_flatten
from tierstore.training.pytorch.operator_observers import ignore, observe

WIDTH = 48


class Largest:
    """Sees operators; notes the largest storage that one was given or has made."""

    is_over = is_blind = False

    def __init__(self) -> None:
        self.nbytes = 0
        self.operators = 0

    def see(self, given: Sequence[object], result: object) -> None:
        """Look at both."""
        self.operators += 1
        for each in tree_flatten((given, result))[0]:
            if isinstance(each, torch.Tensor) and each.layout is torch.strided:
                self.nbytes = max(self.nbytes, each.untyped_storage().nbytes())

    see_within = see


class LargestInMode(TorchDispatchMode):
    """The same as a dispatch mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = Largest()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        result = func(*args, **(kwargs or {}))
        self.seen.see((args, kwargs), result)
        return result


def _use(table: EmbeddingTable, kind: str) -> None:
    optimizer = STEPPERS[kind]([table.weight])
    for _ in range(2):
        table(torch.arange(0, 4000, 80)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    table.set_rows(torch.arange(50), torch.ones(50, WIDTH))
    table.rows(torch.arange(50))
    table.prefetch(torch.arange(50))
    table.grow(5000)
    for part, rows in blocks_of(table.weight.row_store, parts=[slice(0, 10), slice(40, 50)]):
        write_part(table.weight.row_store, "rows", part, rows)


@pytest.mark.parametrize("kind", STEPPERS)
def test_what_is_seen_is_of_the_batchs_size(kind: str) -> None:
    table = EmbeddingTable(4000, WIDTH)
    seen, mode = Largest(), LargestInMode()
    observe(seen)
    try:
        with mode:
            _use(table, kind)
    finally:
        ignore(seen)
    rows_bytes = 51 * WIDTH * 4  # a page has several rows, frames and what is computed for them many pages
    assert seen.operators
    assert mode.seen.operators
    assert max(seen.nbytes, mode.seen.nbytes) <= rows_bytes


def test_those_who_saw_before_see_again() -> None:
    seen = Largest()
    observe(seen)
    try:
        with pytest.raises(TypeError), Unseen(), Unseen():
            torch.ones("no size")  # type: ignore[arg-type]
        with Unseen():
            torch.ones(1)
        assert seen.operators == 0
        torch.ones(1)
        assert seen.operators
    finally:
        ignore(seen)
    with Unseen():
        torch.ones(1)
    before = seen.operators
    torch.ones(1)
    assert seen.operators == before
