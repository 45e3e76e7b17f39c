"""What a run did when, as data: predicted by the simulator or measured in a run, and the same for both.

Times are seconds since the run's begin.  A *lane* is what works one thing at a time for a reader: computing,
each link, waiting, steps on the host.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from tierstore.planning.program import ByteKind

K = TypeVar("K")

TIMELINE_VERSION = 1

COMPUTE = "compute"
"""The lane of what the device computes."""

HOST = "host steps"
"""The lane of what the host's cores compute beside it."""

WAITING = "waiting"
"""The lane of stalls: computing could go on, but for what it waits for."""


class StallCause(enum.Enum):
    """Why nothing was computed."""

    COPY_UP = "copy up"  # the bytes are on their way from host memory
    ROOM = "room"  # other bytes have to leave first
    COPY_DOWN = "copy down"  # the caller waits for bytes to leave
    DISK = "disk"  # the bytes are on their way from storage
    COLLECTIVE = "collective"  # other ranks
    HOST_STEP = "host step"  # the host's optimizer


@dataclass(frozen=True, slots=True)
class Interval:
    """Something that went on from one time to another.

    Attributes:
        begin_s, end_s: when.
        lane: where: `COMPUTE`, `HOST`, `WAITING` or a link's name, as ``"host->device"``.
        name: what: a module, a key.
        key: whose bytes; ``None``: nobody's.
        nbytes: that moved; 0: none did.
        cause: of a stall.
    """

    begin_s: float
    end_s: float
    lane: str
    name: str
    key: str | None = None
    nbytes: int = 0
    cause: StallCause | None = None


@dataclass(frozen=True, slots=True)
class StepTotals:
    """One step in numbers.

    Attributes:
        begin_s, end_s: when.
        moved_bytes: by link's name.
        stall_s: by cause.
        peak_bytes: by tier; of the first tier with the program's own bytes.
    """

    begin_s: float
    end_s: float
    moved_bytes: Mapping[str, int]
    stall_s: Mapping[StallCause, float]
    peak_bytes: Mapping[str, int]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class Account:
    """Who held what of the first tier when most was held.

    Attributes:
        at_s: when.
        nbytes: altogether.
        kinds: by kind.
        largest: keys and bytes of the largest, ten at most.
        moment: the name of what was computed.
    """

    at_s: float
    nbytes: int
    kinds: Mapping[ByteKind, int]
    largest: tuple[tuple[str, int], ...] = ()
    moment: str = ""


@dataclass(frozen=True)
class Timeline:
    """What a run did when.

    Attributes:
        name: for people.
        source: ``"simulated"`` or ``"measured"``.
        intervals: in order of their begin.
        charges: by tier, the bytes that keys take there: time and bytes, at each change.
        held: bytes of the first tier by kind: time and bytes, at each change.
        steps: in order.
        account: of the peak.
        period: how many of the last steps repeat: one in a steady state is the mean of them.
        assumptions: sentences about what was not known.
    """

    name: str
    source: str
    intervals: tuple[Interval, ...]
    steps: tuple[StepTotals, ...]
    account: Account
    charges: Mapping[str, tuple[tuple[float, int], ...]] = field(default_factory=dict)
    held: tuple[tuple[float, Mapping[ByteKind, int]], ...] = ()
    period: int = 1
    assumptions: tuple[str, ...] = ()

    @property
    def steady(self) -> tuple[StepTotals, ...]:
        """The last steps, which repeat."""
        return self.steps[-self.period :]

    @property
    def step_s(self) -> float:
        """Seconds of one step in the steady state."""
        return sum(step.seconds for step in self.steady) / len(self.steady)

    @property
    def moved_bytes(self) -> dict[str, float]:
        """Bytes of one step in the steady state, by link's name; where nothing moved there is no entry."""
        return _mean([step.moved_bytes for step in self.steady])

    @property
    def stall_s(self) -> dict[StallCause, float]:
        """Seconds of one step in the steady state in which nothing was computed, by cause."""
        return _mean([step.stall_s for step in self.steady])

    @property
    def peak_bytes(self) -> dict[str, int]:
        """The most that was held in each tier, from the first step to the last."""
        tiers = {tier for step in self.steps for tier in step.peak_bytes}
        return {tier: max(step.peak_bytes.get(tier, 0) for step in self.steps) for tier in sorted(tiers)}


def _mean(mappings: Sequence[Mapping[K, float]]) -> dict[K, float]:
    keys = dict.fromkeys(key for mapping in mappings for key in mapping)
    return {key: sum(mapping.get(key, 0) for mapping in mappings) / len(mappings) for key in keys}
