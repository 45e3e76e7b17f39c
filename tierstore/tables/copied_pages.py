"""Pages of a table written anew: elsewhere, or with other columns.

Whatever fails, the table has the pages that it had, and nothing that was written is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch

from tierstore.tables.layout import PageLayout
from tierstore.tables.memory import FixedMemory, FrameMemory, GrowingMemory
from tierstore.tables.page_log import LogPlace, PageLog
from tierstore.tables.page_map import PageMap
from tierstore.tables.pages import TablePages, TableTraits
from tierstore.tables.visits import visits

_STAGED_PAGES: Final = 1024  # in memory while rows are copied to another layout, or frames are taken away


def new_pages(
    traits: TableTraits,
    layout: PageLayout,
    num_rows: int,
    memory: FrameMemory,
    place: LogPlace | None = None,
    before: PageLog | None = None,
) -> TablePages:
    """Return pages of which none was touched.

    Args:
        traits: of the table.
        layout: of the pages.
        num_rows: of the table.
        memory: for frames.
        place: of the log.
        before: a log of this table before, of which snapshots may have blocks.

    Raises:
        CapacityError: the memory has no room for a single page.
    """
    page_map = PageMap(layout.pages_of(num_rows))
    log = None if place is None else PageLog(place, layout, page_map, before)
    return TablePages(traits, layout, num_rows, memory, page_map, log)


def copied(old: TablePages, new: TablePages) -> TablePages:
    """Write to ``new`` what was written to ``old``, of the columns that it has; return it.

    If that fails, the blocks of ``new`` are dropped.

    Args:
        old: the table's pages.
        new: of the same rows.

    Raises:
        CapacityError, BackendError: as `TablePages.bring`, of either.
    """
    names = [column.name for column in old.layout.columns if column in new.layout.columns]
    try:
        for ids in old.written_ids():
            for source in visits(old, ids):
                for target in visits(new, ids[source.part]):
                    for name in names:
                        target.scatter(name, source.gather(name)[target.part])
    except BaseException:
        drop_log(new)
        raise
    return new


def staging_of(pages: TablePages) -> FixedMemory:
    """Return a little memory, from which untouched parts take nothing, for the pages of a table."""
    count = min(_STAGED_PAGES, pages.layout.pages_of(pages.num_rows))
    return FixedMemory(torch.empty(count * pages.layout.page_bytes, dtype=torch.uint8, device="cpu"))


def drop_log(pages: TablePages) -> None:
    """Drop the blocks of pages that are of no use any more."""
    pages.settle()
    if pages.log is not None:
        pages.log.drop_all()


def relay(old: TablePages, layout: PageLayout, take: Callable[[TablePages], None]) -> None:
    """Copy all that was written to pages of another layout, in the same memory and beside the same log.

    Args:
        old: the table's pages.
        layout: with other columns.
        take: makes pages the table's: those of the other layout or, where that failed in the midst, others
            of the old one.

    Raises:
        CapacityError, BackendError: the copy found no room, or a medium failed.
    """
    if not old.is_fixed:
        take(copied(old, new_pages(old.traits, layout, old.num_rows, GrowingMemory())))
    elif old.log is None:
        _relay_in_memory(old, layout, take)
    else:
        _relay_in_log(old, layout, old.log, take)


def _relay_in_memory(old: TablePages, layout: PageLayout, take: Callable[[TablePages], None]) -> None:
    """Copy to the same memory, by way of memory of the process."""
    aside = copied(old, new_pages(old.traits, old.layout, old.num_rows, GrowingMemory()))
    try:
        take(copied(aside, new_pages(old.traits, layout, old.num_rows, old.memory)))
    except BaseException:
        take(copied(aside, new_pages(old.traits, old.layout, old.num_rows, old.memory)))
        raise


def _relay_in_log(
    old: TablePages, layout: PageLayout, log: PageLog, take: Callable[[TablePages], None]
) -> None:
    """Copy by way of the log: everything is there first, and read into a little memory of the process."""
    old.settle()
    old.write_back()
    old.forget_all()
    aside = TablePages(old.traits, old.layout, old.num_rows, staging_of(old), old.map, log)
    try:
        new = new_pages(old.traits, layout, old.num_rows, old.memory, log.place, log)
        take(copied(aside, new))
    except BaseException:
        aside.forget_all()
        raise
    log.drop_all()
