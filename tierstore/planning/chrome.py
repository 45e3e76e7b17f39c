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
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.planning import columns
from tierstore.planning.columns import BYTES, ColumnTable
from tierstore.planning.program import is_figure
from tierstore.planning.timeline import COMPUTE, HOST, WAITING, Interval, Timeline
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

Event = dict[str, object]


@dataclass(frozen=True)
class TraceParts:
    """What one trace file holds.

    Attributes:
        timeline: what happened when; ``None``: the file has none.
        base_time_ns: when it began, in nanoseconds since 1970; ``None``: at no time, it was simulated.
    """

    timeline: Timeline | None = None
    base_time_ns: int | None = None


def timeline_to_chrome(timeline: Timeline, *, base_time_ns: int | None = None) -> str:
    """Return a timeline as a text of Chrome's trace JSON.

    Args:
        timeline: simulated or measured.
        base_time_ns: of a measured one: when second 0 of it was, in nanoseconds since 1970.
    """
    return trace_to_chrome(TraceParts(timeline, base_time_ns))


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
    timeline = document[_OURS].get("timeline")
    return TraceParts(None if timeline is None else timeline_from_mapping(timeline), base_time_ns)


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
        "timeline": None if parts.timeline is None else timeline_to_mapping(parts.timeline),
    }


def _events(parts: TraceParts, *, pid: int = _FIRST_PID, shift_us: float = 0.0) -> Iterator[Event]:
    timeline = parts.timeline
    if timeline is None:
        return
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
        yield _counter("first tier's bytes by kind", pid, _us(at_s, shift_us), by_kind)


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
