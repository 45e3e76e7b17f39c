"""Steps and bytes over the quota of host memory, from a tenth of what training needs to more than all of it.

``python -m bench.quotas`` trains the model of `step-disk` on the CPU under one quota after the other, each in
turns with plain PyTorch and with plain threads on the same disk.  Three figures are made of the same runs:

1. `quota-steps`: is there a cliff?  A step is held against the larger of two: what plain PyTorch takes, and
   what the bytes that it moved take at the bandwidth that threads reached in the same round.
2. `quota-bytes`: is anything moved for nothing?  When backward has ended every parameter, gradient and moment
   has to exist: what exceeds the quota then was written since the step before, and has to be read again.
3. `quota-nearly-all`: a step with 93 % of the need against one with all of it.

`quota-bytes-in-backward` asks the second question where backward steps each parameter as soon as it has its
gradient (``optimizer_in_backward``), so that no gradient has to exist then; the least is that of
`bench.training.Floor`, which has parameters read twice.  That counts no room to train in, without which no
program trains: its details say also what was moved over the least beside room for one layer that is stepped.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, take_turns
from bench.rawdisk import RawDisk
from bench.record import Better, Figure
from bench.store import DISK_BLOCK_BYTES, DISK_THREADS
from bench.training import MIB, RAW_MIB, SETTLING_TURNS, STATE_TENSORS, STEPS_A_TURN, Floor
from bench.workload import Trainee, Workload, least_written_bytes

SHARES = (0.1, 0.2, 0.4, 0.6, 0.8, 0.93, 1.2)
"""Of parameters, gradients and both moments: the quotas."""

NEARLY_ALL, ALL = 0.93, 1.2

SHARES_IN_BACKWARD = (0.1, 0.2, 0.4, 0.6)
"""Three quarters are all of it then."""

LEAST_COUNTED = 0.05
"""Of all state: less than that is too little to be moved in a least way."""


@dataclass(frozen=True)
class UnderQuota:
    """What steps under one quota came to; lists are by round.

    Attributes:
        least: bytes that each step has to read, and to write.
        plain_s: of plain PyTorch.
        step_s: of ours.
        moved: bytes read and written a step.
        bytes_s: what these take at the bandwidth of plain threads in the same round.
        least_beside_one: as ``least``, where one layer that is stepped has room beside what is kept; only
            where backward steps.
    """

    least: Floor
    plain_s: Sequence[float]
    step_s: Sequence[float]
    moved: Sequence[tuple[float, float]]
    bytes_s: Sequence[float]
    least_beside_one: Floor | None = None

    @property
    def times(self) -> Spread:
        """A step over the larger of plain PyTorch's and its bytes'."""
        return ratios(self.step_s, list(map(max, self.plain_s, self.bytes_s)))

    @property
    def times_least(self) -> tuple[float, float]:
        """Bytes read and written over the least."""
        return self.over(self.least)

    def over(self, floor: Floor) -> tuple[float, float]:
        """Bytes read and written over those of a floor."""
        read, written = (Spread.of(each).median for each in zip(*self.moved, strict=True))
        return read / floor.read_bytes, written / floor.write_bytes

    def __str__(self) -> str:
        """Print all of it."""
        read, written = (Spread.of(each).median / MIB for each in zip(*self.moved, strict=True))
        return (
            f"{self.times} times; step {Spread.of(self.step_s)} s, plain {Spread.of(self.plain_s)} s, bytes "
            f"{Spread.of(self.bytes_s)} s: {read:.0f} MiB read (least {self.least.read_bytes / MIB:.0f}), "
            f"{written:.0f} written (least {self.least.write_bytes / MIB:.0f})"
        )


@functools.cache
def _measured(settings: Settings, *, in_backward: bool = False) -> Mapping[float, UnderQuota]:
    """Train under every quota, one after the other."""
    shares = SHARES_IN_BACKWARD if in_backward else SHARES
    return {share: _trained(share, settings, in_backward=in_backward) for share in shares}


def _trained(share: float, settings: Settings, *, in_backward: bool) -> UnderQuota:
    """Train under one quota, by turns.

    Raises:
        AssertionError: losses differ from those of plain PyTorch.
    """
    workload = Workload.scaled(settings.scale)
    need_bytes = STATE_TENSORS * workload.parameter_bytes
    quota_bytes = int(share * need_bytes)
    config = ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=quota_bytes,
        offload_disk_size=4 * need_bytes,
        offload_path=str(settings.scratch / f"files-{share}"),
        optimizer_in_backward=in_backward,
    )
    raw_bytes = settings.scaled(RAW_MIB, least=16) * MIB
    raw_path = settings.scratch / "raw"
    with (
        Trainee(workload, in_backward=in_backward) as plain,
        RawDisk(raw_path, raw_bytes, threads=DISK_THREADS, block_bytes=DISK_BLOCK_BYTES) as raw,
        Trainee(workload, config) as ours,
    ):

        def turn() -> Mapping[str, float]:
            before = _moved(ours)
            step_s = ours.seconds_a_step(STEPS_A_TURN)
            read, written = ((b - a) / STEPS_A_TURN for a, b in zip(before, _moved(ours), strict=True))
            return {"step": step_s, "read": read, "written": written}

        found = take_turns(
            [
                lambda: {"plain": plain.seconds_a_step(STEPS_A_TURN)},
                turn,
                lambda: {"mix": raw.mix(1 / 2)},
            ],
            repeats=settings.repeats,
            warmups=max(SETTLING_TURNS, settings.warmups),
        )
        if not plain.losses.equal(ours.losses):
            raise AssertionError(f"losses differ: {plain.losses.tolist()}, {ours.losses.tolist()}")
    moved = list(zip(found["read"], found["written"], strict=True))
    bytes_s = [sum(each) / raw_bytes * mix_s for each, mix_s in zip(moved, found["mix"], strict=True)]
    with_gradients = least_written_bytes(workload.parameter_bytes, quota_bytes)
    least = (
        Floor.of(workload.parameter_bytes, quota_bytes)
        if in_backward
        else Floor(with_gradients, with_gradients)
    )
    beside_one = Floor.of(workload.parameter_bytes, max(0, quota_bytes - workload.trained_bytes))
    return UnderQuota(
        least, found["plain"], found["step"], moved, bytes_s, beside_one if in_backward else None
    )


def _moved(ours: Trainee) -> tuple[int, int]:
    """Return the bytes that were read from disk and written to it so far."""
    traffic = ours.store.stats().traffic
    sizes = {name: each.nbytes for name, each in traffic.items()}
    return sizes.get(("disk", "host"), 0), sizes.get(("host", "disk"), 0)


def _details(found: Mapping[float, UnderQuota]) -> dict[str, str]:
    return {
        "losses": "equal to plain PyTorch's, bit for bit, under each quota",
        **{f"{share:.0%} of the need": str(each) for share, each in found.items()},
    }


def quota_steps(settings: Settings) -> Figure:
    """Look for a cliff: the worst step over its floor."""
    worst = max(each.times.median for each in _measured(settings).values())
    what = (
        f"step of {Workload.scaled(settings.scale)}, device='cpu', over the larger of plain PyTorch's and of "
        "its bytes' at the bandwidth of raw threads: the worst of seven quotas of host memory"
    )
    return Figure(
        "quota-steps", what, worst, "x the floor", 1.2, 1.1, Better.LOWER, _details(_measured(settings))
    )


def quota_bytes(settings: Settings) -> Figure:
    """Compare what is read and written with the least; the worst of both under any quota."""
    reached, details = _worst_bytes(settings, _measured(settings))
    what = "bytes that a step reads and writes over the least: the worse of both, and the worst of all quotas"
    return Figure("quota-bytes", what, reached, "x the least", 1.15, 1.0, Better.LOWER, details)


def quota_bytes_in_backward(settings: Settings) -> Figure:
    """Do the same where backward steps each parameter."""
    found = _measured(settings, in_backward=True)
    reached, details = _worst_bytes(settings, found)
    what = "bytes that a step reads and writes over the least, where backward steps: the worst of all quotas"
    details |= _details(found)
    return Figure("quota-bytes-in-backward", what, reached, "x the least", 1.1, 1.0, Better.LOWER, details)


def _worst_bytes(settings: Settings, found: Mapping[float, UnderQuota]) -> tuple[float, dict[str, str]]:
    state_bytes = STATE_TENSORS * Workload.scaled(settings.scale).parameter_bytes
    times = {
        f"{share:.0%} of the need": each.times_least
        for share, each in found.items()
        if each.least.write_bytes > LEAST_COUNTED * state_bytes
    }
    details = {
        name: f"read {read:.3f}, written {written:.3f} times the least"
        for name, (read, written) in times.items()
    }
    for share, each in found.items():
        if each.least_beside_one is not None:
            read, written = each.over(each.least_beside_one)
            name = f"{share:.0%} of the need, over the least beside room for one layer that is stepped"
            details[name] = f"read {read:.3f}, written {written:.3f} times that"
    return max(map(max, times.values())), details


def quota_nearly_all(settings: Settings) -> Figure:
    """Compare a step with nearly all of the need in host memory with one that has more than all."""
    found = _measured(settings)
    most, nearly = found[ALL], found[NEARLY_ALL]
    # They ran one after the other: each is held against plain PyTorch beside it.
    reached = ratios(nearly.step_s, nearly.plain_s).median / ratios(most.step_s, most.plain_s).median
    what = (
        "step with 93 % of the need in host memory over one with 120 %, each over plain PyTorch's beside it"
    )
    details = {name: str(each) for name, each in (("93 %", nearly), ("120 %", most))}
    return Figure("quota-nearly-all", what, reached, "x its time", 1.25, 1.1, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "quota-steps": quota_steps,
    "quota-bytes": quota_bytes,
    "quota-bytes-in-backward": quota_bytes_in_backward,
    "quota-nearly-all": quota_nearly_all,
}

if __name__ == "__main__":
    sys.exit(main("bench.quotas", QUESTIONS))
