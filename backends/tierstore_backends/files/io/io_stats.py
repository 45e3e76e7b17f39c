"""What moving bytes came to, counted where it happens: cheap enough to be always on.

Rule 1: a `IoCounts` is written by one thread at a time, its BatchIo's; reading it needs no lock, and what
is read may be a moment old, each number by itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(slots=True)
class IoCounts:
    """One BatchIo's numbers since the start.  See `IoStats` for what they mean."""

    read_calls: int = 0
    write_calls: int = 0
    read_bytes: int = 0
    written_bytes: int = 0
    fragments: int = 0
    merged_batches: int = 0
    call_seconds: float = 0.0
    checksum_seconds: float = 0.0
    short_transfers: int = 0
    retries: int = 0
    bounced_bytes: int = 0
    unchecked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DriveStats:
    """One drive of several.

    Attributes:
        path: its directory.
        bandwidth_bytes_per_s: what its share of the bytes follows: measured when the backend was opened,
            given, or kept from an earlier opening.
        live_bytes: what is reserved there now.
        is_direct: whether bytes go past the page cache.
        read_bytes: what was read there, with what fills an alignment unit.
        written_bytes: what was written.
        calls: how often the kernel was asked to.
        call_seconds: how long that took, summed over calls, which overlap.
        most_in_flight: the most fragments that were in flight at a time.
    """

    path: str
    bandwidth_bytes_per_s: int
    live_bytes: int
    is_direct: bool
    read_bytes: int
    written_bytes: int
    calls: int
    call_seconds: float
    most_in_flight: int


@dataclass(frozen=True, slots=True)
class IoStats:
    """What one backend's engine has done since it was opened.

    Attributes:
        engine: its name.
        is_direct: whether bytes go past the page cache.
        read_calls: calls into the kernel that read, whatever became of them.
        write_calls: those that wrote.
        read_bytes: what calls have read, with what fills an alignment unit.
        written_bytes: what they have written.
        fragments: parts of at most ``aio_block_size`` that transfers were cut into.
        merged_batches: how many times fragments that touch in a file were moved in one call.
        most_in_flight: the most fragments that were in flight at a time; at most ``aio_queue_depth``.  Of
            several drives, on the one that had most.
        mean_transfer_bytes: bytes moved per call.
        call_seconds: how long calls took, summed over calls, which overlap.
        checksum_seconds: how long bytes were summed, over all threads.
        short_transfers: calls that moved less than they were asked to.
        retries: calls made again after an error.
        bounced_bytes: bytes that were copied through memory of the engine's own.
        unchecked_bytes: bytes that were read and compared with no checksum.
        drives: each drive by itself, where there are several.
    """

    engine: str
    is_direct: bool
    read_calls: int
    write_calls: int
    read_bytes: int
    written_bytes: int
    fragments: int
    merged_batches: int
    most_in_flight: int
    mean_transfer_bytes: float
    call_seconds: float
    checksum_seconds: float
    short_transfers: int
    retries: int
    bounced_bytes: int
    unchecked_bytes: int
    drives: tuple[DriveStats, ...] = ()


def total(batch_ios: Iterable[IoCounts], *, engine: str, is_direct: bool, most_in_flight: int) -> IoStats:
    """Return what all `BatchIo`s have done together."""
    batch_ios = list(batch_ios)
    sums = {
        field.name: sum(getattr(batch_io, field.name) for batch_io in batch_ios) for field in fields(IoCounts)
    }
    calls = sums["read_calls"] + sums["write_calls"]
    return IoStats(
        engine=engine,
        is_direct=is_direct,
        most_in_flight=most_in_flight,
        mean_transfer_bytes=(sums["read_bytes"] + sums["written_bytes"]) / calls if calls else 0.0,
        **sums,
    )
