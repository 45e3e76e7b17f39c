"""Rounds of programs, each drawn from a seed: what ended how, and each distinct difference, shrunk."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import time
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from tests.training.differential.features import OFF
from tests.training.differential.programs import Program
from tests.training.differential.running import End, Open, Outcome, outcome_of
from tests.training.differential.strategies import programs
from tierstore.training import offload

ROUND = 100
HANG_S = 120


@contextlib.contextmanager
def little_to_look_through() -> Iterator[None]:
    """Keep what is there already out of the collector's sight.

    ``offload(...)`` collects garbage and looks through all objects of the process where a parameter has
    another reference: a quarter of a second with PyTorch's compiler loaded, and most of a program's cost.
    Where something was out of sight before, as in a run of the tests, all of it stays so afterwards.
    """
    is_ours = not gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


class DifferentError(Exception):
    """A program differs; its subclasses tell one difference from another."""


@dataclass
class Tally:
    """What a worker has seen.

    Attributes:
        ends: how many programs ended how.
        reasons: of refusals and of what could not be built.
        enlarged: how many were too small in their midst.
        features: how many programs had each piece.
        found: the smallest program for each difference, with what it says.
    """

    ends: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    enlarged: int = 0
    found: dict[str, tuple[Program, str]] = field(default_factory=dict)
    pieces: Counter[str] = field(default_factory=Counter)
    same_pieces: Counter[str] = field(default_factory=Counter)

    def add(self, program: Program, outcome: Outcome) -> None:
        """Take in a program."""
        self.ends[outcome.end.name] += 1
        self.enlarged += bool(outcome.enlarged)
        self.reasons.update(f"too small: {reason}" for reason in outcome.enlarged)
        names = set(program.features())
        self.pieces.update(names)
        if outcome.end is End.SAME:
            self.same_pieces.update(names)
        if outcome.end in (End.REFUSED, End.INVALID):
            self.reasons[f"{outcome.end.name.lower()}: {outcome.reason}"] += 1

    def find(self, program: Program, outcome: Outcome) -> None:
        """Take in a difference, if no smaller program shows it."""
        old = self.found.get(outcome.reason)
        if old is None or len(program.text) <= len(old[0].text):
            self.found[outcome.reason] = (program, outcome.detail)


class Search:
    """Rounds of programs, in which every difference is made smaller once.

    Args:
        off: features that are switched off.
        shrink: whether differences are made smaller.
        open_run: what offloads.

    Attributes:
        tally: of the current round.
    """

    def __init__(
        self, off: Mapping[str, str] = OFF, *, shrink: bool = True, open_run: Open = offload
    ) -> None:
        self.tally = Tally()
        self._known: set[str] = set()
        self._kinds: dict[str, type[DifferentError]] = {}
        self._current: Program | None = None
        self._end = 0.0
        self._open_run = open_run
        phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]
        self._settings = settings(
            max_examples=ROUND,
            deadline=None,
            database=None,
            phases=phases,
            suppress_health_check=list(HealthCheck),
            verbosity=Verbosity.quiet,
            report_multiple_bugs=False,
            print_blob=False,
        )
        self._programs = programs(off)

    def round(self, number: int, seconds: float = 3600.0) -> Tally:
        """Run programs until a new difference is found and made smaller, or for so long.

        Args:
            number: of the round, which is its seed.
            seconds: after which no further programs are drawn.
        """
        self.tally, self._kinds = Tally(), {}
        self._end = time.monotonic() + seconds
        try:
            with little_to_look_through():
                seed(number)(self._settings(given(self._programs)(self._try)))()
        except DifferentError as error:
            self._keep_only(str(error))
        except Exception:  # noqa: BLE001 - Hypothesis' own, such as of a program that is not the same twice
            self._take_in_unsteady(traceback.format_exc())
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self.tally

    def _try(self, program: Program) -> None:
        if not self._kinds and time.monotonic() > self._end:
            return
        faulthandler.dump_traceback_later(HANG_S, exit=True)
        self._current = program
        outcome = outcome_of(program, self._open_run)
        if not self._kinds:
            self.tally.add(program, outcome)
        if outcome.end is End.DIFFERENT and outcome.reason not in self._known:
            kind = self._kinds.setdefault(outcome.reason, type("Different", (DifferentError,), {}))
            self.tally.find(program, outcome)
            raise kind(outcome.reason)

    def _keep_only(self, reason: str) -> None:
        """Know a difference; others that were met on the way are found in rounds of their own."""
        self._known.add(reason)
        self.tally.found = {reason: self.tally.found[reason]}

    def _take_in_unsteady(self, trace: str) -> None:
        assert self._current is not None
        self._known |= set(self._kinds)
        if not self._kinds:
            self.tally.found[f"the harness fails: {trace.splitlines()[-1]}"] = (self._current, trace)


def work(first: int, step: int, end: float, results: Any, shrink: bool, off: Mapping[str, str]) -> None:  # noqa: ANN401
    """Search until a time, in a process of its own; put a tally for every round, and ``None`` at the end.

    Args:
        first: seed.
        step: to the next one.
        end: seconds since the epoch.
        results: a queue.
        shrink: whether differences are made smaller.
        off: features that are switched off.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    search = Search(off, shrink=shrink)
    number = first
    parent = multiprocessing.parent_process()
    while time.time() < end and (parent is None or parent.is_alive()):
        results.put(search.round(number, end - time.time()))
        number += step
    results.put(None)
