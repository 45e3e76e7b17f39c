"""Swap and steps on the simulated accelerator, whose Python, kernels and copies are beside each other.

``python -m bench.simulated --write`` measures and records all of it.  The accelerator is the tests' own
(``tests/accelerator``).  It is for a whole process and for ever, so a figure is measured by a process of
its own, `bench.simulation`; several are by one where time is short, as in tests.  What the device's rates
are stands in `bench.rates`.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.command import Question, Settings, UnmeasurableError, main
from bench.record import Better, Figure

NAMES = (
    "simulated-swap-peak",
    "simulated-swap-step",
    "simulated-swap-and-recompute",
    "simulated-step",
    "planned-ideal",
)


def measure(name: str, settings: Settings) -> Figure:
    """Measure one figure, in a process of its own.

    Raises:
        UnmeasurableError: no compiler here builds the simulated accelerator.
        RuntimeError: the process failed; its words are in the message.
    """
    return measure_all([name], settings)[name]


def measure_all(names: Sequence[str], settings: Settings) -> dict[str, Figure]:
    """Measure several figures in one process; return them by name.

    Raises:
        UnmeasurableError, RuntimeError: see `measure`.
    """
    counts = [str(each) for each in (settings.repeats, settings.warmups, settings.scale)]
    words = [",".join(names), *counts, str(settings.scratch.absolute())]
    command = [sys.executable, "-m", "bench.simulation", *words]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found = [json.loads(line) for line in done.stdout.splitlines()[-len(names) :]]
    if "unmeasurable" in found[-1]:
        raise UnmeasurableError(found[-1]["unmeasurable"])
    figures = [Figure(**(each | {"better": Better[each["better"]]})) for each in found]
    return dict(zip(names, figures, strict=True))


QUESTIONS: dict[str, Question] = {name: functools.partial(measure, name) for name in NAMES}

if __name__ == "__main__":
    sys.exit(main("bench.simulated", QUESTIONS))
