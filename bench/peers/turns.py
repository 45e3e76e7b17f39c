"""How peers are compared on one model: each takes turns of so many steps or passes, called units here.

Knows nothing of what a unit does, nor of what is said about it in the end.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Spread, ratios
from bench.peers.usage import Usage
from bench.peers.workers import Company
from bench.workload import Workload

MIB = 1024**2


@dataclass(frozen=True)
class ModelSettings:
    """How the question is asked.

    Attributes:
        scratch: a directory on the disk to measure.
        peers: names, in the order of the first round.
        against: the peer that ratios in the table are against, if it is there.
        repeats: rounds that count.
        units: of each turn.
        full_host_bytes: tierstore's host quota at full scale.
        warmups: rounds before those that count.
        dim: the width of the model.
        host_bytes: tierstore's host quota; ``None``: ``full_host_bytes``, in proportion.
    """

    scratch: Path
    peers: Sequence[str]
    against: str
    repeats: int
    units: int
    full_host_bytes: int
    warmups: int = 1
    dim: int = 1024
    host_bytes: int | None = None

    @property
    def workload(self) -> Workload:
        """The model."""
        return Workload(self.dim)

    @property
    def quota_bytes(self) -> int:
        """The host quota in effect."""
        return int(self.full_host_bytes * self.workload.share) if self.host_bytes is None else self.host_bytes


@dataclass(frozen=True)
class Turns:
    """What one peer took, lists in the order of rounds.

    Attributes:
        units: of each round.
        taken: what each round took.
        idle_bytes: resident before the model was made: Python and its libraries.
        peak_bytes: the most that was resident in a turn.
    """

    units: int
    taken: Sequence[Usage]
    idle_bytes: int
    peak_bytes: int

    def seconds(self) -> list[float]:
        """Return the seconds of a unit."""
        return [each.seconds / self.units for each in self.taken]

    def cpu_seconds(self) -> float:
        """Return the processor's seconds of a unit."""
        return statistics.median(each.cpu_seconds / self.units for each in self.taken)

    def read_bytes(self) -> float:
        """Return the bytes that a unit reads from the drive."""
        return statistics.median(each.read_bytes / self.units for each in self.taken)

    def written_bytes(self) -> float:
        """Return the bytes that a unit writes to the drive."""
        return statistics.median(each.written_bytes / self.units for each in self.taken)


@dataclass(frozen=True)
class Heard:
    """All that one peer said: of its turns, when the model was there, and in the end."""

    turns: Turns
    ready: Mapping[str, object]
    end: Mapping[str, object]


def take_turns(
    kind: str, unit: str, settings: ModelSettings, needed: Sequence[str]
) -> tuple[dict[str, Heard], Mapping[str, str]]:
    """Let all peers work in turns; return what those said who came to the end, and why others are left out.

    Args:
        kind: of the peers.
        unit: what they call it: how many of it they are asked for.
        settings: how.
        needed: peers whose failure ends the run.

    Raises:
        Absent, PeerFailed: of a peer that is needed.
    """
    job = {
        "dim": settings.workload.dim,
        "path": str(settings.scratch),
        "host_bytes": settings.quota_bytes,
    }
    with Company(kind, settings.peers, settings.scratch / "logs", needed) as company:
        ready = company.ask_all("prepare", job)
        answers = company.rounds(
            "turn", {unit: settings.units}, repeats=settings.repeats, warmups=settings.warmups
        )
        ends = company.ask_all("finish")
        left_out = company.left_out
    heard = {
        name: Heard(turns_of(unit, ready[name], of), ready[name], ends[name])
        for name, of in answers.items()
        if name in ends
    }
    return heard, left_out


def turns_of(unit: str, ready: Mapping[str, object], answers: Sequence[Mapping[str, object]]) -> Turns:
    """Read what one peer said.

    Args:
        unit: what it calls a unit.
        ready: its answer to being prepared.
        answers: of its turns.
    """
    return Turns(
        units=int(str(answers[0][unit])),
        taken=[Usage.from_mapping(answer["usage"]) for answer in answers],  # type: ignore[arg-type]  # as was sent
        idle_bytes=int(str(ready["idle_bytes"])),
        peak_bytes=max(int(str(answer["peak_bytes"])) for answer in answers),
    )


def head(unit: str, against: str) -> list[str]:
    """Return the titles of what `row` returns."""
    return ["peer", f"s a {unit}", f"x {against}", f"CPU s a {unit}", f"read MiB a {unit}"]


def row(name: str, turns: Turns, base: Turns | None) -> list[str]:
    """Return how a peer's line in a table begins: medians with their range, and ratios against ``base``."""
    return [
        name,
        str(Spread.of(turns.seconds())),
        f"{ratios(turns.seconds(), base.seconds()).median:.2f}" if base else "-",
        f"{turns.cpu_seconds():.2f}",
        f"{turns.read_bytes() / MIB:.0f}",
    ]
