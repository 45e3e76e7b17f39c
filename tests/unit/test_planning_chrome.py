"""Trace files: what people's tools see, what is refused, and PyTorch's profiler beside ours."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.fuzz import see_that_it_is_short
from tierstore.errors import ConfigError
from tierstore.planning import Account, ByteKind, Interval, StallCause, StepTotals, Timeline
from tierstore.planning.chrome import merge, timeline_from_chrome, timeline_to_chrome, trace_from_chrome
from tierstore.planning.timeline import COMPUTE, WAITING

_TIMELINE = Timeline(
    name="llama",
    source="measured",
    intervals=(
        Interval(0.0, 0.25, "host->device", "layers.1.w", "layers.1.w", 4096),
        Interval(0.0, 0.5, COMPUTE, "layers.0"),
        Interval(0.5, 0.75, WAITING, "layers.1", "layers.1.w", 0, StallCause.COPY_UP),
    ),
    steps=(StepTotals(0.0, 0.75, {"host->device": 4096}, {StallCause.COPY_UP: 0.25}, {"device": 8192}),),
    account=Account(0.25, 8192, {ByteKind.PARAMETERS: 8192}, (("layers.1.w", 4096),), "layers.0"),
    charges={"device": ((0.0, 4096), (0.25, 8192))},
    held=((0.0, {ByteKind.PARAMETERS: 4096}), (0.25, {ByteKind.PARAMETERS: 8192, ByteKind.WORKSPACE: 16})),
)


def _events(text: str, phase: str) -> list[dict[str, object]]:
    return [each for each in json.loads(text)["traceEvents"] if each["ph"] == phase]


def test_computing_is_the_first_lane_and_links_come_after_waiting() -> None:
    named = [each for each in _events(timeline_to_chrome(_TIMELINE), "M") if each["name"] == "thread_name"]
    assert [each["args"] for each in named] == [{"name": lane} for lane in (COMPUTE, WAITING, "host->device")]


def test_a_slice_says_when_in_microseconds_and_whose_bytes() -> None:
    copy, _, wait = _events(timeline_to_chrome(_TIMELINE), "X")
    assert (copy["ts"], copy["dur"], copy["cat"]) == (0.0, 250_000.0, "copy")
    assert copy["args"] == {"key": "layers.1.w", "bytes": 4096}
    assert (wait["cat"], wait["args"]) == ("wait", {"key": "layers.1.w", "cause": "copy up"})


def test_counters_show_bytes_by_tier_and_by_kind() -> None:
    counted = _events(timeline_to_chrome(_TIMELINE), "C")
    assert [(each["name"], each["ts"], each["args"]) for each in counted] == [
        ("device bytes", 0.0, {"bytes": 4096}),
        ("device bytes", 250_000.0, {"bytes": 8192}),
        ("bytes by kind", 0.0, {"parameters": 4096}),
        ("bytes by kind", 250_000.0, {"parameters": 8192, "workspace": 16}),
    ]


def test_what_was_simulated_says_of_no_time() -> None:
    assert "baseTimeNanoseconds" not in json.loads(timeline_to_chrome(_TIMELINE))
    assert json.loads(timeline_to_chrome(_TIMELINE, base_time_ns=7))["baseTimeNanoseconds"] == 7


def test_a_key_that_a_later_version_adds_is_left_alone() -> None:
    document = json.loads(timeline_to_chrome(_TIMELINE))
    document["tierstore"]["timeline"]["colour"] = "red"
    document["tierstore"]["timeline"]["intervals"]["colour"] = []
    assert timeline_from_chrome(json.dumps(document)) == _TIMELINE


def _with(*path_and_value: object) -> str:
    *path, last, value = path_and_value
    document = json.loads(timeline_to_chrome(_TIMELINE))
    inner = document["tierstore"]
    for name in path:
        inner = inner[name]
    inner[last] = value
    return json.dumps(document)


_REFUSED = {
    "empty": ("", "no JSON"),
    "no JSON": ("{", "no JSON"),
    "deep": ("[" * 100_000, "nests too deep"),
    "a key twice": ('{"tierstore": 1, "tierstore": 2}', "'tierstore' is given twice"),
    "digits": ('{"tierstore": ' + "9" * 5_000 + "}", "no JSON"),
    "a list": ("[]", "nothing of tierstore's"),
    "another's": ('{"traceEvents": []}', "nothing of tierstore's"),
    "no mapping": ('{"tierstore": 3}', "tierstore=3: accepted: a mapping"),
    "no version": ('{"tierstore": {}}', "version none; this tierstore reads version 1"),
    "no timeline": ('{"tierstore": {"version": 1}}', "holds no timeline"),
    "a later trace": (_with("version", 2), "version 2; this tierstore reads version 1"),
    "a later timeline": (_with("timeline", "version", 7), "version 7; this tierstore reads version 1"),
    "a time that is none": (_with("timeline", "intervals", "begin_s", 0, float("nan")), "begin_s[0]"),
    "a time below 0": (_with("timeline", "intervals", "begin_s", 1, -1), "begin_s[1]=-1"),
    "an end before its begin": (_with("timeline", "intervals", "end_s", 2, 0.25), "end_s[2]=0.25"),
    "times that run back": (_with("timeline", "held", "at_s", 0, 1), "held.at_s[1]=0.25"),
    "a short column": (
        _with("timeline", "intervals", "nbytes", [1]),
        "accepted: 3, as the columns before",
    ),
    "no column": (_with("timeline", "intervals", "lane", None), "intervals.lane=None: accepted: a list"),
    "a number of no text": (_with("timeline", "intervals", "name", [0, 1, 99]), "below"),
    "an unknown cause": (_with("timeline", "texts", ["x"] * 9), "copy up"),
    "an unknown kind": (_with("timeline", "account", "kinds", {"water": 1}), "parameters"),
    "2**63 bytes": (_with("timeline", "charges", "device", "nbytes", 0, 2**63), "less than 2**63"),
    "true bytes": (_with("timeline", "account", "nbytes", not 0), "account.nbytes=True"),
    "no steps": (_with("timeline", "period", 0), "period=0"),
}


@pytest.mark.parametrize("name", _REFUSED)
def test_what_cannot_be_is_refused_by_its_name(name: str) -> None:
    text, said = _REFUSED[name]
    with pytest.raises(ConfigError) as refused:
        timeline_from_chrome(text)
    assert said in str(refused.value)
    see_that_it_is_short(refused.value)


def test_every_fault_is_told_at_once() -> None:
    document = json.loads(timeline_to_chrome(_TIMELINE))
    document["tierstore"]["timeline"]["period"] = -1
    document["tierstore"]["timeline"]["account"]["at_s"] = "noon"
    document["tierstore"]["timeline"]["steps"]["begin_s"] = 5
    with pytest.raises(ConfigError, match=r"(?s)steps\.begin_s=5.*account\.at_s='noon'.*period=-1"):
        timeline_from_chrome(json.dumps(document))


def test_a_time_that_is_no_number_is_not_written() -> None:
    wrong = Timeline("x", "measured", (Interval(0.0, float("nan"), COMPUTE, "x"),), (), _TIMELINE.account)
    with pytest.raises(ConfigError, match="no finite number"):
        timeline_to_chrome(wrong)


# ------------------------------------------------------------------------------ beside others'


def _profiled(tmp_path: Path) -> tuple[str, int, int]:
    """Return what PyTorch's profiler writes of a matmul, and the nanoseconds since 1970 around it."""
    operand = torch.ones(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        before_ns = time.time_ns()
        torch.mm(operand, operand)
        after_ns = time.time_ns()
    path = tmp_path / "theirs.json"
    profiler.export_chrome_trace(str(path))
    return path.read_text(), before_ns, after_ns


def test_a_trace_of_pytorch_s_profiler_and_ours_align(tmp_path: Path) -> None:
    theirs, before_ns, after_ns = _profiled(tmp_path)
    mark = Timeline(
        "x",
        "measured",
        (Interval(1.0, 1.0 + (after_ns - before_ns) / 1e9, COMPUTE, "around"),),
        (),
        _TIMELINE.account,
    )
    merged = merge(timeline_to_chrome(mark, base_time_ns=before_ns - 10**9), theirs)
    (around,) = [each for each in _events(merged, "X") if each["name"] == "around"]
    (product,) = [each for each in _events(merged, "X") if each["name"] == "aten::mm"]
    assert around["ts"] - 1000 <= product["ts"] <= around["ts"] + around["dur"] + 1000  # type: ignore[operator]
    assert around["pid"] != product["pid"]


def test_their_events_stay_and_ours_are_read_back(tmp_path: Path) -> None:
    theirs, before_ns, _ = _profiled(tmp_path)
    merged = merge(timeline_to_chrome(_TIMELINE, base_time_ns=before_ns), theirs)
    document, former = json.loads(merged), json.loads(theirs)
    assert document["traceEvents"][: len(former["traceEvents"])] == former["traceEvents"]
    assert {name: document[name] for name in former if name != "traceEvents"} == {
        name: value for name, value in former.items() if name != "traceEvents"
    }
    found = trace_from_chrome(merged)
    assert (found.timeline, found.base_time_ns) == (_TIMELINE, before_ns)


def test_a_simulated_trace_begins_where_theirs_does() -> None:
    merged = merge(timeline_to_chrome(_TIMELINE), '[{"ph": "X", "ts": 5.5, "pid": 1}, {"ph": "X", "ts": 9}]')
    assert [each["ts"] for each in _events(merged, "X")[2:]] == [5.5, 5.5, 500_005.5]


def test_ours_takes_a_process_that_theirs_has_not() -> None:
    theirs = {"traceEvents": [{"ph": "X", "ts": 0, "pid": pid} for pid in (1, 2, "Spans")]}
    merged = merge(timeline_to_chrome(_TIMELINE), json.dumps(theirs))
    assert {each["pid"] for each in _events(merged, "X")} == {1, 2, "Spans", 3}


@pytest.mark.parametrize(
    "theirs",
    ["", "3", '{"traceEvents": {}}', "{}", '{"baseTimeNanoseconds": "x", "traceEvents": []}'],
)
def test_what_is_no_trace_is_not_merged(theirs: str) -> None:
    with pytest.raises(ConfigError, match="their trace"):
        merge(timeline_to_chrome(_TIMELINE, base_time_ns=1), theirs)


@pytest.mark.parametrize("ts", ["1e999", "NaN", '"x"', "true"])
def test_hostile_times_of_theirs_stop_nothing(ts: str) -> None:
    merged = merge(timeline_to_chrome(_TIMELINE), '[{"ph": "X", "ts": ' + ts + "}, 3, null, {}]")
    assert trace_from_chrome(merged).timeline == _TIMELINE
