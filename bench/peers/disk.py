"""The same bytes to disk and back by every peer, in turns: speed, processor time, memory, bytes.

Answers two questions of ``tierstore``: how fast against the best engine of fio, and how much processor
time against DeepSpeed's handle, which keeps no checksum.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Spread, ratios
from bench.peers.disk_peers import OURS, PEERS
from bench.peers.diskjob import MIB, DiskJob
from bench.peers.result import Result
from bench.peers.usage import GB, Usage
from bench.peers.workers import Company
from bench.record import Better, Figure

FIO = ("fio-psync", "fio-libaio", "fio-io_uring")
DEEPSPEED = "deepspeed-aio"
_PHASES = ("write", "read", "warm read", "put")


@dataclass(frozen=True)
class DiskSettings:
    """How the question is asked.

    Attributes:
        scratch: a directory on the disk to measure.
        peers: names, in the order of the first round.
        against: the peer that ratios in the table are against, if it is there.
        tensor_mib: sizes of tensors, each a job of its own.
        total_mib: of all tensors of a job.
        block_bytes: of one request.
        depth: requests at a time.
    """

    scratch: Path
    peers: Sequence[str] = tuple(PEERS)
    against: str = "fio-libaio"
    repeats: int = 5
    warmups: int = 1
    tensor_mib: Sequence[float] = (1, 4, 16, 64)
    total_mib: float = 512
    block_bytes: int = MIB
    depth: int = 4

    def jobs(self) -> list[DiskJob]:
        """Return one job for each size of tensor."""
        return [
            DiskJob(
                self.scratch / f"{size:g}",
                int(size * MIB),
                max(1, int(self.total_mib // size)),
                self.block_bytes,
                self.depth,
            )
            for size in self.tensor_mib
        ]


@dataclass(frozen=True)
class Rounds:
    """What one peer took for one job, by phase, lists in the order of rounds."""

    nbytes: int
    way: str
    phases: Mapping[str, Sequence[Usage]]
    peak_bytes: int
    proportional_bytes: int
    verified_bytes: int

    def rates(self, phase: str) -> list[float]:
        """Return bytes per second."""
        return [self.nbytes / taken.seconds for taken in self.phases[phase]]

    def cpu_seconds_a_gb(self) -> list[float]:
        """Return processor seconds per GB moved, there and back."""
        both = zip(self.phases["write"], self.phases["read"], strict=True)
        return [(there + back).cpu_seconds / (2 * self.nbytes / GB) for there, back in both]


Found = Mapping[str, Mapping[str, Rounds]]
"""By job, then by peer."""


def compare(settings: DiskSettings) -> Result:
    """Let all peers do all jobs.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
    """
    found: dict[str, dict[str, Rounds]] = {}
    needed = [name for name in settings.peers if name == OURS]
    with Company("disk", settings.peers, settings.scratch / "logs", needed) as company:
        for job in settings.jobs():
            found[_title(job)] = _take_turns(company, job, settings)
        left_out = company.left_out
    what = (
        f"tensors written to disk and read back by each peer, {settings.total_mib:g} MiB a turn, in requests "
        f"of {settings.block_bytes // 1024} KiB, {settings.depth} at a time where that can be chosen; "
        "every byte compared"
    )
    return Result(
        name="io",
        what=what,
        tables={title: table(peers, settings.against) for title, peers in found.items()},
        figures=figures(found),
        left_out=left_out,
        jobs=[
            fio_job(title, name, rounds) for title, peers in found.items() for name, rounds in peers.items()
        ],
        notes=_notes(found, settings.against),
    )


def _title(job: DiskJob) -> str:
    return f"{job.count} tensors of {job.tensor_bytes / MIB:g} MiB"


def _take_turns(company: Company, job: DiskJob, settings: DiskSettings) -> dict[str, Rounds]:
    ready = company.ask_all("prepare", job.to_mapping())
    answers = company.rounds("turn", repeats=settings.repeats, warmups=settings.warmups)
    company.ask_all("finish")
    return {name: _rounds(job, ready[name], of) for name, of in answers.items()}


def _rounds(job: DiskJob, ready: Mapping[str, object], answers: Sequence[Mapping[str, object]]) -> Rounds:
    def phase(name: str) -> list[Usage]:
        return [Usage.from_mapping(answer[name]) for answer in answers]  # type: ignore[arg-type]  # as was sent

    idle_bytes = int(str(ready["idle_bytes"]))
    return Rounds(
        nbytes=job.nbytes,
        way=str(ready["way"]),
        phases={name: phase(name) for name in _PHASES if name in answers[0]},
        peak_bytes=max(int(str(answer.get("peak_bytes", idle_bytes))) for answer in answers) - idle_bytes,
        proportional_bytes=max(int(str(answer.get("proportional_bytes", 0))) for answer in answers),
        verified_bytes=sum(int(str(answer["verified_bytes"])) for answer in answers),
    )


# ---------------------------------------------------------------------- what it comes to


def figures(found: Found) -> list[Figure]:
    """Return what can be said with the peers that took part."""
    both = [_speed(found), _cpu(found)]
    return [figure for figure in both if figure is not None]


def _speed(found: Found) -> Figure | None:
    """Hold tierstore against the engine of fio with the best median, for each size and direction."""
    details, reached = {}, []
    for title, peers in found.items():
        engines = [name for name in FIO if name in peers]
        if OURS not in peers or not engines:
            return None
        for phase in ("write", "read"):
            best = max(engines, key=lambda name: statistics.median(peers[name].rates(phase)))
            speed = ratios(peers[OURS].rates(phase), peers[best].rates(phase))
            reached.append(speed.median)
            details[f"{title}: speed of {phase} over that of {best}"] = str(speed)
    what = "write (evict) and read (fetch), checksums on, the slowest size and way, against fio's best engine"
    return Figure("peers-io-speed", what, min(reached), "x its speed", 0.9, 0.98, Better.HIGHER, details)


def _cpu(found: Found) -> Figure | None:
    """Hold tierstore's processor time against that of DeepSpeed's handle, for each size."""
    details, reached = {}, []
    for title, peers in found.items():
        if OURS not in peers or DEEPSPEED not in peers:
            return None
        ours, peer = peers[OURS].cpu_seconds_a_gb(), peers[DEEPSPEED].cpu_seconds_a_gb()
        times = ratios(ours, peer)
        reached.append(times.median)
        details[f"{title}: times"] = str(times)
        details[f"{title}: tierstore CPU s/GB"] = str(Spread.of(ours))
        details[f"{title}: {DEEPSPEED} CPU s/GB"] = str(Spread.of(peer))
    what = "processor seconds per GB moved, checksum on, against DeepSpeed's handle without one; worst size"
    return Figure("peers-io-cpu", what, max(reached), "x its time", 1.5, 1.0, Better.LOWER, details)


def table(peers: Mapping[str, Rounds], against: str) -> list[list[str]]:
    """Return a line for each peer: fio's MiB/s, medians with their range."""
    head = ["peer", "write MiB/s", "read MiB/s", "warm read", f"write x {against}", f"read x {against}"]
    rows = [[*head, "CPU s/GB", "read, written a turn, MiB", "memory MiB", "verified MiB"]]
    base = peers.get(against)
    for name, rounds in peers.items():
        speeds = [_mib(rounds, phase) for phase in ("write", "read", "warm read")]
        versus = [
            f"{ratios(rounds.rates(phase), base.rates(phase)).median:.2f}" if base else "-"
            for phase in ("write", "read")
        ]
        moved = [
            there + back for there, back in zip(rounds.phases["write"], rounds.phases["read"], strict=True)
        ]
        drive = (
            f"{statistics.median(each.read_bytes for each in moved) / MIB:.0f}, "
            f"{statistics.median(each.written_bytes for each in moved) / MIB:.0f}"
        )
        cpu = f"{statistics.median(rounds.cpu_seconds_a_gb()):.3f}"
        memory, verified = (
            (f"{rounds.peak_bytes / MIB:.0f}" if rounds.peak_bytes else "-"),
            f"{rounds.verified_bytes / MIB:.0f}",
        )
        rows.append([name, *speeds, *versus, cpu, drive, memory, verified])
    return rows


def _mib(rounds: Rounds, phase: str) -> str:
    if phase not in rounds.phases:
        return "-"
    rates = Spread.of([rate / MIB for rate in rounds.rates(phase)])
    return f"{rates.median:.0f} ({rates.lowest:.0f}-{rates.highest:.0f})"


def fio_job(title: str, name: str, rounds: Rounds) -> dict[str, object]:
    """Return a peer's medians as fio's JSON names them, and every round as it was."""
    job: dict[str, object] = {"jobname": f"{name}: {title}", "way": rounds.way}
    for phase in ("read", "write"):
        taken = rounds.phases[phase]
        rate = statistics.median(rounds.rates(phase))
        job[phase] = {
            "io_bytes": rounds.nbytes,
            "bw_bytes": round(rate),
            "bw": round(rate / 1024),
            "runtime": round(statistics.median(each.seconds for each in taken) * 1e3),
        }
    job |= {"cpu_seconds_a_gb": statistics.median(rounds.cpu_seconds_a_gb()), "peak_bytes": rounds.peak_bytes}
    job |= {"proportional_bytes": rounds.proportional_bytes, "verified_bytes": rounds.verified_bytes}
    job["rounds"] = {phase: [each.to_mapping() for each in taken] for phase, taken in rounds.phases.items()}
    return job


def _notes(found: Found, against: str) -> list[str]:
    ways: dict[str, set[str]] = {}
    for peers in found.values():
        for name, rounds in peers.items():
            ways.setdefault(rounds.way, set()).add(name)
    notes = [f"{', '.join(sorted(names))}: {way}" for way, names in ways.items()]
    if not any(against in peers for peers in found.values()):
        notes.append(f"{against} did not take part: no ratios")
    return [
        *notes,
        "memory: the peak of the process over what it had before the job, the caller's own tensors included",
        "fio checks its bytes once, before the rounds, since its bytes are its own",
    ]
