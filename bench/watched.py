"""What it costs a training step that somebody looks at the run with ``tierstore top``."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping

from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, take_turns
from bench.record import Better, Figure
from bench.training import SETTLING_TURNS, emulated
from bench.workload import Trainee, Workload

STEPS_A_TURN = 3


@contextlib.contextmanager
def looking() -> Iterator[None]:
    """Let another process look once a second, as a person's does; from its first look on."""
    command = [sys.executable, "-m", "tierstore.cli", "top", str(os.getpid()), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            if not process.stdout.readline():
                raise RuntimeError(f"{' '.join(command)} failed:\n{process.stderr.read()}")
            yield
        finally:
            process.terminate()


def watched_step(settings: Settings) -> Figure:
    """Train in turns with and without somebody who looks; the same run, the same steps."""
    workload = Workload.scaled(settings.scale)
    with Trainee(workload, emulated(workload)) as trainee:

        def alone() -> Mapping[str, float]:
            return {"alone": trainee.seconds_a_step(STEPS_A_TURN)}

        def watched() -> Mapping[str, float]:
            with looking():
                return {"watched": trainee.seconds_a_step(STEPS_A_TURN)}

        warmups = max(SETTLING_TURNS, settings.warmups)
        seconds = take_turns([alone, watched], repeats=settings.repeats, warmups=warmups)
    times = ratios(seconds["watched"], seconds["alone"])
    details = {f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()}
    details["times alone"] = str(times)
    what = f"step of {workload}, emulated device, with tierstore top attached, against the same run without"
    return Figure("watched-step", what, times.median, "x its time", 1.01, 1.0, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {"watched-step": watched_step}

if __name__ == "__main__":
    sys.exit(main("bench.watched", QUESTIONS))
