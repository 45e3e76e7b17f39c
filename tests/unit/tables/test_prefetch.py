"""Rows that are brought before they are asked for."""

from __future__ import annotations

import pytest
import torch

from tests.unit.tables.homes import (
    INITIAL,
    Sometimes,
    attached,
    faulty_store,
    pages_in,
    read,
    values_of,
    write,
)
from tierstore.tables import RowStore, pages
from tierstore.tables.frames import FrameState
from tierstore.testing.faults import Faulty


def _prefetching() -> tuple[RowStore, Sometimes, Faulty]:
    """Return a table with rows 0 to 9 in the log, and eight frames of which none is in use."""
    store, disk = faulty_store()
    later = Sometimes()
    table = attached(8, store, executor=later)
    write(table, 1.0, *range(10))
    table.write_back()
    table._pages.forget_all()
    later.is_waiting = True
    return table, later, disk


def test_prefetched_rows_are_hits() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([3, 1, 3]))
    later.work()
    before = table.stats()
    assert values_of(table, 1, 3) == [1.0, 1.0]
    after = table.stats()
    assert (after.hits - before.hits, after.misses - before.misses) == (2, 0)
    assert after.pages_prefetched == 2


def test_a_visit_of_other_rows_does_not_wait_for_a_prefetch() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([1, 3]))
    assert torch.equal(read(table, 50), INITIAL(torch.tensor([50])))
    assert len(later.tasks) == 1
    assert pages_in(table, FrameState.FILLING) == {1, 3}
    later.work()
    assert values_of(table, 1, 3) == [1.0, 1.0]


def test_a_visit_of_prefetched_rows_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([1, 3]))
    monkeypatch.setattr(pages, "wait", lambda _: later.work())  # only who waits lets it come to its end
    assert values_of(table, 1, 3) == [1.0, 1.0]
    assert pages_in(table, FrameState.FILLING) == set()


def test_a_prefetch_that_fails_is_only_advice() -> None:
    table, later, disk = _prefetching()
    disk.fail_next()
    table.prefetch(torch.arange(2))
    later.work()
    assert disk.failures == 1
    assert values_of(table, *range(4)) == [1.0] * 4


def test_a_prefetch_takes_no_frame_of_rows_in_hand() -> None:
    table, later, _ = _prefetching()
    part = next(table.visit(torch.arange(4, 10)))
    table.prefetch(torch.arange(4))
    later.work()
    assert part.gather()[:, 0].tolist() == [1.0] * 6
    assert table.stats().prefetches_declined == 2


def test_prefetched_rows_stay_until_they_are_visited() -> None:
    table, later, _ = _prefetching()
    table.prefetch(torch.tensor([0, 1]))
    later.work()
    for begin in range(200, 300, 6):
        write(table, 2.0, *range(begin, begin + 6))
    before = table.stats()
    assert values_of(table, 0, 1) == [1.0, 1.0]
    assert table.stats().misses == before.misses
