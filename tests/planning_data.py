"""What Hypothesis makes of programs, machines and timelines: any that are right."""

from __future__ import annotations

import itertools
from typing import TypeVar

from hypothesis import strategies as st

from tierstore.planning import (
    Account,
    ByteKind,
    ComputeFigures,
    Datum,
    Does,
    Interval,
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
from tierstore.planning.machine_text import DTYPES, NETWORKS, SORTS

SECONDS = st.floats(0, 1e6) | st.integers(0, 10)
BYTES = st.integers(0, 2**63 - 1)
ANY_TEXTS = st.text(max_size=6)
NAMES = st.text(min_size=1, max_size=6) | st.sampled_from(["layers.0.w", "device", "host->device"])
FEW = 4


@st.composite
def spans(draw: st.DrawFn) -> tuple[float, float]:
    """A begin and an end that is not before it."""
    begin, end = sorted((draw(SECONDS), draw(SECONDS)))
    return begin, end


@st.composite
def intervals(draw: st.DrawFn) -> Interval:
    return Interval(
        *draw(spans()),
        draw(NAMES),
        draw(ANY_TEXTS),
        draw(st.none() | NAMES),
        draw(BYTES),
        draw(st.none() | st.sampled_from(StallCause)),
    )


@st.composite
def steps(draw: st.DrawFn) -> StepTotals:
    return StepTotals(
        *draw(spans()),
        draw(st.dictionaries(NAMES, BYTES, max_size=FEW)),
        draw(st.dictionaries(st.sampled_from(StallCause), SECONDS, max_size=FEW)),
        draw(st.dictionaries(NAMES, BYTES, max_size=FEW)),
    )


T = TypeVar("T")

_KINDS = st.dictionaries(st.sampled_from(ByteKind), BYTES, max_size=FEW)


def _sorted_by_time(changes: st.SearchStrategy[T]) -> st.SearchStrategy[tuple[tuple[float, T], ...]]:
    each = st.lists(st.tuples(SECONDS, changes), max_size=FEW)
    return each.map(lambda found: tuple(sorted(found, key=lambda change: change[0])))


def timelines() -> st.SearchStrategy[Timeline]:
    """Any timeline that can be."""
    return st.builds(
        Timeline,
        name=ANY_TEXTS,
        source=st.sampled_from(["simulated", "measured"]),
        intervals=st.lists(intervals(), max_size=FEW).map(tuple),
        steps=st.lists(steps(), max_size=FEW).map(tuple),
        account=st.builds(
            Account,
            SECONDS,
            BYTES,
            _KINDS,
            st.lists(st.tuples(NAMES, BYTES), max_size=FEW).map(tuple),
            ANY_TEXTS,
        ),
        charges=st.dictionaries(NAMES, _sorted_by_time(BYTES), max_size=FEW),
        held=_sorted_by_time(_KINDS),
        period=st.integers(1, 2**63 - 1),
        assumptions=st.lists(ANY_TEXTS, max_size=FEW).map(tuple),
    )


# ------------------------------------------------------------------------------ programs


_LAYERS = st.none() | st.integers(0, 200)


@st.composite
def _data(draw: st.DrawFn) -> dict[str, Datum]:
    keys = draw(st.lists(NAMES, max_size=FEW, unique=True))
    kinds, texts = st.sampled_from(ByteKind), st.none() | NAMES
    return {
        key: Datum(key, draw(BYTES), draw(kinds), draw(texts), draw(_LAYERS), draw(ANY_TEXTS)) for key in keys
    }


class _Alive:
    """Which keys exist as a step goes on."""

    def __init__(self, draw: st.DrawFn, keys: list[str]) -> None:
        self._draw = draw
        self._is_made = {key: draw(st.booleans()) for key in keys}  # by the step: first of all it is made
        self._exists = {key: not is_made for key, is_made in self._is_made.items()}

    def use(self) -> KeyUse | None:
        """Use any key in a way in which it can be used now."""
        if not self._exists:
            return None
        key = self._draw(st.sampled_from(sorted(self._exists)))
        if self._exists[key]:
            does = self._draw(st.sampled_from([Does.READ, Does.WRITE, *[Does.END] * self._is_made[key]]))
        elif self._is_made[key]:
            does = Does.MAKE
        else:
            return None
        self._exists[key] = does is not Does.END
        return KeyUse(key, does, self._draw(st.integers(1, 9)))


WORK = st.builds(
    OperatorWork,
    st.sampled_from(SORTS),
    st.sampled_from(DTYPES),
    SECONDS | st.just(1e18),
    BYTES,
    st.integers(0, 1000),
)


@st.composite
def programs(draw: st.DrawFn) -> Program:
    """Any program that can be."""
    data = draw(_data())
    alive = _Alive(draw, list(data))
    moments = []
    for _ in range(draw(st.integers(0, FEW))):
        uses = [alive.use() for _ in range(draw(st.integers(0, 3)))]
        moments.append(
            Moment(
                draw(st.sampled_from(Phase)),
                draw(ANY_TEXTS),
                tuple(use for use in uses if use is not None),
                draw(SECONDS),
                draw(SECONDS),
                tuple(draw(st.lists(WORK, max_size=2))),
                draw(BYTES),
                draw(BYTES),
                draw(_LAYERS),
                draw(st.integers(0, 100)),
            )
        )
    keys = st.sampled_from(sorted(data)) if data else st.nothing()
    units = st.builds(
        Unit,
        ANY_TEXTS,
        keys,
        st.none() | keys,
        st.lists(keys, max_size=2).map(tuple),
        SECONDS,
        st.none() | SECONDS,
        st.booleans(),
    )
    return Program(
        draw(ANY_TEXTS),
        draw(st.sampled_from(["trace", "model", "hand"])),
        data,
        tuple(moments),
        tuple(draw(st.lists(units, max_size=2))) if data else (),
        draw(BYTES),
        draw(st.integers(1, 8)),
        draw(st.dictionaries(ANY_TEXTS, ANY_TEXTS, max_size=FEW)),
        tuple(draw(st.lists(ANY_TEXTS, max_size=2))),
        draw(ANY_TEXTS),
    )


# ------------------------------------------------------------------------------ machines


RATES = st.floats(1, 1e21) | st.integers(1, 10**18)
_MOST_SECONDS = st.floats(0, 3600)
_SHARES = st.floats(0, 1, exclude_min=True)
_FIGURES = st.builds(
    ComputeFigures,
    st.dictionaries(st.sampled_from(DTYPES), RATES, max_size=FEW),
    RATES | st.just(float("inf")),
    _MOST_SECONDS,
    st.dictionaries(st.sampled_from(SORTS), _SHARES, max_size=FEW),
)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any machine that can be, of tiers that have room."""
    names = draw(st.lists(NAMES, min_size=1, max_size=FEW, unique=True))
    shares = draw(st.dictionaries(NAMES, RATES, max_size=2))
    some = st.lists(st.sampled_from(sorted(shares)), max_size=2).map(tuple) if shares else st.just(())
    tiers = tuple(
        TierFigures(
            name,
            draw(st.integers(1, 2**63 - 1)),
            draw(st.sampled_from(TierMedium)),
            draw(st.integers(1, 4096)),
        )
        for name in names
    )
    pairs = [pair for upper, lower in itertools.pairwise(names) for pair in ((upper, lower), (lower, upper))]
    rates = RATES | st.just(float("inf"))
    links = tuple(
        LinkFigures(*pair, draw(rates), draw(_MOST_SECONDS), draw(some), draw(_MOST_SECONDS))
        for pair in pairs
    )
    network = [NetworkFigures(name, draw(rates), draw(_MOST_SECONDS), draw(some)) for name in NETWORKS]
    return Machine(
        draw(ANY_TEXTS),
        tiers,
        links,
        draw(_FIGURES),
        draw(_FIGURES),
        shares,
        tuple(network[: draw(st.integers(0, 2))]),
        draw(st.integers(1, 16)),
        draw(st.integers(1, 4096)),
        draw(st.booleans()),
        draw(st.dictionaries(NAMES, ANY_TEXTS, max_size=FEW)),
    )
