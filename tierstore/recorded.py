"""What a store did while it was recorded, as plain data: `Recording`, of `tierstore.Store.recorded`.

Times are those of ``time.perf_counter()``, in seconds; `Recording.unix_ns` ties them to the calendar.
Tiers are named as the store names them; ``"caller"`` stands for who puts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

CALLER = "caller"
"""What copies come from whose bytes a caller brings."""


class WaitedFor(enum.Enum):
    """What a caller was blocked by."""

    LEASE = "lease"  # bytes that are to be where it uses them
    READ = "read"  # bytes that it gets a copy of
    ROOM = "room"  # for bytes that it brings
    QUOTA = "quota"  # of a tier, which it makes smaller


@dataclass(frozen=True, slots=True)
class CopyRecord:
    """One movement of bytes.

    Attributes:
        key: whose; what it was called when the copy began.
        nbytes: that were to move.
        source, target: tiers.
        begin_s: when it was ordered; media do one after another what is ordered at the same time.
        end_s: when its end was known.
        is_whole: whether all of it arrived; else a medium refused it or failed, or it was under way when
            recording ended.
    """

    key: str
    nbytes: int
    source: str
    target: str
    begin_s: float
    end_s: float
    is_whole: bool


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """A caller was blocked.

    Attributes:
        begin_s, end_s: from its call to what it came to, well or badly.
        reason: what it waited for.
        keys: whose bytes; of a quota none.
        tier: where they were to be; ``None``: anywhere.
        thread: the caller's, as ``threading.get_ident()`` names it.
    """

    begin_s: float
    end_s: float
    reason: WaitedFor
    keys: tuple[str, ...]
    tier: str | None
    thread: int


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """Keys that a caller used in place.

    Attributes:
        keys: what they were called when it asked.
        tier: where.
        asked_s: when it asked.
        begin_s: when it got them.
        end_s: when it gave them back; ``math.inf``: not while it was recorded.
        is_written: whether it changed them.
        thread: that asked.
    """

    keys: tuple[str, ...]
    tier: str
    asked_s: float
    begin_s: float
    end_s: float
    is_written: bool
    thread: int


@dataclass(frozen=True, slots=True)
class Put:
    """A caller brought bytes.

    Attributes:
        at_s: when it asked.
        key, nbytes: what.
        tier: where it wanted them; ``None``: as fast as there was room.
        thread: that asked.
    """

    at_s: float
    key: str
    nbytes: int
    tier: str | None
    thread: int


@dataclass(frozen=True, slots=True)
class Renaming:
    """Keys were dropped, or are called otherwise.

    Attributes:
        at_s: when.
        names: the new name of each key; ``None``: it was dropped.
    """

    at_s: float
    names: Mapping[str, str | None]


@dataclass(frozen=True, slots=True)
class Stay:
    """One key's bytes in one tier.

    Attributes:
        key: what it was called when it came.
        tier: where.
        charge_bytes: what they take there.
        begin_s: when room was reserved for them; of those that were there already, when recording began.
        end_s: when it was free again; ``math.inf``: not while it was recorded.
    """

    key: str
    tier: str
    charge_bytes: int
    begin_s: float
    end_s: float = math.inf


@dataclass(slots=True)
class Recording:
    """What a store did between two moments.  It grows while it is being recorded.

    Attributes:
        tiers: names, fastest first.
        begin_s, end_s: from when to when.
        unix_ns: what the calendar said at ``begin_s``, in nanoseconds since 1970.
        copies, waits, leases: in the order of their ends; those that have not ended come last.
        puts, renamings: in order.
        stays: in the order of their ends; those that have not ended come last.
        charges: by tier, what was charged there: time and bytes, at the begin and at each change.
        quotas: by tier, what might be charged there, likewise.
        is_whole: whether nothing is missing: there was memory for it.
    """

    tiers: tuple[str, ...]
    begin_s: float = 0.0
    end_s: float = 0.0
    unix_ns: int = 0
    copies: list[CopyRecord] = field(default_factory=list)
    waits: list[WaitRecord] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    renamings: list[Renaming] = field(default_factory=list)
    stays: list[Stay] = field(default_factory=list)
    charges: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    quotas: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    is_whole: bool = True

    def moved_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes that arrived, by source and target, as `StoreStats.traffic` counts them."""
        moved: dict[tuple[str, str], int] = {}
        for copy in self.copies:
            if copy.is_whole:
                direction = copy.source, copy.target
                moved[direction] = moved.get(direction, 0) + copy.nbytes
        return moved
