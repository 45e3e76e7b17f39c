"""Swap and steps on the simulated accelerator, whose Python, kernels and copies are beside each other.

``python -m bench.simulated --write`` measures and records all of it.  The accelerator is the tests' own
(``tests/accelerator``).  It is for a whole process and for ever, so each figure is measured by a process of
its own, `bench.simulation`.  What the device's rates are stands in `bench.rates`.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
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
    counts = [str(each) for each in (settings.repeats, settings.warmups, settings.scale)]
    command = [sys.executable, "-m", "bench.simulation", name, *counts, str(settings.scratch.absolute())]
    root = Path(__file__).parent.parent
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    if "unmeasurable" in found:
        raise UnmeasurableError(found["unmeasurable"])
    return Figure(**(found | {"better": Better[found["better"]]}))


QUESTIONS: dict[str, Question] = {name: functools.partial(measure, name) for name in NAMES}

if __name__ == "__main__":
    sys.exit(main("bench.simulated", QUESTIONS))
