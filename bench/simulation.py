"""Figures on the simulated accelerator, in the process that has it: ``python -m bench.simulation NAME,...``.

For `bench.simulated`, which starts it; prints each figure as a line of JSON.

1. Every manner first trains steps that are computed, on the very device and streams, and their losses are
   compared.  Then the device is paced: kernels and copies are slept through, and turns are taken.
2. What the streams were busy with is counted by the device.  A step's floor is the longest of three: its
   kernels, its copies in, its copies out.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

import tierstore as ts
from bench import workload as steps
from bench.activations import FULL, GPU_SHARE, PLAIN, all_marked, mix
from bench.command import Question, Settings
from bench.host_steps import AIM, BAR, stepped_on_the_host
from bench.llamas import MIB, Manner, Size, Trainee, allocated_peak, marks
from bench.measure import Run, Spread, ratios, take_turns
from bench.paced import NONE, equal_losses
from bench.rates import IDEAL_TOKENS, Rates, for_large_batches, for_llama, for_workload
from bench.record import Better, Figure
from bench.training import STATE_TENSORS, STEPS_A_TURN
from bench.workload import Workload
from tierstore.training.optimizers.host_stepper import steps_in_their_time

try:
    from tests import accelerator
except ImportError as error:
    if error.name != "openreg":
        raise
    print(json.dumps({"unmeasurable": str(error)}))
    sys.exit()

COMPUTED_STEPS = 2
SETTLING_TURNS = 2
FULL_NAME = "full recompute"
OURS_NAME = "swapped"
MIX_NAME = "swapped and recomputed"
IDEAL_QUOTA = 0.3
"""Of the peak with everything on the device."""

KEPT = 0.3
"""Of all outputs that are swapped, on the device at most: time that the bar leaves goes to the peak."""

LEARNED_STEPS = 6
"""Until a plan is made of what paced steps take."""


@dataclass(frozen=True)
class Turns:
    """What one manner's turns took, by round, in seconds a step."""

    step: Sequence[float]
    kernels: Sequence[float]
    copies_in: Sequence[float]
    copies_out: Sequence[float]
    processor: Sequence[float]

    @property
    def idle(self) -> float:
        """The share of a step in which no kernel runs."""
        return statistics.median(1 - busy / all_of_it for busy, all_of_it in self._over(self.kernels))

    @property
    def floor_s(self) -> float:
        """The least time of a step: of kernels, bytes in and bytes out, what takes longest."""
        return max(map(statistics.median, (self.kernels, self.copies_in, self.copies_out)))

    def _over(self, part: Sequence[float]) -> Sequence[tuple[float, float]]:
        return list(zip(part, self.step, strict=True))

    def __str__(self) -> str:
        """Say all of it."""
        kernels, come, go = map(statistics.median, (self.kernels, self.copies_in, self.copies_out))
        cores = statistics.median(spent / all_of_it for spent, all_of_it in self._over(self.processor))
        return (
            f"{Spread.of(self.step)} s; floor {self.floor_s:.3g}: kernels {kernels:.3g}, copies in "
            f"{come:.3g}, out {go:.3g}; compute stream idle {self.idle:.1%}; {cores:.2f} cores busy"
        )


def _pace(rates: Rates) -> contextlib.AbstractContextManager[None]:
    return accelerator.paced(accelerator.Pace(rates.operations, rates.memory, rates.link))


def _turns(work: Mapping[str, Callable[[], float]], settings: Settings) -> dict[str, Turns]:
    """Do what is in ``work`` in turns; each returns its seconds a step."""

    def run(name: str, seconds: Callable[[], float]) -> Mapping[str, float]:
        torch.accelerator.synchronize()
        before, spent = accelerator.busy(), time.process_time()
        begun = time.perf_counter()
        step_s = seconds()
        count = (time.perf_counter() - begun) / step_s
        after = accelerator.busy()
        parts = [b - a for a, b in zip(asdict(before).values(), asdict(after).values(), strict=True)]
        parts.append(time.process_time() - spent)
        return {name: step_s} | {f"{name} {number}": part / count for number, part in enumerate(parts)}

    runs: list[Run] = [functools.partial(run, name, each) for name, each in work.items()]
    taken = take_turns(runs, repeats=settings.repeats, warmups=max(SETTLING_TURNS, settings.warmups))
    return {name: Turns(taken[name], *(taken[f"{name} {part}"] for part in range(4))) for name in work}


def _times(turns: Mapping[str, Turns], name: str, other: str) -> Spread:
    return ratios(turns[name].step, turns[other].step)


# ---------------------------------------------------------------------- activations


def _on_the_device(manners: Mapping[str, Manner]) -> dict[str, Manner]:
    return {name: replace(each, device=accelerator.DEVICE.type) for name, each in manners.items()}


@dataclass(frozen=True)
class Llamas:
    """What the turns of all manners came to."""

    turns: Mapping[str, Turns]
    peaks: Mapping[str, int]
    details: Mapping[str, str]

    def of_peak(self, name: str, other: str) -> float:
        """Return a manner's peak over another's."""
        return self.peaks[name] / self.peaks[other]


def _llamas(manners: Mapping[str, Manner], settings: Settings) -> Llamas:
    size = Size.scaled(settings.scale)
    rates = for_llama(size, GPU_SHARE)
    with contextlib.ExitStack() as stack:
        trainees = {
            name: stack.enter_context(Trainee(size, manner))
            for name, manner in _on_the_device(manners).items()
        }
        said = _compute(list(trainees.values()))
        with _pace(rates):
            turns = _turns(
                {name: functools.partial(_step_s, each) for name, each in trainees.items()}, settings
            )
        moved = {f"{name}, moved": each.moved for name, each in trainees.items() if each.swap is not None}
    peaks = {name: _peak(size, manner, rates) for name, manner in _on_the_device(manners).items()}
    details = {
        "the device": f"{rates}: {size.marked_bytes / 1e6:.0f} MB one way take {GPU_SHARE:.2f} of products",
        **{name: str(each) for name, each in turns.items()},
        **{f"{name}, peak": f"{each / MIB:.1f} MiB" for name, each in peaks.items()},
        **moved,
        "losses of computed steps": said,
    }
    return Llamas(turns, peaks, details)


def _step_s(trainee: Trainee) -> float:
    return trainee.seconds()[1]


def _compute(trainees: Sequence[Trainee]) -> str:
    """Train a few steps whose kernels are computed; compare their losses."""
    for trainee in trainees:
        for _ in range(COMPUTED_STEPS):
            trainee.step()
    plain, *others = [trainee.losses.cpu() for trainee in trainees]
    return [equal_losses(other, plain) for other in others][-1]


def _peak(size: Size, manner: Manner, rates: Rates) -> int:
    """Return the most bytes that a manner has on the device in a paced step."""
    with _pace(rates):
        return allocated_peak(size, manner)


def swap_peak(settings: Settings) -> Figure:
    """Take the allocator's peaks, all attention and feed-forward outputs swapped, and none."""
    size = Size.scaled(settings.scale)
    found = _llamas({NONE: PLAIN, OURS_NAME: all_marked(size, kept=KEPT)}, settings)
    what = (
        f"allocator's peak of {size}, all attention and feed-forward outputs swapped, over that without, on "
        "the simulated accelerator"
    )
    reached = found.of_peak(OURS_NAME, NONE)
    return Figure("simulated-swap-peak", what, reached, "x the peak", 0.6, 0.45, Better.LOWER, found.details)


def swap_step(settings: Settings) -> Figure:
    """Train with all attention and feed-forward outputs swapped, in turns with none."""
    size = Size.scaled(settings.scale)
    manners = {
        NONE: PLAIN,
        OURS_NAME: all_marked(size, kept=KEPT),
        f"{OURS_NAME}, no quota, prefetch 40": Manner(swap=marks(40)),
    }
    found = _llamas(manners, settings)
    times = _times(found.turns, OURS_NAME, NONE)
    details = {f"{OURS_NAME}, times {NONE}": str(times), **found.details}
    what = (
        f"step of {size}, all attention and feed-forward outputs swapped, over that without, on the "
        "simulated accelerator, as slow as an A100 is with Llama 7B"
    )
    return Figure("simulated-swap-step", what, times.median, "x its time", 1.15, 1.05, Better.LOWER, details)


def swap_and_recompute(settings: Settings) -> Figure:
    """Swap most and recompute what is cheap, in turns with recomputing all."""
    manners = {NONE: PLAIN, FULL_NAME: FULL, MIX_NAME: mix(Size.scaled(settings.scale))}
    found = _llamas(manners, settings)
    times = _times(found.turns, MIX_NAME, FULL_NAME)
    details = {
        f"{MIX_NAME}, times {FULL_NAME}": str(times),
        f"{MIX_NAME}, times its peak": f"{found.of_peak(MIX_NAME, FULL_NAME):.3f}",
        **found.details,
    }
    what = (
        f"step of {Size.scaled(settings.scale)}, selective recompute and swap, over that with PyTorch's "
        "checkpoint around every layer, on the simulated accelerator"
    )
    name = "simulated-swap-and-recompute"
    return Figure(name, what, times.median, "x its time", 0.9, 0.8, Better.LOWER, details)


# ---------------------------------------------------------------------- parameters


def step(settings: Settings) -> Figure:
    """Train through a device that holds a tenth of the state, in turns with one that holds all of it."""
    workload = Workload.scaled(settings.scale)
    rates = for_workload(workload)
    with steps.Trainee(workload, device=accelerator.DEVICE) as plain:
        plain.seconds_a_step(COMPUTED_STEPS)
        config = _tenth_beside(workload, torch.accelerator.memory_allocated())
        with steps.Trainee(workload, config, device=accelerator.DEVICE) as ours:
            ours.seconds_a_step(COMPUTED_STEPS)
            said = equal_losses(ours.losses.cpu(), plain.losses.cpu())
            work = {
                "plain": lambda: plain.seconds_a_step(STEPS_A_TURN),
                "offloaded": lambda: ours.seconds_a_step(STEPS_A_TURN),
            }
            with _pace(rates):
                turns = _turns(work, settings)
            stalled = ours.store.stats().stall_seconds
    times = _times(turns, "offloaded", "plain")
    floor = turns["offloaded"].floor_s / statistics.median(turns["plain"].step)
    details = {
        "the device": str(rates),
        **{name: str(each) for name, each in turns.items()},
        "offloaded, times plain": str(times),
        "floor, times plain": f"{floor:.3f}",
        "stalled": f"{stalled:.2f} s in all",
        "losses of computed steps": said,
    }
    what = (
        f"step of {workload}, simulated accelerator of a tenth of the state, its link as busy as its "
        "kernels, over that of one that holds all of it"
    )
    return Figure("simulated-step", what, times.median, "x its time", 2.0, 1.5, Better.LOWER, details)


def host_steps(settings: Settings) -> Figure:
    """Train with steps on the host during backward, in turns with steps in their time."""
    workload = Workload.scaled(settings.scale)
    rates = for_workload(workload)
    with contextlib.ExitStack() as stack:
        taken: dict[str, steps.Trainee] = {}
        for name, around in (
            ("in their time", steps_in_their_time()),
            ("during backward", contextlib.nullcontext()),
        ):
            beside_bytes = torch.accelerator.memory_allocated()
            config = stepped_on_the_host(workload, accelerator.DEVICE.type, None, beside_bytes)
            with around:
                trainee = steps.Trainee(workload, config, device=accelerator.DEVICE)
            taken[name] = stack.enter_context(trainee)
            trainee.seconds_a_step(COMPUTED_STEPS)
        later, ahead = taken.values()
        said = equal_losses(ahead.losses.cpu(), later.losses.cpu())
        with _pace(rates):
            work = {n: functools.partial(each.seconds_a_step, STEPS_A_TURN) for n, each in taken.items()}
            turns = _turns(work, settings)
    times = _times(turns, "during backward", "in their time")
    details = {
        "the device": str(rates),
        **{name: str(each) for name, each in turns.items()},
        "during backward, times in their time": str(times),
        "losses of computed steps": said,
    }
    what = (
        f"step of {workload}, optimizer_target='cpu', simulated accelerator of a tenth of the state: with "
        "steps on the host during backward over that with steps in their time"
    )
    return Figure("simulated-host-steps", what, times.median, "x its time", BAR, AIM, Better.LOWER, details)


def ideal(settings: Settings) -> Figure:
    """Train through a device that has three tenths of what all takes, in turns with one that has it."""
    workload = Workload.scaled(settings.scale)
    rates = for_large_batches(workload)
    with steps.Trainee(workload, device=accelerator.DEVICE) as plain:
        plain.seconds_a_step(COMPUTED_STEPS)
        peak_bytes = torch.accelerator.max_memory_allocated()
        config = ts.OffloadConfig(
            device=accelerator.DEVICE.type,
            max_device_memory=int(IDEAL_QUOTA * peak_bytes) + torch.accelerator.memory_allocated(),
            offload_cpu_size=2 * STATE_TENSORS * workload.parameter_bytes,
            offload_disk_size=0,
        )
        with steps.Trainee(workload, config, device=accelerator.DEVICE) as ours:
            ours.seconds_a_step(COMPUTED_STEPS)
            said = equal_losses(ours.losses.cpu(), plain.losses.cpu())
            work = {
                "plain": lambda: plain.seconds_a_step(STEPS_A_TURN),
                "offloaded": lambda: ours.seconds_a_step(STEPS_A_TURN),
            }
            with _pace(rates):
                ours.seconds_a_step(LEARNED_STEPS)
                turns = _turns(work, settings)
            placement = str(ours.placement).splitlines()
    share = _times(turns, "plain", "offloaded")
    floor = statistics.median(turns["plain"].step) / turns["offloaded"].floor_s
    details = {
        "the device": str(rates),
        "peak of all of it": f"{peak_bytes / MIB:.0f} MiB",
        **{name: str(each) for name, each in turns.items()},
        "plain, times offloaded": str(share),
        "the same by what moves and computes": f"{floor:.3f}",
        "placement": "; ".join(line.strip() for line in placement[:4]),
        "losses of computed steps": said,
    }
    what = (
        f"step of {workload} with all of it on the device, over that with {IDEAL_QUOTA:.0%} of its peak, "
        f"on the simulated accelerator whose link is to its kernels as 25 GB/s are to an A100 that trains on "
        f"{IDEAL_TOKENS} tokens"
    )
    return Figure("planned-ideal", what, share.median, "of the ideal", 0.8, 0.9, Better.HIGHER, details)


def _tenth_beside(workload: Workload, beside_bytes: int) -> ts.OffloadConfig:
    """Return a device for a tenth of the state, beside so many bytes of another's."""
    state_bytes = STATE_TENSORS * workload.parameter_bytes
    return ts.OffloadConfig(
        device=accelerator.DEVICE.type,
        max_device_memory=state_bytes // 10 + beside_bytes,
        offload_cpu_size=2 * state_bytes,
        offload_disk_size=0,
    )


QUESTIONS: dict[str, Question] = {
    "simulated-swap-peak": swap_peak,
    "simulated-swap-step": swap_step,
    "simulated-swap-and-recompute": swap_and_recompute,
    "simulated-step": step,
    "simulated-host-steps": host_steps,
    "planned-ideal": ideal,
}


def main(names: str, repeats: str, warmups: str, scale: str, scratch: str) -> None:
    """Measure figures one after the other, each with nothing of the last one on the device."""
    torch.set_num_threads(1)
    for name in names.split(","):
        gc.collect()
        torch.accelerator.reset_peak_memory_stats()
        figure = QUESTIONS[name](Settings(Path(scratch), int(repeats), int(warmups), float(scale)))
        print(json.dumps(asdict(figure) | {"better": figure.better.name}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
