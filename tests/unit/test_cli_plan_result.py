"""What a plan's result says: what bounds a step, the share of the ideal, the same facts as text and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

import pytest

from tierstore.cli.plan_result import PlanResult, busy_shares, ideal_s, step_bound, to_mapping
from tierstore.cli.plan_text import to_lines
from tierstore.planning import (
    Account,
    ByteKind,
    ComputeFigures,
    Datum,
    Interval,
    LinkFigures,
    Machine,
    Moment,
    Phase,
    Placement,
    Program,
    StallCause,
    StepTotals,
    TierFigures,
    TierMedium,
    Timeline,
)
from tierstore.planning.timeline import COMPUTE
from tierstore.units import MIB

_FIGURES = ComputeFigures({"float32": 1e12}, 1e9)
_UP, _DOWN = "host->device", "device->host"


def _machine(*, has_streams: bool = True, shares: tuple[str, ...] = ()) -> Machine:
    tiers = (
        TierFigures("device", 100 * MIB, TierMedium.DEVICE),
        TierFigures("host", 900 * MIB, TierMedium.HOST),
    )
    links = (
        LinkFigures("host", "device", 100.0, shares=shares),
        LinkFigures("device", "host", 50.0, shares=shares),
    )
    rates = dict.fromkeys(shares, 120.0)
    return Machine("m", tiers, links, _FIGURES, _FIGURES, shares=rates, has_streams=has_streams)


def _program() -> Program:
    moments = (
        Moment(Phase.FORWARD, "first", compute_s=2.0, host_s=0.5),
        Moment(Phase.BACKWARD, "second", compute_s=4.0, host_s=0.5),
    )
    return Program("two", "hand", {"a": Datum("a", 3 * MIB, ByteKind.PARAMETERS)}, moments)


def _timeline(
    moved: Mapping[str, int], stalls: Mapping[StallCause, float], *, steps: int = 2, compute_s: float = 6.0
) -> Timeline:
    """Return steps of ten seconds, with computing at their begin."""
    totals = [
        StepTotals(10.0 * n, 10.0 * n + 10, moved, stalls, {"device": 40 * MIB, "host": 70 * MIB})
        for n in range(steps)
    ]
    computing = [Interval(10.0 * n, 10.0 * n + compute_s, COMPUTE, "layer") for n in range(steps)]
    account = Account(3.0, 40 * MIB, {ByteKind.PARAMETERS: 30 * MIB}, (("a", 3 * MIB),), "layer 3")
    return Timeline("t", "simulated", tuple(computing), tuple(totals), account, period=2)


def test_shares_of_a_step_are_of_bytes_over_rates_and_of_what_computes() -> None:
    timeline = _timeline({_UP: 900, _DOWN: 150}, {})
    shares = busy_shares(timeline, _machine(shares=("bus",)))
    assert shares == pytest.approx({_UP: 0.9, "bus": 0.875, COMPUTE: 0.6, _DOWN: 0.3})
    assert list(shares) == [_UP, "bus", COMPUTE, _DOWN]


def test_what_computes_counts_once_where_intervals_overlap_and_only_in_steps_that_repeat() -> None:
    timeline = _timeline({}, {}, steps=3)
    twice = (*timeline.intervals, Interval(12.0, 17.0, COMPUTE, "beside"))
    ordered = tuple(sorted(twice, key=lambda each: each.begin_s))
    assert busy_shares(replace(timeline, intervals=ordered), _machine()) == pytest.approx({COMPUTE: 0.65})


@pytest.mark.parametrize(
    ("moved", "stalls", "compute_s", "name", "is_waiting"),
    [
        ({_UP: 990}, {StallCause.COPY_UP: 4.0}, 6.0, _UP, False),
        ({_DOWN: 490}, {StallCause.ROOM: 4.0}, 6.0, _DOWN, False),
        ({_UP: 990}, {}, 10.0, COMPUTE, False),
        ({_UP: 300}, {StallCause.ROOM: 4.0, StallCause.COPY_UP: 3.0}, 3.0, "room", True),
        ({_UP: 300}, {StallCause.ROOM: 4.0}, 6.0, COMPUTE, False),
        ({}, {}, 3.0, COMPUTE, False),
    ],
)
def test_what_is_busiest_bounds_a_step_unless_it_mostly_waits(
    moved: Mapping[str, int],
    stalls: Mapping[StallCause, float],
    compute_s: float,
    name: str,
    is_waiting: bool,
) -> None:
    bound = step_bound(_timeline(moved, stalls, compute_s=compute_s), _machine())
    assert (bound.name, bound.is_waiting) == (name, is_waiting)


def test_the_ideal_has_the_host_s_own_seconds_only_where_it_cannot_run_ahead() -> None:
    assert ideal_s(_program(), _machine()) == 6.0
    assert ideal_s(_program(), _machine(has_streams=False)) == 7.0


def _result() -> PlanResult:
    return PlanResult(
        _program(),
        _machine(),
        Placement(),
        _timeline({_UP: 900}, {StallCause.COPY_UP: 4.0}),
        bound_s=8.0,
        why="nothing is better",
        rejected=(("today's", 12.0), ("all resident", None)),
        assumptions=("assumed True at model.mask",),
    )


def test_json_has_every_fact_and_only_finite_numbers() -> None:
    found = json.loads(json.dumps(to_mapping(_result()), allow_nan=False))
    assert found["fits"] is True
    assert (found["step_s"], found["share_of_ideal"], found["bound_s"]) == (10.0, 0.6, 8.0)
    assert found["bounded_by"] == {"name": _UP, "share": 0.9, "is_waiting": False}
    assert found["waiting_s"] == {"copy up": 4.0}
    assert found["moved_bytes"] == {_UP: 900}
    assert found["peak_bytes"] == {"device": 40 * MIB, "host": 70 * MIB}
    assert found["account"]["kinds"] == {"parameters": 30 * MIB}
    assert found["rejected"] == [
        {"name": "today's", "step_s": 12.0},
        {"name": "all resident", "step_s": None},
    ]
    assert Placement.from_mapping(found["placement"]) == Placement()


def test_a_result_that_does_not_fit_has_the_same_keys() -> None:
    refused = PlanResult(_program(), _machine(), why="no room", remedies=("raise max_device_memory to 2GB",))
    found = to_mapping(refused)
    assert found.keys() == to_mapping(_result()).keys()
    assert (found["fits"], found["step_s"], found["remedies"]) == (
        False,
        None,
        ["raise max_device_memory to 2GB"],
    )
    assert [line for line in to_lines(refused) if line.startswith(("fits", "remedy", "why"))] == [
        "fits      no",
        "why       no room",
        "remedy    raise max_device_memory to 2GB",
    ]


def test_a_person_reads_the_same_facts() -> None:
    ideal = "60 % of the speed of unlimited memory (6 s)"
    assert list(to_lines(_result())) == [
        "program   two, written by hand: 2 moments; parameters 3.0 MiB",
        "machine   m: device 100.0 MiB, host 900.0 MiB",
        "fits      yes",
        f"step      10 s predicted; {ideal}; at most 25 % above the best that can be (8 s)",
        f"bounds    {_UP}: busy 90 % of the step",
        f"busy      {_UP} 90 %, compute 60 %",
        "waits     copy up 4 s a step",
        "peak      device 40.0 MiB of 100.0 MiB: parameters 30.0 MiB; largest a 3.0 MiB; in layer 3",
        "peak      host 70.0 MiB of 900.0 MiB",
        f"moves     {_UP} 900 B a step",
        "why       nothing is better",
        "assumed   assumed True at model.mask",
    ]


def test_a_step_that_takes_no_time_is_shown_as_well() -> None:
    timeline = replace(
        _timeline({}, {}),
        intervals=(),
        steps=(StepTotals(0.0, 0.0, {}, {}, {}), StepTotals(0.0, 0.0, {}, {}, {})),
    )
    found = PlanResult(Program("none", "hand", {}, ()), _machine(), Placement(), timeline, bound_s=0.0)
    assert any(line.startswith("step      0 s predicted") for line in to_lines(found))
    assert to_mapping(found)["share_of_ideal"] is None
