"""What tests of attached tables share: tables whose rows are pages, on a disk that is in memory."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

import torch

from tests.stores import make_store
from tierstore.errors import (
    TierStoreError,
)
from tierstore.spi import Backend
from tierstore.store import Store
from tierstore.tables import LogPlace, NormalRows, RowStore, StoreBlocks, TableHome
from tierstore.tables.frames import FrameState
from tierstore.testing.faults import Faulty

_P = ParamSpec("_P")
_T = TypeVar("_T")

PAGE = 4096
WIDTH = 1024  # float32: a row is a page
INITIAL = NormalRows(WIDTH, torch.float32, 5)
PREFIX = "table/deep/log/"


class Sometimes(Executor):
    """Does what it is given before it returns, or when it is told to."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.tasks: list[Callable[[], None]] = []

    def submit(self, work: Callable[_P, _T], /, *args: _P.args, **kwargs: _P.kwargs) -> Future[_T]:
        future: Future[_T] = Future()

        def task() -> None:
            try:
                future.set_result(work(*args, **kwargs))
            except TierStoreError as error:
                future.set_exception(error)

        self.tasks.append(task)
        if not self.is_waiting:
            self.work()
        return future

    def work(self) -> None:
        """Do all of it, and from now on at once."""
        self.is_waiting = False
        while self.tasks:
            self.tasks.pop(0)()


def attached(
    frames: int,
    store: Store | None,
    *,
    num_rows: int = 1000,
    block_pages: int = 2,
    executor: Executor | None = None,
    width: int = WIDTH,
) -> RowStore:
    """Return a table whose pages are rows, in so many frames."""
    table = RowStore(num_rows, width, torch.float32, NormalRows(width, torch.float32, 5), name="deep")
    place = None if store is None else LogPlace(StoreBlocks(store), PREFIX, block_pages * PAGE)
    table.attach(
        TableHome(torch.empty(frames * PAGE // 4), place, "lru", "its share", executor or Sometimes())
    )
    return table


def new_store(disk_pages: int = 5000) -> Store:
    return make_store(1 << 20, disk_pages * PAGE)


def write(table: RowStore, value: float, *ids: int) -> None:
    for visit in table.visit(torch.tensor(ids)):
        visit.scatter("rows", torch.full((len(ids[visit.part]), table.width), value))


def read(table: RowStore, *ids: int) -> torch.Tensor:
    return torch.cat([visit.gather() for visit in table.visit(torch.tensor(ids))])


def values_of(table: RowStore, *ids: int) -> list[float]:
    """Return what `write` wrote."""
    rows = read(table, *ids)
    assert torch.equal(rows, rows[:, :1].expand_as(rows))
    return rows[:, 0].tolist()


def pages_in(table: RowStore, state: FrameState) -> set[int]:
    """Return the pages of frames in a state."""
    frames = table._pages.frames
    return set(frames.pages[frames.are_in(state)].tolist())


def faulty_store() -> tuple[Store, Faulty]:
    wrapped: list[Faulty] = []

    def wrap(backend: Backend) -> Backend:
        wrapped.append(Faulty(backend))
        return wrapped[-1]

    return make_store(1 << 20, 1 << 30, wrap=wrap), wrapped[-1]
