"""Moments of one recorded step: marks, and what the store did meanwhile, put into the order of a program.

1. A moment begins when the bytes that it asks for are there, and ends when somebody asks for others, when
   something was made, or when another phase begins.
2. What was blocked is no part of it: neither of what it computes nor of what the host does for it.
3. Steps that an optimizer has made ahead, during backward, are put where the optimizer takes them.
4. Evaluations between are left out.
5. Where an accelerator computes, a moment takes what its device took for what was queued in it, without what
   its stream waited for.  The host has gone on meanwhile: what it takes to tell the device comes before the
   next moment, if the device was still busy then.  Where it was not, its time has the host's in it.
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tierstore.planning.program import Phase
from tierstore.recorded import LeaseRecord, Put, Recording
from tierstore.training.recording.device_clock import DeviceSeconds
from tierstore.training.recording.marks import BundleStep, RecordedStep, RunMark, Sign

NEXT = "~next"
"""Behind the key of values that are made ahead."""

_PHASES = {
    Sign.FORWARD: Phase.FORWARD,
    Sign.BACKWARD: Phase.BACKWARD,
    Sign.OPTIMIZER: Phase.OPTIMIZER,
    Sign.BETWEEN: Phase.BETWEEN,
}


def usual_key(key: str) -> str:
    """Return the key that bytes are under in other steps, too: values that are made ahead become it."""
    return key.removesuffix(NEXT)


@dataclass(slots=True)
class WatchedMoment:
    """One moment, as it was watched.

    Attributes:
        phase: of the step.
        asked_s: when it asked for bytes.
        begin_s: when it had them.
        end_s: when it ended.
        uses: keys, in the order in which their windows were opened, each with when.
        made: keys and bytes of what came to be in it.
        step: what it steps; ``None``: it is no optimizer's.
        is_ahead: whether it was made during backward.
        live_bytes: what the program had beside the store when it began; ``None``: nobody measured.
        peak_bytes: the most of that until its end.
        compute_s: seconds from its begin to its end in which nothing was waited for; of an accelerator those
            in which it computed.
        host_s: of the host before it; by its watcher from its question to its begin, without waits.
        told_s: likewise from its begin to its end, where an accelerator computed beside the host, and longer.
        is_beside: whether an accelerator's events have timed it.
    """

    phase: Phase
    asked_s: float
    begin_s: float
    end_s: float = 0.0
    uses: list[tuple[str, float]] = field(default_factory=list)
    made: list[tuple[str, int]] = field(default_factory=list)
    step: BundleStep | None = None
    is_ahead: bool = False
    live_bytes: int | None = None
    peak_bytes: int | None = None
    compute_s: float = 0.0
    host_s: float = 0.0
    told_s: float = 0.0
    is_beside: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing of the store's is in it."""
        return not self.uses and not self.made

    @property
    def name(self) -> str:
        """What it is about."""
        if self.step is not None:
            return f"{self.step.optimizer}: {self.step.bundle}"
        return self.uses[0][0] if self.uses else self.made[0][0] if self.made else self.phase.value


class Seconds:
    """How long somebody was blocked between two times.

    Args:
        recording: of the store.
        threads: whose waits count.
    """

    def __init__(self, recording: Recording, threads: set[int]) -> None:
        spans = sorted((each.begin_s, each.end_s) for each in recording.waits if each.thread in threads)
        self._begins: list[float] = []
        self._ends: list[float] = []
        for begin_s, end_s in spans:
            if self._ends and begin_s < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end_s)
            else:
                self._begins.append(begin_s)
                self._ends.append(end_s)

    def blocked(self, begin_s: float, end_s: float) -> float:
        """Return the seconds of it in which something was waited for."""
        total = 0.0
        for number in range(bisect.bisect_right(self._ends, begin_s), len(self._begins)):
            if self._begins[number] >= end_s:
                break
            total += min(end_s, self._ends[number]) - max(begin_s, self._begins[number])
        return total

    def working(self, begin_s: float, end_s: float) -> float:
        """Return the seconds of it in which nothing was waited for."""
        return max(0.0, end_s - begin_s - self.blocked(begin_s, end_s))


class StoreRecords:
    """What a recording says of single keys."""

    def __init__(self, recording: Recording) -> None:
        self._leases: defaultdict[str, list[LeaseRecord]] = defaultdict(list)
        for lease in sorted(recording.leases, key=lambda each: each.begin_s):
            for key in lease.keys:
                self._leases[usual_key(key)].append(lease)
        self._puts: defaultdict[str, list[Put]] = defaultdict(list)
        for put in recording.puts:
            self._puts[put.key].append(put)
        self._filled: defaultdict[str, list[float]] = defaultdict(list)
        for copy in recording.copies:
            if copy.source == "caller":
                self._filled[copy.key].append(copy.end_s)

    def lease(self, key: str, at_s: float) -> LeaseRecord | None:
        """Return the lease that held a key at a time."""
        held = [each for each in self._leases.get(key, ()) if each.begin_s <= at_s < each.end_s]
        return held[-1] if held else None

    def put(self, key: str, begin_s: float, end_s: float) -> Put | None:
        """Return the put of a key between two times."""
        return next((each for each in self._puts.get(key, ()) if begin_s <= each.at_s <= end_s), None)

    def filled_s(self, key: str, after_s: float) -> float:
        """Return when bytes that were put after a time were the store's."""
        return next((each for each in self._filled.get(key, ()) if each >= after_s), after_s)


class StepWatcher:
    """Puts the marks of one step in order.

    Args:
        step: with its marks.
        recording: of the store meanwhile.
        is_bundle: says whether a key is of a bundle or of state.
        is_timed: whether what its accelerator's points say is taken; else the host's clock times it.

    Attributes:
        moments: in order.
        evaluations: how many were left out.
        landed: by key of a gradient, how often backward has added to it.
    """

    def __init__(
        self,
        step: RecordedStep,
        recording: Recording,
        is_bundle: Callable[[str], bool],
        *,
        is_timed: bool = False,
    ) -> None:
        self.moments: list[WatchedMoment] = []
        self.evaluations = 0
        self.landed: dict[str, int] = {}
        self._step = step
        self._is_bundle = is_bundle
        self._records = StoreRecords(recording)
        threads = {mark.thread for mark in step.marks}
        self._seconds = Seconds(recording, threads)
        self._device = DeviceSeconds(step.points or (), threads) if is_timed else None
        self._current = WatchedMoment(Phase.FORWARD, step.begin_s, step.begin_s)
        self._asked: RunMark | None = None
        self._former: RunMark | None = None
        self._under: BundleStep | None = None
        self._there: set[str] = set()  # gradients
        self._ahead: dict[str, tuple[float, float, float]] = {}  # by bundle: asked, begun, ended
        self._ahead_uses: list[RunMark] = []
        self._apart: RunMark | None = None  # what began what is left out
        for mark in step.marks:
            self._take(mark)
            self._former = mark
        self._close(step.end_s)

    def _take(self, mark: RunMark) -> None:
        if self._current.peak_bytes is not None and mark.peak_bytes is not None:
            self._current.peak_bytes = max(self._current.peak_bytes, mark.peak_bytes)
        if self._apart is not None:
            self._take_apart(self._apart, mark)
            return
        if mark.sign in _PHASES:
            self._begin_phase(_PHASES[mark.sign], mark)
        else:
            self._TAKEN_IN[mark.sign](self, mark)

    def _take_apart(self, apart: RunMark, mark: RunMark) -> None:
        """Leave out what belongs to no step, or to another moment of it."""
        if apart.sign is Sign.EVALUATION and mark.sign is Sign.EVALUATED:
            self.evaluations += 1
            self._apart = None
            self._open(mark)
        elif apart.sign is Sign.AHEAD and mark.thread == apart.thread:
            if mark.sign is Sign.USE:
                self._ahead_uses.append(mark)
            elif mark.sign is Sign.TOLD:
                self._apart = None
                self._end_ahead(apart, mark)

    def _end_ahead(self, apart: RunMark, mark: RunMark) -> None:
        uses, self._ahead_uses = self._ahead_uses, []
        bundles = [each.key for each in uses if self._is_bundle(each.key)]
        if bundles:
            self._ahead[bundles[0]] = apart.at_s, uses[-1].at_s, mark.at_s
            self._close(apart.at_s)
            self._open(mark)

    # --- moments ------------------------------------------------------------------------------

    def _open(self, mark: RunMark, asked_s: float | None = None, begin_s: float | None = None) -> None:
        begin_s = mark.at_s if begin_s is None else begin_s
        asked_s = begin_s if asked_s is None else asked_s
        self._current = WatchedMoment(
            self._current.phase,
            asked_s,
            begin_s,
            step=self._under,
            live_bytes=mark.live_bytes,
            peak_bytes=mark.live_bytes,
        )

    def _close(self, end_s: float) -> None:
        current = self._current
        current.end_s = max(current.begin_s, end_s)
        current.host_s = self._seconds.working(current.asked_s, current.begin_s)
        self._time(current, current.begin_s, current.end_s)
        self.moments.append(current)

    def _time(self, moment: WatchedMoment, begin_s: float, end_s: float) -> None:
        """Say what computing a moment took, from one time to another."""
        working_s = self._seconds.working(begin_s, end_s)
        if self._device is None or (moment.step is not None and moment.step.is_on_host):
            moment.compute_s = working_s
            return
        moment.is_beside = True
        moment.compute_s = self._device.computing(begin_s, end_s)
        moment.told_s = working_s if self._device.is_busy(end_s) else 0.0

    def _begin_phase(self, phase: Phase, mark: RunMark) -> None:
        self._asked = None
        if phase is self._current.phase and mark.sign is not Sign.FORWARD:
            return
        if self._current.begin_s > self._step.begin_s or mark.sign is not Sign.FORWARD:
            self._close(mark.at_s)
        self._open(mark)
        self._current.phase = phase

    def _ask(self, mark: RunMark) -> None:
        self._asked = mark

    def _use(self, mark: RunMark) -> None:
        asked, self._asked = self._asked, None
        former = self._former
        if asked is None and not self._is_bundle(mark.key):
            since_s = self._step.begin_s if former is None else former.at_s
            put = self._records.put(mark.key, since_s, mark.at_s)
            if put is not None:
                self._make(mark, put.at_s, mark.at_s)
                return
        if asked is None and former is not None and former.sign is Sign.USE and self._current.uses:
            self._current.uses.append((mark.key, mark.at_s))  # one question for several
            self._current.begin_s = mark.at_s
            return
        lease = self._records.lease(mark.key, mark.at_s)
        is_new = lease is not None and former is not None and lease.asked_s > former.at_s
        asked_s = asked.at_s if asked is not None else lease.asked_s if is_new and lease else mark.at_s
        self._close(asked_s)
        self._open(mark if asked is None else asked, asked_s, mark.at_s)
        self._current.uses.append((mark.key, mark.at_s))

    def _make(self, mark: RunMark, put_s: float, begin_s: float) -> None:
        self._current.made.append((mark.key, mark.nbytes))
        if mark.live_bytes is not None and self._current.live_bytes is not None:
            # What is made is live by now, and so may be what is made next.
            self._current.live_bytes = max(0, mark.live_bytes - mark.nbytes)
        self._close(put_s)
        self._open(mark, put_s, begin_s)

    def _put(self, mark: RunMark) -> None:
        self._there.add(mark.key)
        # A stream goes on before anybody knows that the bytes have arrived.
        is_beside = self._device is not None
        filled_s = mark.at_s if is_beside else self._records.filled_s(mark.key, mark.at_s)
        self._make(mark, mark.at_s, filled_s)

    def _land(self, mark: RunMark) -> None:
        if not mark.key:
            return
        self.landed[mark.key] = self.landed.get(mark.key, 0) + 1
        if mark.key in self._there:
            if self._current.is_empty:  # it began with the put, and the gradient was the program's until now
                if mark.peak_bytes is not None and self.moments and self.moments[-1].peak_bytes is not None:
                    self.moments[-1].peak_bytes = max(self.moments[-1].peak_bytes, mark.peak_bytes)
                self._current.live_bytes = self._current.peak_bytes = mark.live_bytes
            return
        self._there.add(mark.key)
        self._make(mark, mark.at_s, mark.at_s)

    def _leave_out(self, mark: RunMark) -> None:
        self._apart = mark
        if mark.sign is Sign.EVALUATION:
            self._close(mark.at_s)

    def _begin_step(self, mark: RunMark) -> None:
        self._close(mark.at_s)
        self._under = mark.step
        self._open(mark)

    def _end_step(self, mark: RunMark) -> None:
        self._close(mark.at_s)
        self._under = None
        self._open(mark)

    def _take_over(self, mark: RunMark) -> None:
        step = mark.step
        assert step is not None
        self._close(mark.at_s)
        self._open(mark)
        self._current.step = step
        self._current.is_ahead = True
        self._current.uses += [(step.bundle, mark.at_s), *((key, mark.at_s) for key, _ in step.gradients)]
        self._current.uses += [] if step.state is None else [(step.state, mark.at_s)]
        self._close(mark.at_s)
        if step.bundle in self._ahead:
            asked_s, begin_s, end_s = self._ahead.pop(step.bundle)
            self.moments[-1].host_s = self._seconds.working(asked_s, begin_s)
            self._time(self.moments[-1], begin_s, end_s)
        self._open(mark)

    def _pass_over(self, mark: RunMark) -> None:
        """Nothing begins or ends with it."""

    _TAKEN_IN: ClassVar[Mapping[Sign, Callable[[StepWatcher, RunMark], None]]] = {
        Sign.ASK: _ask,
        Sign.USE: _use,
        Sign.PUT: _put,
        Sign.LANDED: _land,
        Sign.EVALUATION: _leave_out,
        Sign.EVALUATED: _pass_over,
        Sign.AHEAD: _leave_out,
        Sign.TOLD: _pass_over,
        Sign.STEP: _begin_step,
        Sign.STEPPED: _end_step,
        Sign.TAKEN: _take_over,
    }


def joined(moments: Sequence[WatchedMoment]) -> list[WatchedMoment]:
    """Return moments in which something of the store's is used or made; others are parts of those before.

    What the host took to tell the device one moment is its time before the next: to be called once.
    """
    found: list[WatchedMoment] = []
    for each in moments:
        former = found[-1] if found else None
        if each.is_empty and former is not None and former.phase is each.phase and not former.made:
            former.compute_s += each.compute_s + (0.0 if each.is_beside else each.host_s)
            former.told_s += each.told_s + (each.host_s if each.is_beside else 0.0)
            former.end_s = each.end_s
            if former.peak_bytes is not None and each.peak_bytes is not None:
                former.peak_bytes = max(former.peak_bytes, each.peak_bytes)
        else:
            found.append(each)
    for former, each in itertools.pairwise(found):
        each.host_s += former.told_s
    return found
