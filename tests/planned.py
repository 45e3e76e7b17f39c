"""Programs, machines and placements for tests of the planner: one shape of a training step, in all sizes.

A program steps layers one after another: forward uses their bundles and makes activations, backward uses
both the other way round and makes gradients, the optimizer steps a bundle at a time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from tierstore.planning import (
    BundleHomes,
    ByteKind,
    ComputeFigures,
    Datum,
    Does,
    Home,
    KeyUse,
    LinkFigures,
    Machine,
    Moment,
    Phase,
    PlacedMark,
    Placement,
    Program,
    Stashing,
    TierFigures,
    TierMedium,
    Treatment,
    Unit,
)

TIERS = ("device", "host", "disk")
_MEDIA = (TierMedium.DEVICE, TierMedium.HOST, TierMedium.STORAGE)


@dataclass(frozen=True)
class Layer:
    """One layer of a program.

    Attributes:
        parameter_bytes: of its bundle.
        state_bytes: of its optimizer's; 0: it keeps nothing.
        gradient_bytes: of each gradient; none: it is frozen.
        activation_bytes: that it makes for backward; 0: none.
        workspace_bytes: of its operators.
        forward_s, backward_s, step_s: how long it computes.
        host_step_s: its step on the host; ``None``: it cannot be stepped there.
    """

    parameter_bytes: int
    state_bytes: int = 0
    gradient_bytes: tuple[int, ...] = ()
    activation_bytes: int = 0
    workspace_bytes: int = 0
    forward_s: float = 0.0
    backward_s: float = 0.0
    step_s: float = 0.0
    host_step_s: float | None = None


def program_of(
    layers: Sequence[Layer],
    *,
    name: str = "layers",
    accumulations: int = 1,
    standing_bytes: int = 0,
    host_s: float = 0.0,
    may_step_ahead: bool = False,
) -> Program:
    """Return the program that trains layers."""
    numbered = list(enumerate(layers))
    data = [datum for number, layer in numbered for datum in _data(number, layer)]
    moments: list[Moment] = []
    for turn in range(accumulations):
        moments += [_forward(number, layer, host_s) for number, layer in numbered]
        moments += [_backward(number, layer, host_s, turn) for number, layer in reversed(numbered)]
    moments += [_step(number, layer, host_s) for number, layer in numbered if layer.gradient_bytes]
    ended = [KeyUse(key, Does.END) for number, layer in numbered for key in _gradients(number, layer)]
    moments.append(Moment(Phase.BETWEEN, "zero_grad", tuple(ended)))
    return Program(
        name,
        "hand",
        {datum.key: datum for datum in data},
        tuple(moments),
        tuple(
            Unit(
                "AdamW",
                f"param/{number}",
                f"state/{number}" if layer.state_bytes else None,
                tuple(_gradients(number, layer)),
                layer.step_s,
                layer.host_step_s,
                may_step_ahead,
            )
            for number, layer in numbered
            if layer.gradient_bytes
        ),
        standing_bytes,
        accumulations,
    )


def _gradients(number: int, layer: Layer) -> list[str]:
    return [f"grad/{number}.{index}" for index, _ in enumerate(layer.gradient_bytes)]


def _data(number: int, layer: Layer) -> list[Datum]:
    owner = f"param/{number}"
    data = [Datum(owner, layer.parameter_bytes, ByteKind.PARAMETERS, layer=number)]
    for key, nbytes in zip(_gradients(number, layer), layer.gradient_bytes, strict=True):
        data.append(Datum(key, nbytes, ByteKind.GRADIENT, owner, number))
    if layer.state_bytes and layer.gradient_bytes:
        data.append(Datum(f"state/{number}", layer.state_bytes, ByteKind.STATE, owner, number))
    if layer.activation_bytes:
        data.append(
            Datum(f"act/{number}", layer.activation_bytes, ByteKind.ACTIVATION, None, number, "attention")
        )
    return data


def _forward(number: int, layer: Layer, host_s: float) -> Moment:
    made = [KeyUse(f"act/{number}", Does.MAKE)] if layer.activation_bytes else []
    return Moment(
        Phase.FORWARD,
        f"layers.{number}",
        (KeyUse(f"param/{number}", Does.READ), *made),
        layer.forward_s,
        host_s,
        workspace_bytes=layer.workspace_bytes,
        layer=number,
        nodes=2,
    )


def _backward(number: int, layer: Layer, host_s: float, turn: int) -> Moment:
    kept = [f"act/{number}"] if layer.activation_bytes else []
    return Moment(
        Phase.BACKWARD,
        f"layers.{number}",
        (
            KeyUse(f"param/{number}", Does.READ),
            *(KeyUse(key, Does.READ) for key in kept),
            *(KeyUse(key, Does.WRITE if turn else Does.MAKE) for key in _gradients(number, layer)),
            *(KeyUse(key, Does.END) for key in kept),
        ),
        layer.backward_s,
        host_s,
        workspace_bytes=layer.workspace_bytes,
        layer=number,
        nodes=2,
    )


def _step(number: int, layer: Layer, host_s: float) -> Moment:
    state = [KeyUse(f"state/{number}", Does.WRITE)] if layer.state_bytes else []
    return Moment(
        Phase.OPTIMIZER,
        f"AdamW layers.{number}",
        (
            KeyUse(f"param/{number}", Does.WRITE),
            *(KeyUse(key, Does.READ) for key in _gradients(number, layer)),
            *state,
        ),
        layer.step_s,
        host_s,
        layer=number,
    )


def machine_of(
    capacities: Sequence[int],
    bytes_per_s: Sequence[float] = (1e6, 1e5),
    *,
    latency_s: float = 0.0,
    alignment_bytes: int = 1,
    has_streams: bool = True,
    is_half_duplex: bool = False,
    burst_s: float = 0.0,
) -> Machine:
    """Return a machine of one to three tiers.

    Args:
        capacities: of each tier.
        bytes_per_s: between each and the next, in both directions.
        latency_s: of every link.
        burst_s: of every link.
        alignment_bytes: of the first tier.
        has_streams: see `Machine`.
        is_half_duplex: whether the directions between two tiers share their rate.
    """
    tiers = tuple(
        TierFigures(name, nbytes, medium, alignment_bytes if name == TIERS[0] else 1)
        for name, nbytes, medium in zip(TIERS, capacities, _MEDIA, strict=False)
    )
    shares = {f"{upper.name}-{lower.name}": rate for upper, lower, rate in _pairs(tiers, bytes_per_s)}
    links = [
        LinkFigures(source.name, target.name, rate, latency_s, shared, burst_s)
        for upper, lower, rate in _pairs(tiers, bytes_per_s)
        for shared in [(f"{upper.name}-{lower.name}",) if is_half_duplex else ()]
        for source, target in ((upper, lower), (lower, upper))
    ]
    figures = ComputeFigures({"float32": 1e12}, 1e12)
    return Machine(
        "of a test",
        tiers,
        tuple(links),
        figures,
        figures,
        shares if is_half_duplex else {},
        has_streams=has_streams,
    )


def without_device(machine: Machine) -> Machine:
    """Return a machine of three tiers without the first one: host memory, and a disk below it."""
    first = machine.tiers[0].name
    links = tuple(link for link in machine.links if first not in (link.source, link.target))
    shared = {name for link in links for name in link.shares}
    shares = {name: rate for name, rate in machine.shares.items() if name in shared}
    return replace(machine, tiers=machine.tiers[1:], links=links, shares=shares)


def _pairs(
    tiers: Sequence[TierFigures], rates: Sequence[float]
) -> list[tuple[TierFigures, TierFigures, float]]:
    return list(zip(tiers, tiers[1:], rates, strict=False))


# ---------------------------------------------------------------------- strategies

_SIZES = st.sampled_from([1, 100, 512, 1000, 4096, 10_000])
_SECONDS = st.sampled_from([0.0, 0.001, 0.01, 0.5])


@st.composite
def layers_of(draw: st.DrawFn) -> Layer:
    """Draw one layer: sizes differ, and some are frozen, keep no state or make nothing."""
    gradients = tuple(draw(st.lists(_SIZES, max_size=2)))
    return Layer(
        draw(_SIZES),
        draw(st.sampled_from([0, 8, 2000, 20_000])) if gradients else 0,
        gradients,
        draw(st.sampled_from([0, 0, 300, 5000])),
        draw(st.sampled_from([0, 0, 700])),
        draw(_SECONDS),
        draw(_SECONDS),
        draw(_SECONDS),
        draw(st.one_of(st.none(), _SECONDS)),
    )


@st.composite
def programs(draw: st.DrawFn, *, most_layers: int = 5) -> Program:
    """Draw a program that trains one to ``most_layers`` layers."""
    layers = draw(st.lists(layers_of(), min_size=1, max_size=most_layers))
    return program_of(
        layers,
        accumulations=draw(st.sampled_from([1, 1, 2])),
        standing_bytes=draw(st.sampled_from([0, 0, 1000])),
        host_s=draw(st.sampled_from([0.0, 0.0001])),
        may_step_ahead=draw(st.booleans()),
    )


@st.composite
def machines(draw: st.DrawFn, *, tiers: int | None = None) -> Machine:
    """Draw a machine; what `programs` draw fits into some of them, and into some not at all.

    Args:
        draw: of Hypothesis.
        tiers: how many; ``None``: one to three.
    """
    count = tiers or draw(st.integers(1, 3))
    capacities = [
        draw(st.sampled_from([8_192, 32_768, 65_536, 262_144])),
        draw(st.sampled_from([16_384, 131_072, 1_048_576])),
        draw(st.sampled_from([65_536, 4_194_304])),
    ]
    rates = st.sampled_from([1e4, 1e6, 1e9, math.inf])
    return machine_of(
        capacities[:count],
        (draw(rates), draw(rates)),
        latency_s=draw(st.sampled_from([0.0, 0.001])),
        alignment_bytes=draw(st.sampled_from([1, 512])),
        has_streams=draw(st.booleans()),
        is_half_duplex=draw(st.booleans()),
        burst_s=draw(st.sampled_from([0.0, 0.05])),
    )


@st.composite
def placements(draw: st.DrawFn, program: Program, machine: Machine) -> Placement:
    """Draw a placement that a program can have on a machine."""
    names = [tier.name for tier in machine.tiers]
    bundles = [key for key, datum in program.data.items() if datum.kind is ByteKind.PARAMETERS]
    layers = sorted({each.layer for each in program.moments if each.layer is not None})
    reached = [name for name in names if name != "disk"]
    shares = st.sampled_from([0.25, 0.5, 1.0])
    steps_on_host = len(names) > 1 and all(unit.host_step_s is not None for unit in program.units)
    homes = draw(st.sampled_from([BundleHomes(), *_homes(names, steps_on_host=steps_on_host)]))
    return Placement(
        dict.fromkeys(bundles, homes),
        draw(st.sampled_from([Stashing.ALWAYS, Stashing.WITHOUT_ROOM])),
        {name: draw(shares) for name in draw(st.lists(st.sampled_from(reached), unique=True))},
        frozenset(draw(st.lists(st.sampled_from(bundles), unique=True, max_size=2))),
        [
            PlacedMark(layer, "", Treatment.SWAP, draw(st.integers(0, 3)))
            for layer in draw(st.lists(st.sampled_from(layers), unique=True, max_size=2))
        ]
        if len(names) > 1
        else (),
        high={name: draw(shares) for name in draw(st.lists(st.sampled_from(names), unique=True))},
        shares={names[0]: draw(st.sampled_from([0.75, 1.0]))},
    )


def _homes(names: Sequence[str], *, steps_on_host: bool) -> list[BundleHomes]:
    """Return homes below the first tier."""
    found = [
        BundleHomes(home, home, home) for name in names[1:] for home in (Home(name), Home(name, returns=True))
    ]
    if steps_on_host:
        found.append(BundleHomes(Home(), Home(device="cpu"), Home(device="cpu")))
    return found
