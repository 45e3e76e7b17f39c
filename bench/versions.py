"""Two versions of tierstore by turns, each in an environment of its own, on the same work.

``python -m bench.versions OTHER/.venv/bin/python`` holds the version that this Python has against the one
that the other Python has: a process of each is alive, and they take a turn each a round.  Ratios are of
rounds.  What is trained has to come to the same losses, bit for bit.  The work is in `bench.scenes`.
"""

from __future__ import annotations

import contextlib
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, take_turns
from bench.record import Better, Figure, Page, commit_of
from bench.scenes import SCENES

BEFORE, AFTER = "before", "after"
SETTLING_TURNS = 2
MICROSECONDS_BELOW_S = 0.01


_WHERE = "from importlib.util import find_spec; print(find_spec('tierstore').origin)"


def place_of(python: str) -> Path:
    """Return where the tierstore of a Python is, without importing it.

    Raises:
        RuntimeError: there is none, or no such Python; with what it said.
    """
    done = subprocess.run([python, "-P", "-c", _WHERE], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{python} has no tierstore:\n{done.stderr}")
    return Path(done.stdout.strip()).parent


class Version:
    """A process that does one scene with the tierstore of one Python; a context manager."""

    def __init__(self, python: str, scene: str, settings: Settings) -> None:
        script = Path(__file__).with_name("scenes.py")
        command = [python, str(script), scene, str(settings.scratch.absolute()), f"{settings.scale:g}"]
        self._scene = scene
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.losses: list[float] = []
        self.place = Path()

    def ready(self) -> Path:
        """Wait until it can begin; return where its tierstore is."""
        self.place = Path(str(self._answer()["tierstore"]))
        return self.place

    def turn(self) -> Mapping[str, float]:
        """Let it do its work once; return the seconds."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        answer = {name: float(value) for name, value in self._answer().items()}
        if "loss" in answer:
            self.losses.append(answer.pop("loss"))
        return answer

    def _answer(self) -> Mapping[str, float | str]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process of {self._scene!r} ended with {self._process.wait()}")
        answer: Mapping[str, float | str] = json.loads(line)
        return answer

    def __enter__(self) -> Version:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.communicate()  # it ends with its input


@contextlib.contextmanager
def both(other_python: str, scene: str, settings: Settings) -> Iterator[dict[str, Version]]:
    """Yield a process of each version, ready.

    Raises:
        ValueError: both have the same tierstore.
        RuntimeError: one has none.
    """
    if (place := place_of(other_python)) == place_of(sys.executable):
        raise ValueError(f"both versions are the one in {place}")
    with Version(other_python, scene, settings) as before, Version(sys.executable, scene, settings) as after:
        for each in (before, after):
            each.ready()
        yield {BEFORE: before, AFTER: after}


def compare(other_python: str, scene: str, settings: Settings) -> Figure:
    """Let both do a scene by turns.

    Raises:
        AssertionError: losses differ.
        RuntimeError: a process failed.
    """
    with both(other_python, scene, settings) as versions:

        def turn(label: str) -> Mapping[str, float]:
            return {f"{name}, {label}": seconds for name, seconds in versions[label].turn().items()}

        runs = [functools.partial(turn, label) for label in versions]
        warmups = max(SETTLING_TURNS, settings.warmups)
        seconds = take_turns(runs, repeats=settings.repeats, warmups=warmups)
        losses = [version.losses for version in versions.values()]
    if losses[0] != losses[1]:
        raise AssertionError(f"the losses differ: {losses}")
    details = {"before": commit_of(versions[BEFORE].place)}
    details |= {name: _as_text(values) for name, values in seconds.items()}
    if losses[0]:
        details["losses"] = f"{len(losses[0])} of {len(losses[0])} equal, bit for bit"
    names = [name.removesuffix(f", {AFTER}") for name in seconds if name.endswith(AFTER)]
    times = {name: ratios(seconds[f"{name}, {AFTER}"], seconds[f"{name}, {BEFORE}"]) for name in names}
    details |= {f"{name}, after over before": str(spread) for name, spread in times.items()}
    what = f"{names[0]} of {scene!r}, this version against another one, by turns in two environments"
    return Figure(_figure(scene), what, times[names[0]].median, "x", 1.03, 1.0, Better.LOWER, details)


def _as_text(seconds: list[float]) -> str:
    spread = Spread.of(seconds)
    if spread.median >= MICROSECONDS_BELOW_S:
        return f"{spread} s"
    return f"{Spread.of([1e6 * each for each in seconds])} us"


def _figure(scene: str) -> str:
    return "versions-" + scene.replace(",", "").replace(" ", "-").lower()


NAMES = {_figure(scene): scene for scene in SCENES}

PAGE = Page(
    "versions.md",
    "Against an earlier version",
    "Written by `python -m bench.versions OTHER/.venv/bin/python --write`; do not edit. This version and "
    "an earlier one, each in an environment of its own, do the same work by turns (`bench/versions.py`). "
    "Ratios are of rounds; what is trained comes to the same losses.",
    list(NAMES),
)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m bench.versions OTHER/.venv/bin/python [as python -m bench]")
    questions: dict[str, Question] = {
        name: functools.partial(compare, sys.argv[1], scene) for name, scene in NAMES.items()
    }
    sys.exit(main("bench.versions OTHER/.venv/bin/python", questions, sys.argv[2:], PAGE))
