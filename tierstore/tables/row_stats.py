"""What became of the pages of a table."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tierstore.tables.cache_stats import CacheStats
from tierstore.tables.device_rows import DeviceRows
from tierstore.tables.frames import FrameState
from tierstore.tables.pages import TablePages


@dataclass(frozen=True, slots=True)
class RowStats:
    """One table, now and since it was made or attached.

    Attributes:
        pages: how many are in memory.
        frames: how many there is room for.
        dirty_pages: of those in memory, how many differ from what the log has.
        page_bytes: bytes of one.
        hits: pages that were asked for and in memory.
        misses: those that were not.
        row_bytes_missed: bytes of the rows, with their state, that were asked for in pages that were missing.
        pages_made: misses of pages that were never written: computed, not read.
        pages_prefetched: read because of a prefetch.
        prefetches_declined: pages that a prefetch named and there was no room for.
        page_bytes_read: from the log, to frames or to compact it.
        page_bytes_written: to the log, likewise.
        log_pages: that are in the log, each counted once.
        dead_pages: older ones that are there still.
        blocks: of the log.
        cache: hot rows on the device; None: no device is attached.
    """

    pages: int
    frames: int
    dirty_pages: int
    page_bytes: int
    hits: int
    misses: int
    row_bytes_missed: int
    pages_made: int
    pages_prefetched: int
    prefetches_declined: int
    page_bytes_read: int = 0
    page_bytes_written: int = 0
    log_pages: int = 0
    dead_pages: int = 0
    blocks: int = 0
    cache: CacheStats | None = None


def stats_of(pages: TablePages, device_rows: DeviceRows | None = None) -> RowStats:
    """Return what there is and what happened."""
    counts, log = pages.counts, pages.log
    states = pages.frames.states
    stats = RowStats(
        pages=len(pages.frames) - pages.frames.free,
        frames=len(pages.frames),
        dirty_pages=int(np.count_nonzero(states >= FrameState.DIRTY)),
        page_bytes=pages.layout.page_bytes,
        hits=counts.hits,
        misses=counts.misses,
        row_bytes_missed=counts.rows_missed * pages.layout.record_bytes,
        pages_made=counts.made,
        pages_prefetched=counts.prefetched,
        prefetches_declined=counts.declined,
        cache=None if device_rows is None else device_rows.stats(),
    )
    if log is None:
        return stats
    return replace(
        stats,
        page_bytes_read=log.bytes_read,
        page_bytes_written=log.bytes_written,
        log_pages=log.current_pages,
        dead_pages=log.dead_pages,
        blocks=log.blocks,
    )
