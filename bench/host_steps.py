"""What it saves that the host steps while the device goes on with backward: a step, against one in its time.

``python -m bench.host_steps`` measures both figures: on an emulated device behind a link that is as busy as
what computes, and on the simulated accelerator (`bench.simulation`), whose kernels and copies are beside
the host's computing.  Both runs of a figure are offloaded alike, and their losses are compared; in one of
them nothing is handed over to the thread that steps.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys

import tierstore as ts
from bench import simulated
from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, take_turns
from bench.paced import equal_losses
from bench.rates import STATE_OVER_PARAMETERS
from bench.record import Better, Figure
from bench.training import SETTLING_TURNS, STATE_TENSORS, STEPS_A_TURN
from bench.workload import Trainee, Workload
from tierstore.training.optimizers.host_stepper import steps_in_their_time

BAR, AIM = 1.0, 0.8
"""Of the time that a step takes whose host steps when it is asked to."""

_PACING_STEPS = 3


def stepped_on_the_host(
    workload: Workload, device: str, link: int | None, beside_bytes: int = 0
) -> ts.OffloadConfig:
    """Return a device for a tenth of the state, with room in host memory for new values beside old ones.

    Args:
        workload: whose state it is.
        device: which.
        link: bytes a second, each way; ``None``: as it is.
        beside_bytes: of another run's, on the device.
    """
    state_bytes = STATE_TENSORS * workload.parameter_bytes
    return ts.OffloadConfig(
        device=device,
        max_device_memory=state_bytes // 10 + beside_bytes,
        offload_cpu_size=3 * state_bytes,
        offload_disk_size=0,
        optimizer_target="cpu",
        device_options={} if link is None else {"link_bandwidth": link},
    )


def on_emulated_device(settings: Settings) -> Figure:
    """Train in turns, with steps during backward and with steps in their time."""
    workload = Workload.scaled(settings.scale)
    with Trainee(workload) as plain:
        plain.seconds_a_step(_PACING_STEPS)
        step_s = plain.seconds_a_step(_PACING_STEPS)
    link = round(STATE_OVER_PARAMETERS * workload.parameter_bytes / step_s)
    config = stepped_on_the_host(workload, "emulated", link)
    with contextlib.ExitStack() as stack:
        with steps_in_their_time():
            later = stack.enter_context(Trainee(workload, config))
        ahead = stack.enter_context(Trainee(workload, config))
        runs = [
            lambda: {"in their time": later.seconds_a_step(STEPS_A_TURN)},
            lambda: {"during backward": ahead.seconds_a_step(STEPS_A_TURN)},
        ]
        taken = take_turns(runs, repeats=settings.repeats, warmups=max(SETTLING_TURNS, settings.warmups))
        said = equal_losses(ahead.losses, later.losses)
    times = ratios(taken["during backward"], taken["in their time"])
    details = {
        **{f"{name} s": str(Spread.of(seconds)) for name, seconds in taken.items()},
        "plain PyTorch s": f"{step_s:.3g}",
        "during backward, times plain": f"{statistics.median(taken['during backward']) / step_s:.3f}",
        "during backward, times in their time": str(times),
        "link": f"{link / 1e9:.2f} GB/s each way",
        "losses": said,
    }
    what = (
        f"step of {workload}, optimizer_target='cpu', emulated device of a tenth of the state: with steps on "
        "the host during backward over that with steps in their time"
    )
    return Figure("host-steps", what, times.median, "x its time", BAR, AIM, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "host-steps": on_emulated_device,
    "simulated-host-steps": functools.partial(simulated.measure, "simulated-host-steps"),
}

if __name__ == "__main__":
    sys.exit(main("bench.host_steps", QUESTIONS))
