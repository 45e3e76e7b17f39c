"""Timelines and programs as Chrome's trace JSON, which Perfetto and ``chrome://tracing`` open, and back.

1. ``traceEvents`` is for people's tools: slices of moments, copies and waits, counters of bytes, names of
   lanes.  ``tierstore`` holds the same in columns: what was written is read back from there, exactly.
2. Times of events are microseconds after ``baseTimeNanoseconds``, which is since 1970, as `torch.profiler`
   writes them.  What was simulated happened at no time and has none.
3. Text in, text out: opening files is the caller's.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from tierstore.errors import ConfigError
from tierstore.planning import columns
from tierstore.planning.columns import BYTES, ColumnTable
from tierstore.planning.machine import Machine
from tierstore.planning.machine_text import machine_from_mapping, machine_to_mapping
from tierstore.planning.placement import Placement
from tierstore.planning.program import ByteKind, Does, Program, is_figure
from tierstore.planning.program_text import program_from_mapping, program_to_mapping
from tierstore.planning.timeline import COMPUTE, HOST, WAITING, Account, Interval, Timeline
from tierstore.planning.timeline_text import timeline_from_mapping, timeline_to_mapping
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import quoted

TRACE_VERSION = 1

_OURS = "tierstore"
_BASE = "baseTimeNanoseconds"
_EVENTS = "traceEvents"
_OWNER = "trace"
_US_PER_S = 1e6
_NS_PER_US = 1000
_NS_DIGITS = 3
_FIRST_PID = 1  # 0 is the idle process to those who look
_LANES_PER_PROCESS = 1000
_FIRST_LANES = (COMPUTE, HOST, WAITING)

T = TypeVar("T")

Event = dict[str, object]


@dataclass(frozen=True)
class TraceParts:
    """What one trace file holds.

    Attributes:
        timeline: what happened when; ``None``: the file has none, and so on.
        program: what a step does.
        machine: on what.
        placement: what went where.
        base_time_ns: when it began, in nanoseconds since 1970; ``None``: at no time, it was simulated.
    """

    timeline: Timeline | None = None
    program: Program | None = None
    machine: Machine | None = None
    placement: Placement | None = None
    base_time_ns: int | None = None


def timeline_to_chrome(timeline: Timeline, *, base_time_ns: int | None = None) -> str:
    """Return a timeline as a text of Chrome's trace JSON.

    Args:
        timeline: simulated or measured.
        base_time_ns: of a measured one: when second 0 of it was, in nanoseconds since 1970.
    """
    return trace_to_chrome(TraceParts(timeline, base_time_ns=base_time_ns))


def timeline_from_chrome(text: str) -> Timeline:
    """Return the timeline that a text of trace JSON holds.

    Raises:
        ConfigError: it is no trace of ours or of another version, holds no timeline, or something in it
            cannot be so: every fault is listed.
    """
    found = trace_from_chrome(text).timeline
    if found is None:
        raise ConfigError(f"{_OWNER}: it holds no timeline; accepted: what a run or a simulation recorded")
    return found


def program_to_chrome(program: Program) -> str:
    """Return a program as a text of Chrome's trace JSON: its moments in a row, without copies or waits."""
    return trace_to_chrome(TraceParts(program=program))


def program_from_chrome(text: str) -> Program:
    """Return the program that a text of trace JSON holds.

    Raises:
        ConfigError: as `timeline_from_chrome`.
    """
    found = trace_from_chrome(text).program
    if found is None:
        raise ConfigError(f"{_OWNER}: it holds no program; accepted: what a run recorded of its steps")
    return found


def trace_to_chrome(parts: TraceParts) -> str:
    """Return everything that is there as one text of Chrome's trace JSON.

    Raises:
        ConfigError: a time is no finite number.
    """
    document: dict[str, object] = {"displayTimeUnit": "ms"}
    if parts.base_time_ns is not None:
        document[_BASE] = parts.base_time_ns
    document[_EVENTS] = list(_events(parts))
    document[_OURS] = _ours(parts)
    try:
        return json.dumps(document, allow_nan=False, separators=(",", ":"))
    except ValueError as cause:
        raise ConfigError(f"{_OWNER}: a time or a figure in it is no finite number") from cause


def trace_from_chrome(text: str) -> TraceParts:
    """Return what a text of trace JSON holds of ours.

    Raises:
        ConfigError: as `timeline_from_chrome`.
    """
    document = columns.parsed(text, _OWNER)
    if not isinstance(document, Mapping) or _OURS not in document:
        raise ConfigError(
            f"{_OWNER}: it holds nothing of tierstore's: accepted: a mapping with a key {_OURS!r}, as "
            "tierstore writes it"
        )
    faults = WrongValues()
    table = ColumnTable(document[_OURS], _OURS, faults)
    faults.raise_if_any(_OWNER)
    table.require_version(TRACE_VERSION, _OWNER)
    base_time_ns = table.value("base_time_ns", columns.perhaps(BYTES), None)
    faults.raise_if_any(_OWNER)
    given = document[_OURS]
    return TraceParts(
        _read(given.get("timeline"), timeline_from_mapping),
        _read(given.get("program"), program_from_mapping),
        _read(given.get("machine"), machine_from_mapping),
        _read(given.get("placement"), Placement.from_mapping),
        base_time_ns,
    )


def merge(ours: str, theirs: str) -> str:
    """Return one trace of two: ours, and what `torch.profiler` or another recorder wrote.

    Their events stay as they are; ours are shifted by the difference of both ``baseTimeNanoseconds``.  A
    simulated trace happened at no time: it begins where their first event does.  What `trace_from_chrome`
    reads stays ours, unshifted.

    Args:
        ours: a text that `trace_to_chrome` wrote.
        theirs: a text of Chrome's trace JSON: a mapping with ``traceEvents``, or a list of events.

    Raises:
        ConfigError: one of them is no trace.
    """
    parts = trace_from_chrome(ours)
    document = _theirs(theirs)
    events = document[_EVENTS]
    assert isinstance(events, list)
    own = list(_events(parts, pid=_free_pid(events), shift_us=_shift_us(parts, document, events)))
    return json.dumps({**document, _EVENTS: [*events, *own], _OURS: _ours(parts)}, separators=(",", ":"))


# ---------------------------------------------------------------------- writing


def _ours(parts: TraceParts) -> dict[str, object]:
    return {
        "version": TRACE_VERSION,
        "base_time_ns": parts.base_time_ns,
        "timeline": parts.timeline and timeline_to_mapping(parts.timeline),
        "program": parts.program and program_to_mapping(parts.program),
        "machine": parts.machine and machine_to_mapping(parts.machine),
        "placement": parts.placement and parts.placement.to_mapping(),
    }


def _events(parts: TraceParts, *, pid: int = _FIRST_PID, shift_us: float = 0.0) -> Iterator[Event]:
    if parts.timeline is not None:
        yield from _timeline_events(parts.timeline, pid, shift_us)
    elif parts.program is not None:
        yield from _timeline_events(_in_a_row(parts.program), pid, shift_us)


def _in_a_row(program: Program) -> Timeline:
    """Return the moments of a program one after another: nothing moves and nothing is waited for."""
    now_s = 0.0
    intervals: list[Interval] = []
    held: list[tuple[float, Mapping[ByteKind, int]]] = []
    made = {use.key for moment in program.moments for use in moment.uses if use.does is Does.MAKE}
    kinds = dict.fromkeys(ByteKind, 0)
    for key, datum in program.data.items():
        kinds[datum.kind] += 0 if key in made else datum.nbytes
    for moment in program.moments:
        begin_s, end_s = now_s + moment.host_s, now_s + moment.host_s + moment.compute_s
        intervals += [Interval(now_s, begin_s, HOST, moment.name)] if moment.host_s else []
        intervals.append(Interval(begin_s, end_s, COMPUTE, moment.name))
        held.append((begin_s, {**kinds, ByteKind.WORKSPACE: moment.workspace_bytes}))
        for use in moment.uses:
            datum = program.data[use.key]
            kinds[datum.kind] += {Does.MAKE: datum.nbytes, Does.END: -datum.nbytes}.get(use.does, 0)
        now_s = end_s
    return Timeline(program.name, program.source, tuple(intervals), (), Account(0.0, 0, {}), held=tuple(held))


def _timeline_events(timeline: Timeline, pid: int, shift_us: float) -> Iterator[Event]:
    yield _said("process_name", pid, name=f"tierstore: {timeline.name} ({timeline.source})")
    lanes = _lanes(timeline, pid)
    for lane, tid in lanes.items():
        yield _said("thread_name", pid, tid, name=lane)
        yield _said("thread_sort_index", pid, tid, sort_index=tid)
    for interval in timeline.intervals:
        yield _slice(interval, pid, lanes[interval.lane], shift_us)
    for tier, changes in timeline.charges.items():
        for at_s, nbytes in changes:
            yield _counter(f"{tier} bytes", pid, _us(at_s, shift_us), {"bytes": nbytes})
    for at_s, kinds in timeline.held:
        by_kind = {kind.value: nbytes for kind, nbytes in kinds.items()}
        yield _counter("bytes by kind", pid, _us(at_s, shift_us), by_kind)


def _lanes(timeline: Timeline, pid: int) -> dict[str, int]:
    """Return the lanes that something is in, each with the number of a thread: computing comes first."""
    found = dict.fromkeys(interval.lane for interval in timeline.intervals)
    ordered = [*(lane for lane in _FIRST_LANES if lane in found), *found]
    first = pid * _LANES_PER_PROCESS + 1
    return {lane: tid for tid, lane in enumerate(dict.fromkeys(ordered), first)}


def _said(what: str, pid: int, tid: int = 0, **values: object) -> Event:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": values}


def _slice(interval: Interval, pid: int, tid: int, shift_us: float) -> Event:
    begin_us, end_us = _us(interval.begin_s, shift_us), _us(interval.end_s, shift_us)
    told = {
        "key": interval.key,
        "bytes": interval.nbytes or None,
        "cause": interval.cause and interval.cause.value,
    }
    return {
        "ph": "X",
        "cat": "wait" if interval.lane == WAITING else "compute" if interval.lane in _FIRST_LANES else "copy",
        "name": interval.name,
        "pid": pid,
        "tid": tid,
        "ts": begin_us,
        "dur": round(end_us - begin_us, _NS_DIGITS),
        "args": {name: value for name, value in told.items() if value is not None},
    }


def _counter(name: str, pid: int, at_us: float, values: Mapping[str, int]) -> Event:
    return {"ph": "C", "name": name, "pid": pid, "tid": 0, "ts": at_us, "args": dict(values)}


def _us(at_s: float, shift_us: float) -> float:
    """Return microseconds, to the nanosecond."""
    return round(at_s * _US_PER_S + shift_us, _NS_DIGITS)


def _read(given: object, reader: Callable[[object], T]) -> T | None:
    return None if given is None else reader(given)


# ---------------------------------------------------------------------- traces of others


def _theirs(text: str) -> dict[str, object]:
    """Return their trace as a mapping with a list of events.

    Raises:
        ConfigError: it is none.
    """
    document = columns.parsed(text, "their trace", constant=str)  # NaN, which JSON has not, as a text
    if isinstance(document, list):
        document = {_EVENTS: document}
    if not isinstance(document, Mapping) or not isinstance(document.get(_EVENTS), list):
        raise ConfigError(f"their trace: accepted: a mapping with a list {_EVENTS!r}, or a list of events")
    return dict(document)


def _free_pid(events: list[object]) -> int:
    """Return a number of a process that none of their events has."""
    taken = {
        each.get("pid") for each in events if isinstance(each, Mapping) and isinstance(each.get("pid"), int)
    }
    return next(pid for pid in range(_FIRST_PID, len(taken) + 2) if pid not in taken)


def _shift_us(parts: TraceParts, document: Mapping[str, object], events: list[object]) -> float:
    if parts.base_time_ns is None:
        return min(_times_us(events), default=0.0)
    base_ns = document.get(_BASE, 0)  # without one, their times are since 1970
    if not is_figure(base_ns) or not isinstance(base_ns, int | float):
        raise ConfigError(f"their trace: {_BASE}={quoted(base_ns)}: accepted: nanoseconds since 1970")
    return (parts.base_time_ns - base_ns) / _NS_PER_US


def _times_us(events: list[object]) -> Iterator[float]:
    """Yield when their slices begin."""
    for event in events:
        if isinstance(event, Mapping) and event.get("ph") == "X":
            begin_us = event.get("ts")
            if isinstance(begin_us, int | float) and math.isfinite(begin_us):
                yield begin_us
