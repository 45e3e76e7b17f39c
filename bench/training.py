"""What offloading costs a training step, and what it saves in memory, against plain PyTorch."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, take_turns
from bench.rawdisk import RawDisk
from bench.record import Better, Figure
from bench.store import DISK_BLOCK_BYTES, DISK_THREADS
from bench.workload import Trainee, Workload

MIB = 1024**2
STATE_TENSORS = 4  # a parameter, its gradient, and Adam's two moments
DISK_HOST_BYTES = 256 * MIB  # the quota of `step-disk` at full scale
RAW_MIB = 256
STEPS_A_TURN = 3
SETTLING_TURNS = 2  # the plan, the budget and the steps ahead settle within five steps


# ---------------------------------------------------------------------- configurations


def in_memory(workload: Workload) -> ts.OffloadConfig:
    """Everything fits in host memory, which is where computing happens."""
    return ts.OffloadConfig(device="cpu", offload_cpu_size=6 * workload.parameter_bytes, offload_disk_size=0)


def emulated(workload: Workload) -> ts.OffloadConfig:
    """A device that holds a tenth of the state, behind a link without limit."""
    state_bytes = STATE_TENSORS * workload.parameter_bytes
    return ts.OffloadConfig(
        device="emulated",
        max_device_memory=state_bytes // 10,
        offload_cpu_size=2 * state_bytes,
        offload_disk_size=0,
    )


def on_disk(workload: Workload, path: Path, *, in_backward: bool = False) -> ts.OffloadConfig:
    """Host memory for a sixth of the state, computing happens there, the rest on disk."""
    return ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=host_quota_bytes(workload),
        offload_disk_size=4 * STATE_TENSORS * workload.parameter_bytes,
        offload_path=str(path),
        optimizer_in_backward=in_backward,
    )


def host_quota_bytes(workload: Workload) -> int:
    """Return the quota of `on_disk`, in proportion where the model is smaller."""
    return int(DISK_HOST_BYTES * workload.share)


# ---------------------------------------------------------------------- step time


def _turns(
    settings: Settings, plain: Trainee, ours: Trainee, raw: RawDisk | None = None, read_share: float = 0.5
) -> dict[str, list[float]]:
    """Train both in turns, with the raw disk between them if there is one; compare all losses."""

    def raw_disk() -> Mapping[str, float]:
        assert raw is not None
        return raw.round_trip() | {"mix": raw.mix(read_share)}

    runs = [
        lambda: {"plain": plain.seconds_a_step(STEPS_A_TURN)},
        lambda: {"offloaded": ours.seconds_a_step(STEPS_A_TURN)},
        *([raw_disk] if raw is not None else []),
    ]
    seconds = take_turns(runs, repeats=settings.repeats, warmups=max(SETTLING_TURNS, settings.warmups))
    if not torch.equal(plain.losses, ours.losses):
        raise AssertionError(f"the losses differ: {plain.losses.tolist()}, {ours.losses.tolist()}")
    return seconds


def _details(seconds: Mapping[str, list[float]], ours: Trainee) -> dict[str, str]:
    details = {f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()}
    details["losses"] = f"{len(ours.losses)} of {len(ours.losses)} equal, bit for bit"
    stats = ours.store.stats()
    for (source, target), traffic in stats.traffic.items():
        details[f"{source} to {target}"] = f"{traffic.copies} copies, {traffic.nbytes / MIB:.0f} MiB in all"
    details["stalled"] = f"{stats.stall_seconds:.2f} s in all"
    return details


def step_in_memory(settings: Settings) -> Figure:
    """Train with everything in the host tier, in turns with plain PyTorch."""
    workload = Workload.scaled(settings.scale)
    with Trainee(workload) as plain, Trainee(workload, in_memory(workload)) as ours:
        seconds = _turns(settings, plain, ours)
        details = _details(seconds, ours)
    times = ratios(seconds["offloaded"], seconds["plain"])
    details["times plain PyTorch"] = str(times)
    what = f"step of {workload}, device='cpu', everything fits in host memory, against plain PyTorch"
    return Figure("step-in-memory", what, times.median, "x its time", 1.25, 1.05, Better.LOWER, details)


def step_emulated(settings: Settings) -> Figure:
    """Train through a device that holds a tenth of the state, in turns with plain PyTorch."""
    workload = Workload.scaled(settings.scale)
    with Trainee(workload) as plain, Trainee(workload, emulated(workload)) as ours:
        seconds = _turns(settings, plain, ours)
        details = _details(seconds, ours)
    times = ratios(seconds["offloaded"], seconds["plain"])
    details["times plain PyTorch"] = str(times)
    what = f"step of {workload}, emulated device of a tenth of the state, against plain PyTorch"
    return Figure("step-emulated", what, times.median, "x its time", 1.5, 1.25, Better.LOWER, details)


# ---------------------------------------------------------------------- the disk's floor


@dataclass(frozen=True)
class Floor:
    """The bytes that a step cannot but move to and from disk."""

    read_bytes: int
    write_bytes: int

    @classmethod
    def of(cls, parameter_bytes: int, kept_bytes: int) -> Floor:
        """Count them: parameters are read for forward and for backward, moments once, all written once.

        What the quota keeps need not move.  It is counted as if it kept what saves most: parameters,
        of which a byte saves two reads and a write.  Gradients are not counted, and neither is room to
        train in.
        """
        kept_parameters = min(kept_bytes, parameter_bytes)
        kept_moments = min(kept_bytes - kept_parameters, 2 * parameter_bytes)
        parameters = parameter_bytes - kept_parameters
        moments = 2 * parameter_bytes - kept_moments
        return cls(read_bytes=2 * parameters + moments, write_bytes=parameters + moments)

    @property
    def read_share(self) -> float:
        """Reads among all bytes."""
        return self.read_bytes / max(1, self.read_bytes + self.write_bytes)

    def seconds(self, read_rate: float, write_rate: float, mixed_rate: float) -> float:
        """Return the least time at the bytes per second that were measured: one after the other, or mixed."""
        in_turn = self.read_bytes / read_rate + self.write_bytes / write_rate
        return min(in_turn, (self.read_bytes + self.write_bytes) / mixed_rate)


def step_disk(settings: Settings) -> Figure:
    """Train with a sixth of the state in host memory and the rest on disk; compare with the floor."""
    what, times, details = _step_on_disk(settings, in_backward=False)
    return Figure("step-disk", what, times, "x the floor", 1.4, 1.15, Better.LOWER, details)


def step_disk_in_backward(settings: Settings) -> Figure:
    """Do the same where backward steps each parameter, beside plain PyTorch that does so, too."""
    what, times, details = _step_on_disk(settings, in_backward=True)
    what += ", stepped in backward"
    return Figure("step-disk-in-backward", what, times, "x the floor", 1.25, 1.1, Better.LOWER, details)


def _step_on_disk(settings: Settings, *, in_backward: bool) -> tuple[str, float, dict[str, str]]:
    workload = Workload.scaled(settings.scale)
    raw_bytes = settings.scaled(RAW_MIB, least=16) * MIB
    floor = Floor.of(workload.parameter_bytes, host_quota_bytes(workload))
    with (
        Trainee(workload, in_backward=in_backward) as plain,
        RawDisk(
            settings.scratch / "raw", raw_bytes, threads=DISK_THREADS, block_bytes=DISK_BLOCK_BYTES
        ) as raw,
        Trainee(workload, on_disk(workload, settings.scratch / "files", in_backward=in_backward)) as ours,
    ):
        seconds = _turns(settings, plain, ours, raw, floor.read_share)
        details = _details(seconds, ours)
    rates = {name: [raw_bytes / s for s in seconds[name]] for name in ("read", "write", "mix")}
    floors = [floor.seconds(*each) for each in zip(*rates.values(), strict=True)]
    times = ratios(seconds["offloaded"], floors)
    if not in_backward:  # gradients wait for the optimizer: written once, read once
        waiting = workload.parameter_bytes
        with_gradients = Floor(floor.read_bytes + waiting, floor.write_bytes + waiting)
        details["floor s, with gradients"] = str(
            Spread.of([with_gradients.seconds(*each) for each in zip(*rates.values(), strict=True)])
        )
    details |= {
        "floor": f"{floor.read_bytes / MIB:.0f} MiB read, {floor.write_bytes / MIB:.0f} MiB written a step",
        "floor s": str(Spread.of(floors)),
        "times the floor": str(times),
        "times the floor or plain PyTorch, whichever is more": str(
            ratios(seconds["offloaded"], list(map(max, floors, seconds["plain"])))
        ),
        "times plain PyTorch in memory": str(ratios(seconds["offloaded"], seconds["plain"])),
    }
    details |= {f"raw {name} GB/s": str(Spread.of([r / 1e9 for r in rate])) for name, rate in rates.items()}
    what = (
        f"step of {workload}, device='cpu', {host_quota_bytes(workload) // MIB} MiB of host memory, "
        "rest on disk, against the bytes that must move at the bandwidth of raw threads"
    )
    return what, times.median, details


# ---------------------------------------------------------------------- resident memory


def resident_memory(settings: Settings) -> Figure:
    """Train in two processes of their own, one plain and one on disk; compare their peaks."""
    workload = Workload.scaled(settings.scale)
    steps = settings.scaled(4, least=2)
    plain = _child("plain", workload, steps, settings.scratch)
    ours = _child("disk", workload, steps, settings.scratch / "files")
    if plain["losses"] != ours["losses"]:
        raise AssertionError(f"the losses differ: {plain['losses']}, {ours['losses']}")
    over = [_bytes(child, "peak_bytes") - _bytes(child, "before_bytes") for child in (ours, plain)]
    details = {
        "plain PyTorch": f"{_bytes(plain, 'peak_bytes') / MIB:.0f} MiB resident at most",
        "offloaded": f"{_bytes(ours, 'peak_bytes') / MIB:.0f} MiB",
        "offloaded, once closed": f"{_bytes(ours, 'closed_bytes') / MIB:.0f} MiB: all is in memory again",
        "Python and torch alone": f"{_bytes(plain, 'before_bytes') / MIB:.0f} MiB",
        "ratio without Python and torch": f"{over[0] / over[1]:.3f}",
        "losses": f"{steps} of {steps} equal, bit for bit",
    }
    what = "peak resident memory of the process of step-disk over that of plain PyTorch"
    reached = _bytes(ours, "peak_bytes") / _bytes(plain, "peak_bytes")
    return Figure("resident-memory", what, reached, "x its peak", 0.8, 0.5, Better.LOWER, details)


def resident_in_memory(settings: Settings) -> Figure:
    """Train in two processes of their own, one plain and one with everything in the host tier."""
    workload = Workload.scaled(settings.scale)
    steps = settings.scaled(8, least=2)
    plain, ours = (_child(how, workload, steps, settings.scratch) for how in ("plain", "memory"))
    if plain["losses"] != ours["losses"]:
        raise AssertionError(f"the losses differ: {plain['losses']}, {ours['losses']}")
    details = {
        "plain PyTorch": f"{_bytes(plain, 'peak_bytes') / MIB:.0f} MiB resident at most",
        "offloaded": f"{_bytes(ours, 'peak_bytes') / MIB:.0f} MiB",
        "Python and torch alone": f"{_bytes(plain, 'before_bytes') / MIB:.0f} MiB",
        "losses": f"{steps} of {steps} equal, bit for bit",
    }
    what = "peak resident memory of a process that trains with everything in host memory over plain PyTorch's"
    reached = _bytes(ours, "peak_bytes") / _bytes(plain, "peak_bytes")
    return Figure("resident-in-memory", what, reached, "x its peak", 1.1, 1.0, Better.LOWER, details)


def _bytes(child: Mapping[str, object], name: str) -> int:
    return int(str(child[name]))


def reserved(settings: Settings) -> Figure:
    """Train as in `step_disk` and look, all the time, at what the host pool keeps and what is used of it."""
    workload = Workload.scaled(settings.scale)
    shares: list[float] = []
    with Trainee(workload, on_disk(workload, settings.scratch / "files")) as ours:
        ours.step()
        ours.step()
        is_over = threading.Event()

        def watch() -> None:
            while not is_over.wait(0.005):
                host = ours.store.stats().tiers["host"]
                shares.append(host.reserved_bytes / max(1, host.charged_bytes))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            for _ in range(settings.scaled(STEPS_A_TURN)):
                ours.step()
        finally:
            is_over.set()
            watcher.join()
        host = ours.store.stats().tiers["host"]
    details = {
        "reserved / used": str(Spread.of(shares)),
        "reserved at the end": f"{host.reserved_bytes / MIB:.1f} MiB",
        "used at most": f"{host.peak_charged_bytes / MIB:.1f} MiB",
    }
    what = (
        "bytes that the host pool reserves over those that replicas use, median over the steps of step-disk"
    )
    return Figure("reserved", what, Spread.of(shares).median, "x", 1.10, 1.05, Better.LOWER, details)


def _child(how: str, workload: Workload, steps: int, path: Path) -> dict[str, object]:
    command = [sys.executable, "-m", "bench.resident", how, str(workload.dim), str(steps), str(path)]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    result: dict[str, object] = json.loads(done.stdout)
    return result


QUESTIONS: dict[str, Question] = {
    "step-in-memory": step_in_memory,
    "step-emulated": step_emulated,
    "step-disk": step_disk,
    "step-disk-in-backward": step_disk_in_backward,
    "resident-memory": resident_memory,
    "resident-in-memory": resident_in_memory,
    "reserved": reserved,
}

if __name__ == "__main__":
    sys.exit(main("bench.training", QUESTIONS))
