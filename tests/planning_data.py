"""What Hypothesis makes of programs, machines and timelines: any that are right."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import strategies as st

from tierstore.planning import (
    Account,
    ByteKind,
    Interval,
    StallCause,
    StepTotals,
    Timeline,
)

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
