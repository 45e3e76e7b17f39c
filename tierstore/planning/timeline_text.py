"""A `Timeline` as plain values, in columns, and back: what it says is read back exactly."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from tierstore.planning import columns
from tierstore.planning.columns import BYTES, COUNTS, FIGURES, TEXTS, ColumnTable, NumberedTexts
from tierstore.planning.program import ByteKind
from tierstore.planning.timeline import (
    TIMELINE_VERSION,
    Account,
    Interval,
    StallCause,
    StepTotals,
    Timeline,
)
from tierstore.planning.wrong_values import WrongValues

_OWNER = "timeline"
_EMPTY = Account(0.0, 0, {})


def timeline_to_mapping(timeline: Timeline) -> dict[str, object]:
    """Return a timeline as plain values, which JSON can say; `timeline_from_mapping` reads them."""
    texts = NumberedTexts()
    intervals, steps = timeline.intervals, timeline.steps
    return {
        "version": TIMELINE_VERSION,
        "name": timeline.name,
        "source": timeline.source,
        "period": timeline.period,
        "assumptions": list(timeline.assumptions),
        "intervals": {
            "begin_s": [each.begin_s for each in intervals],
            "end_s": [each.end_s for each in intervals],
            "lane": texts.numbers([each.lane for each in intervals]),
            "name": texts.numbers([each.name for each in intervals]),
            "key": texts.numbers([each.key for each in intervals]),
            "nbytes": [each.nbytes for each in intervals],
            "cause": texts.numbers([each.cause and each.cause.value for each in intervals]),
        },
        "steps": {
            "begin_s": [each.begin_s for each in steps],
            "end_s": [each.end_s for each in steps],
            "moved_bytes": [dict(each.moved_bytes) for each in steps],
            "stall_s": [_plain(each.stall_s) for each in steps],
            "peak_bytes": [dict(each.peak_bytes) for each in steps],
        },
        "charges": {
            tier: {"at_s": [at_s for at_s, _ in changes], "nbytes": [nbytes for _, nbytes in changes]}
            for tier, changes in timeline.charges.items()
        },
        "held": {
            "at_s": [at_s for at_s, _ in timeline.held],
            **{kind.value: [kinds.get(kind) for _, kinds in timeline.held] for kind in ByteKind},
        },
        "account": {
            "at_s": timeline.account.at_s,
            "nbytes": timeline.account.nbytes,
            "kinds": _plain(timeline.account.kinds),
            "moment": timeline.account.moment,
            "largest": {
                "key": texts.numbers([key for key, _ in timeline.account.largest]),
                "nbytes": [nbytes for _, nbytes in timeline.account.largest],
            },
        },
        "texts": texts.listed,
    }


def timeline_from_mapping(given: object) -> Timeline:
    """Read plain values.

    Raises:
        ConfigError: they are of another version, or something in them cannot be so: every fault is listed.
    """
    faults = WrongValues()
    table = ColumnTable(given, _OWNER, faults)
    faults.raise_if_any(_OWNER)
    table.require_version(TIMELINE_VERSION, _OWNER)
    texts = table.value("texts", columns.several(TEXTS), ())
    found = Timeline(
        name=table.value("name", TEXTS, ""),
        source=table.value("source", TEXTS, ""),
        intervals=_intervals(table.table("intervals"), texts, faults),
        steps=_steps(table.table("steps"), faults),
        account=_account(table.table("account"), texts),
        charges=_charges(table, faults),
        held=_held(table.table("held"), faults),
        period=table.value("period", COUNTS, 1),
        assumptions=table.value("assumptions", columns.several(TEXTS), ()),
    )
    faults.raise_if_any(_OWNER)
    return found


def _plain(mapping: Mapping[StallCause, float] | Mapping[ByteKind, int]) -> dict[str, float]:
    return {each.value: value for each, value in mapping.items()}


def _intervals(table: ColumnTable, texts: Sequence[str], faults: WrongValues) -> tuple[Interval, ...]:
    text = columns.numbered(texts, TEXTS)
    found = (
        table.column("begin_s", FIGURES),
        table.column("end_s", FIGURES),
        table.column("lane", text),
        table.column("name", text),
        table.column("key", columns.perhaps(text)),
        table.column("nbytes", BYTES),
        table.column("cause", columns.perhaps(columns.numbered(texts, columns.chosen(StallCause)))),
    )
    _note_ends(table.where, found[0], found[1], faults)
    return tuple(Interval(*row) for row in zip(*found, strict=False))


def _steps(table: ColumnTable, faults: WrongValues) -> tuple[StepTotals, ...]:
    begin_s, end_s = table.column("begin_s", FIGURES), table.column("end_s", FIGURES)
    moved = table.column("moved_bytes", columns.by_name(BYTES))
    stalls = table.column("stall_s", columns.by_member(StallCause, FIGURES))
    peaks = table.column("peak_bytes", columns.by_name(BYTES))
    _note_ends(table.where, begin_s, end_s, faults)
    rows = zip(begin_s, end_s, moved, stalls, peaks, strict=False)
    return tuple(StepTotals(*row) for row in rows)


def _account(table: ColumnTable, texts: Sequence[str]) -> Account:
    nothing: dict[ByteKind, int] = {}
    kinds = table.value("kinds", columns.by_member(ByteKind, BYTES), nothing)
    largest = table.table("largest")
    keys, nbytes = largest.column("key", columns.numbered(texts, TEXTS)), largest.column("nbytes", BYTES)
    return Account(
        table.value("at_s", FIGURES, _EMPTY.at_s),
        table.value("nbytes", BYTES, _EMPTY.nbytes),
        kinds,
        tuple(zip(keys, nbytes, strict=False)),
        table.value("moment", TEXTS, ""),
    )


def _charges(table: ColumnTable, faults: WrongValues) -> dict[str, tuple[tuple[float, int], ...]]:
    found: dict[str, tuple[tuple[float, int], ...]] = {}
    for tier, changes in table.tables("charges").items():
        at_s = changes.column("at_s", FIGURES)
        _note_order(changes.where, at_s, faults)
        found[tier] = tuple(zip(at_s, changes.column("nbytes", BYTES), strict=False))
    return found


def _held(table: ColumnTable, faults: WrongValues) -> tuple[tuple[float, Mapping[ByteKind, int]], ...]:
    at_s = table.column("at_s", FIGURES)
    _note_order(table.where, at_s, faults)
    by_kind = {kind: table.column(kind.value, columns.perhaps(BYTES)) for kind in ByteKind}
    rows = zip(*by_kind.values(), strict=False)
    return tuple(
        (at, {kind: each for kind, each in zip(by_kind, row, strict=True) if each is not None})
        for at, row in zip(at_s, rows, strict=False)
    )


def _note_ends(where: str, begins: Sequence[float], ends: Sequence[float], faults: WrongValues) -> None:
    """Note the first end that comes before its begin."""
    for number, (begin, end) in enumerate(zip(begins, ends, strict=False)):
        if end < begin:
            faults.add(f"{where}.end_s[{number}]", end, f"not before its begin_s, {begin}")
            return


def _note_order(where: str, times: Sequence[float], faults: WrongValues) -> None:
    """Note the first time that comes before the one before it."""
    for number, (former, latter) in enumerate(itertools.pairwise(times)):
        if latter < former:
            faults.add(f"{where}.at_s[{number + 1}]", latter, f"not before the one before it, {former}")
            return
