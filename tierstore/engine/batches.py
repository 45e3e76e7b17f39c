"""Which copies travel together: small ones of one direction that begin in the same turn.

A copy of 32 KiB takes the disk some microseconds, and a call, a completion and a turn of its own
several times that.  So small copies share them, where the medium is a `tierstore.spi.BatchBackend`.

Rule 1: a batch is at most `BATCH_BYTES` long, because its first copy ends only with its last.
Rule 2: within a direction, copies begin in the order in which the ledger started them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tierstore.core.messages import StartCopy
from tierstore.units import KIB, MIB

SMALL_BYTES = 256 * KIB
"""Copies up to this long travel together: for longer ones it is the medium that takes the time."""

BATCH_BYTES = MIB


def batches(copies: Iterable[StartCopy]) -> Iterator[list[StartCopy]]:
    """Yield small copies between two tiers in batches of one direction each."""
    lanes: dict[tuple[int, int], list[StartCopy]] = {}
    for copy in copies:
        assert copy.source is not None  # copies that a caller makes are not small ones
        lanes.setdefault((copy.source.tier, copy.target.tier), []).append(copy)
    for lane in lanes.values():
        yield from _parts(lane)


def _parts(lane: list[StartCopy]) -> Iterator[list[StartCopy]]:
    batch: list[StartCopy] = []
    nbytes = 0
    for copy in lane:
        if batch and nbytes + copy.nbytes > BATCH_BYTES:
            yield batch
            batch, nbytes = [], 0
        batch.append(copy)
        nbytes += copy.nbytes
    yield batch
