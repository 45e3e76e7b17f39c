"""What a run did when, as a timeline: made of marks, and of what the store did meanwhile.

1. Media do one copy after another: a copy is shown from the end of the one before it on its link.
2. A wait for bytes is told apart by what those did meanwhile: they came from host memory or from storage, or
   had no room yet.
3. The program's own bytes are known at marks only, and only while they are measured.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tierstore.planning.program import ByteKind
from tierstore.planning.timeline import (
    COMPUTE,
    HOST,
    WAITING,
    Account,
    Interval,
    StallCause,
    StepTotals,
    Timeline,
)
from tierstore.recorded import CALLER, CopyRecord, WaitedFor, WaitRecord
from tierstore.training.recording.marks import RecordedStep, RecordedSteps, RunFigures
from tierstore.training.recording.programs import ACTIVATION
from tierstore.training.recording.watched import StepWatcher, WatchedMoment, usual_key

_LARGEST = 10

Samples = Sequence[tuple[float, int]]


class TimelineMaker:
    """Makes a timeline of what was recorded, once that has ended.

    Args:
        recorded: steps, and what the store did.
        figures: of the run's keys.
        storage: names of tiers behind I/O.
    """

    def __init__(self, recorded: RecordedSteps, figures: RunFigures, storage: Iterable[str]) -> None:
        self._steps = recorded.steps
        self._recording = recorded.recording
        self._figures = figures
        self._storage = frozenset(storage)
        self._threads = {mark.thread for step in recorded.steps for mark in step.marks}
        self._moments: list[WatchedMoment] = []
        for step in recorded.steps:
            self._moments += StepWatcher(step, self._recording, figures.kinds.__contains__).moments
        self._copies: defaultdict[str, list[CopyRecord]] = defaultdict(list)
        for copy in self._recording.copies:
            self._copies[usual_key(copy.key)].append(copy)
        self._waits = [
            each
            for wait in self._recording.waits
            if wait.thread in self._threads
            for each in self._stalls(wait)
        ]

    def timeline(self, name: str, assumptions: Sequence[str] = ()) -> Timeline:
        """Return it.

        Args:
            name: for people.
            assumptions: what is not known.
        """
        begin_s = self._recording.begin_s
        intervals = [*self._computed(), *self._waits, *self._moved(), *self._on_host()]
        intervals.sort(key=lambda each: (each.begin_s, each.end_s, each.lane))
        charges = {
            tier: tuple((at_s - begin_s, nbytes) for at_s, nbytes in changes)
            for tier, changes in self._recording.charges.items()
        }
        held = self._held()
        return Timeline(
            name,
            "measured",
            tuple(intervals),
            tuple(self._totals(step) for step in self._steps),
            self._account(held),
            charges,
            tuple(held),
            max(1, len(self._steps)),
            (*([] if self._recording.is_whole else ["not all was recorded: memory was short"]), *assumptions),
        )

    # --- lanes --------------------------------------------------------------------------------

    def _since(self, at_s: float) -> float:
        return at_s - self._recording.begin_s

    def _computed(self) -> Iterator[Interval]:
        """Yield what was computed: moments, without what was waited for in them."""
        waits = sorted((each.begin_s, each.end_s) for each in self._waits)
        begins = [begin_s for begin_s, _ in waits]
        for each in self._moments:
            now_s, end_s = self._since(each.begin_s), self._since(each.end_s)
            for number in range(max(0, bisect.bisect_right(begins, now_s) - 1), len(waits)):
                wait_s, until_s = waits[number]
                if wait_s >= end_s:
                    break
                if wait_s > now_s:
                    yield Interval(now_s, wait_s, COMPUTE, each.name)
                now_s = max(now_s, until_s)
            if end_s > now_s:
                yield Interval(now_s, end_s, COMPUTE, each.name)

    def _moved(self) -> Iterator[Interval]:
        """Yield copies, link by link, one after another."""
        busy: defaultdict[str, float] = defaultdict(float)
        for copy in sorted(self._recording.copies, key=lambda each: each.end_s):
            if copy.is_whole and copy.source != CALLER:
                lane = f"{copy.source}->{copy.target}"
                begin_s, end_s = self._since(copy.begin_s), self._since(copy.end_s)
                begin_s = min(max(begin_s, busy[lane]), end_s)
                busy[lane] = end_s
                yield Interval(begin_s, end_s, lane, copy.key, copy.key, copy.nbytes)

    def _on_host(self) -> Iterator[Interval]:
        """Yield what other threads than those of the model's had leased: steps on the host."""
        busy_s = 0.0
        for lease in sorted(self._recording.leases, key=lambda each: each.begin_s):
            if lease.thread not in self._threads and lease.is_written and not math.isinf(lease.end_s):
                begin_s, end_s = max(busy_s, self._since(lease.begin_s)), self._since(lease.end_s)
                if end_s > begin_s:
                    yield Interval(begin_s, end_s, HOST, lease.keys[0], lease.keys[0])
                busy_s = max(busy_s, end_s)

    def _stalls(self, wait: WaitRecord) -> Iterator[Interval]:
        """Yield the parts of a wait, each with its cause."""
        key = wait.keys[0] if wait.keys else None
        name = key or f"quota of {wait.tier}"
        if wait.reason is WaitedFor.QUOTA:
            yield self._stall(wait.begin_s, wait.end_s, name, key, StallCause.COPY_DOWN)
            return
        now_s = wait.begin_s
        for copy in self._copies_in(wait):
            begin_s, end_s = max(now_s, copy.begin_s), min(wait.end_s, copy.end_s)
            if end_s <= now_s:
                continue
            if begin_s > now_s:
                yield self._stall(now_s, begin_s, name, key, StallCause.ROOM)
            cause = StallCause.DISK if copy.source in self._storage else StallCause.COPY_UP
            yield self._stall(begin_s, end_s, name, key, cause)
            now_s = end_s
        if wait.end_s > now_s:
            yield self._stall(now_s, wait.end_s, name, key, StallCause.ROOM)

    def _copies_in(self, wait: WaitRecord) -> list[CopyRecord]:
        """Return the copies of a wait's keys that went on during it."""
        if wait.reason is WaitedFor.ROOM:
            return []
        copies = (copy for key in wait.keys for copy in self._copies[usual_key(key)])
        during = [
            copy
            for copy in copies
            if copy.source != CALLER and copy.begin_s < wait.end_s and copy.end_s > wait.begin_s
        ]
        return sorted(during, key=lambda copy: copy.begin_s)

    def _stall(self, begin_s: float, end_s: float, name: str, key: str | None, cause: StallCause) -> Interval:
        return Interval(self._since(begin_s), self._since(end_s), WAITING, name, key, cause=cause)

    # --- bytes --------------------------------------------------------------------------------

    def _kind(self, key: str) -> ByteKind:
        name = usual_key(key)
        if name in self._figures.kinds:
            return self._figures.kinds[name][0]
        return ByteKind.ACTIVATION if name.startswith(ACTIVATION) else ByteKind.GRADIENT

    def _live(self) -> list[tuple[float, int]]:
        """Return the program's own bytes: time and bytes, where they were measured."""
        return [
            (self._since(mark.at_s), mark.live_bytes)
            for step in self._steps
            for mark in step.marks
            if mark.live_bytes is not None
        ]

    def _held(self) -> list[tuple[float, Mapping[ByteKind, int]]]:
        """Return the bytes of the first tier by kind, at each change."""
        first = self._recording.tiers[0]
        changes: list[tuple[float, ByteKind, int]] = []
        for stay in self._recording.stays:
            if stay.tier == first:
                kind = self._kind(stay.key)
                changes.append((self._since(stay.begin_s), kind, stay.charge_bytes))
                if not math.isinf(stay.end_s):
                    changes.append((self._since(stay.end_s), kind, -stay.charge_bytes))
        before = 0
        for at_s, nbytes in self._live():
            changes.append((at_s, ByteKind.WORKSPACE, nbytes - before))
            before = nbytes
        held: list[tuple[float, Mapping[ByteKind, int]]] = []
        kinds: defaultdict[ByteKind, int] = defaultdict(int)
        for at_s, kind, nbytes in sorted(changes, key=lambda each: each[0]):
            kinds[kind] += nbytes
            now = {each: total for each, total in kinds.items() if total}
            if held and held[-1][0] == at_s:
                held[-1] = at_s, now
            else:
                held.append((at_s, now))
        return held

    def _account(self, held: Sequence[tuple[float, Mapping[ByteKind, int]]]) -> Account:
        """Return who held what when most was held."""
        if not held:
            return Account(0.0, 0, {})
        at_s, kinds = max(held, key=lambda each: sum(each[1].values()))
        now_s, first = at_s + self._recording.begin_s, self._recording.tiers[0]
        there = [
            (stay.key, stay.charge_bytes)
            for stay in self._recording.stays
            if stay.tier == first and stay.begin_s <= now_s < stay.end_s
        ]
        largest = sorted(there, key=lambda each: -each[1])[:_LARGEST]
        moment = next((each.name for each in self._moments if each.begin_s <= now_s < each.end_s), "")
        return Account(at_s, sum(kinds.values()), kinds, tuple(largest), moment)

    def _totals(self, step: RecordedStep) -> StepTotals:
        moved: defaultdict[str, int] = defaultdict(int)
        for copy in self._recording.copies:
            if copy.is_whole and copy.source != CALLER and step.begin_s <= copy.end_s < step.end_s:
                moved[f"{copy.source}->{copy.target}"] += copy.nbytes
        begin_s, end_s = self._since(step.begin_s), self._since(step.end_s)
        stalls: defaultdict[StallCause, float] = defaultdict(float)
        for each in self._waits:
            if begin_s <= each.begin_s < end_s and each.cause is not None:
                stalls[each.cause] += each.end_s - each.begin_s
        return StepTotals(begin_s, end_s, dict(moved), dict(stalls), self._peaks(step))

    def _peaks(self, step: RecordedStep) -> dict[str, int]:
        charges = self._recording.charges
        peaks = {tier: _most(changes, step.begin_s, step.end_s) for tier, changes in charges.items()}
        first = self._recording.tiers[0]
        live = 0
        for mark in step.marks:
            now = max(live, mark.peak_bytes or 0, mark.live_bytes or 0)
            peaks[first] = max(peaks[first], _at(charges[first], mark.at_s) + now)
            live = mark.live_bytes or 0
        return peaks


def _at(changes: Samples, at_s: float) -> int:
    number = bisect.bisect_right(changes, at_s, key=lambda each: each[0]) - 1
    return changes[number][1] if number >= 0 else 0


def _most(changes: Samples, begin_s: float, end_s: float) -> int:
    inside = (nbytes for at_s, nbytes in changes if begin_s <= at_s < end_s)
    return max([_at(changes, begin_s), *inside])
