"""Programs, machines and timelines as values: what they refuse, and what they derive."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from tierstore.errors import ConfigError
from tierstore.planning import (
    Account,
    ByteKind,
    ComputeFigures,
    Datum,
    Does,
    KeyUse,
    LinkFigures,
    Machine,
    Moment,
    NetworkFigures,
    OperatorWork,
    Phase,
    Program,
    StallCause,
    StepTotals,
    TierFigures,
    TierMedium,
    Timeline,
    Unit,
)

_WRONG_FIGURES = [-1, -0.5, math.nan, math.inf, 2.0**64, 10**400, -(10**400), True, "1"]
_WRONG_BYTES = [-1, 1.0, 2**63, True, "1"]


def _datum(key: str = "a", **given: object) -> Datum:
    return Datum(key, 8, ByteKind.PARAMETERS, **given)  # type: ignore[arg-type]


def _moment(*uses: KeyUse, compute_s: float = 0.0) -> Moment:
    return Moment(Phase.FORWARD, "layer", uses, compute_s=compute_s)


def _program(*moments: Moment, keys: tuple[str, ...] = ("a", "b")) -> Program:
    return Program("p", "hand", {key: _datum(key) for key in keys}, moments)


def _machine(*tiers: str, **given: object) -> Machine:
    names = tiers or ("device", "host", "disk")
    links = [
        LinkFigures(source, target, 100.0 if "disk" in (source, target) else 400.0, 0.5)
        for upper, lower in itertools.pairwise(names)
        for source, target in ((upper, lower), (lower, upper))
    ]
    compute = ComputeFigures({"float32": 1e9}, 1e9)
    media = [TierFigures(name, 1000, TierMedium.HOST) for name in names]
    return Machine("m", tuple(media), tuple(links), compute, compute, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("figure", _WRONG_FIGURES)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Moment(Phase.FORWARD, "m", compute_s=x),
        lambda x: Moment(Phase.FORWARD, "m", host_s=x),
        lambda x: OperatorWork("matmul", "float32", x, 0),
        lambda x: LinkFigures("a", "b", 1.0, latency_s=x),
        lambda x: LinkFigures("a", "b", 1.0, burst_s=x),
        lambda x: NetworkFigures("peer", 1.0, latency_s=x),
        lambda x: ComputeFigures({}, 1.0, operator_s=x),
        lambda x: ComputeFigures({}, 1.0, efficiency={"matmul": x}),
    ],
)
def test_seconds_and_shares_are_finite_numbers_of_at_least_0(
    make: Callable[[object], object], figure: object
) -> None:
    with pytest.raises(ConfigError):
        make(figure)


@pytest.mark.parametrize("nbytes", _WRONG_BYTES)
@pytest.mark.parametrize(
    "make",
    [
        lambda x: Datum("a", x, ByteKind.STATE),
        lambda x: Moment(Phase.FORWARD, "m", workspace_bytes=x),
        lambda x: Moment(Phase.FORWARD, "m", live_bytes=x),
        lambda x: OperatorWork("matmul", "float32", 0.0, x),
        lambda x: TierFigures("device", x, TierMedium.DEVICE),
        lambda x: TierFigures("device", 1, TierMedium.DEVICE, alignment_bytes=x),
        lambda x: Program("p", "hand", {}, (), standing_bytes=x),
        lambda x: replace(_program(), accumulations=x),
        lambda x: _machine(hosts=x),
        lambda x: _machine(ranks_per_host=x),
        lambda x: _moment(KeyUse("a", Does.READ, moments=x)),
    ],
)
def test_bytes_and_counts_are_ints_of_63_bits(make: Callable[[object], object], nbytes: object) -> None:
    with pytest.raises(ConfigError):
        make(nbytes)


@pytest.mark.parametrize("rate", [0, -1.0, math.nan, True, "fast"])
@pytest.mark.parametrize(
    "make",
    [
        lambda x: LinkFigures("a", "b", x),
        lambda x: NetworkFigures("peer", x),
        lambda x: ComputeFigures({"float32": x}, 1.0),
        lambda x: ComputeFigures({}, x),
        lambda x: _machine(shares={"bus": x}),
    ],
)
def test_rates_are_greater_than_0(make: Callable[[object], object], rate: object) -> None:
    with pytest.raises(ConfigError):
        make(rate)


@pytest.mark.parametrize(
    ("program", "told"),
    [
        (lambda: _program(_moment(KeyUse("c", Does.READ))), "'c'"),
        (lambda: _program(_moment(KeyUse("a", Does.READ)), _moment(KeyUse("a", Does.MAKE))), "not made yet"),
        (
            lambda: _program(
                _moment(KeyUse("a", Does.MAKE)),
                _moment(KeyUse("a", Does.END)),
                _moment(KeyUse("a", Does.END)),
            ),
            "has ended",
        ),
        (lambda: replace(_program(), data={"x": _datum("y")}), "the key that it is under"),
        (lambda: replace(_program(), units=(Unit("adam", "a", "s", ("g",)),)), "a key of the data"),
    ],
)
def test_a_program_names_uses_of_what_is_not_there(program: Callable[[], Program], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        program()


def test_a_key_may_end_and_be_made_again() -> None:
    made, ended = _moment(KeyUse("a", Does.MAKE)), _moment(KeyUse("a", Does.END))
    assert len(_program(made, ended, made, ended).moments) == 4


def test_a_step_computes_as_long_as_its_moments_together() -> None:
    assert _program(_moment(compute_s=0.25), _moment(compute_s=0.5)).compute_s == 0.75


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"links": ()}, "device->host, too"),
        ({"tiers": ()}, "at least one"),
        ({"links": (LinkFigures("device", "tape", 1.0),)}, "between two of"),
        ({"links": (LinkFigures("device", "device", 1.0),)}, "between two of"),
        ({"links": (LinkFigures("device", "host", 1.0, shares=("bus",)),)}, "a name of the shares"),
    ],
)
def test_a_machine_has_links_between_neighbours_and_only_between_tiers_of_it(
    change: Mapping[str, object], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        replace(_machine(), **change)  # type: ignore[arg-type]


def test_where_a_tier_in_the_middle_is_gone_bytes_take_the_slower_of_its_links() -> None:
    machine = _machine().with_capacities({"host": 0})
    assert [tier.name for tier in machine.tiers] == ["device", "disk"]
    assert machine.link("disk", "device") == LinkFigures("disk", "device", 100.0, 1.0)
    assert machine.link("device", "host") is None


def test_the_last_tier_can_be_gone_and_the_first_one_stays() -> None:
    machine = _machine().with_capacities({"disk": 0, "device": 0, "host": 7})
    assert [(tier.name, tier.capacity_bytes) for tier in machine.tiers] == [("device", 0), ("host", 7)]
    assert machine.tier("host").capacity_bytes == 7
    with pytest.raises(KeyError):
        machine.tier("disk")


def test_a_step_in_the_steady_state_is_the_mean_of_those_that_repeat() -> None:
    steps = tuple(
        StepTotals(begin, end, moved, {StallCause.ROOM: stall}, {"device": peak})
        for begin, end, moved, stall, peak in (
            (0.0, 5.0, {"host->device": 90}, 3.0, 700),
            (5.0, 7.0, {"host->device": 10}, 0.5, 300),
            (7.0, 10.0, {"device->host": 4}, 1.5, 400),
        )
    )
    timeline = Timeline("t", "simulated", (), steps, Account(0.0, 700, {}), period=2)
    assert timeline.step_s == 2.5
    assert timeline.moved_bytes == {"host->device": 5.0, "device->host": 2.0}
    assert timeline.stall_s == {StallCause.ROOM: 1.0}
    assert timeline.peak_bytes == {"device": 700}
