"""A `Program` as JSON, in columns, and back: what it says is read back exactly.

1. Of 100,000 moments it is some megabytes: a text stands in it once, and a moment's uses and work are rows of
   tables of their own, so many for each moment.
2. Another version is refused.  Keys that a later tierstore adds are left alone.
3. Every figure is checked; what is wrong is told by its path, all of it at once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence

from tierstore.planning import columns
from tierstore.planning.columns import BYTES, COUNTS, FIGURES, TEXTS, TRUTHS, ColumnTable, NumberedTexts
from tierstore.planning.program import (
    PROGRAM_VERSION,
    ByteKind,
    Datum,
    Does,
    KeyUse,
    Moment,
    OperatorWork,
    Phase,
    Program,
    Unit,
)
from tierstore.planning.wrong_values import WrongValues

_OWNER = "program"
_BY_MOMENT = ("uses", "work")


def program_to_json(program: Program) -> str:
    """Return a program as a text of JSON; `program_from_json` reads it."""
    return json.dumps(program_to_mapping(program), allow_nan=False, separators=(",", ":"))


def program_from_json(text: str) -> Program:
    """Read a text of JSON.

    Raises:
        ConfigError: it is no JSON, longer or deeper than is accepted, of another version, or something in it
            cannot be so: every fault is listed.
    """
    return program_from_mapping(columns.parsed(text, _OWNER))


def program_to_mapping(program: Program) -> dict[str, object]:
    """Return a program as plain values, which JSON can say; `program_from_mapping` reads them."""
    texts = NumberedTexts()
    return {
        "version": PROGRAM_VERSION,
        "name": program.name,
        "source": program.source,
        "fingerprint": program.fingerprint,
        "standing_bytes": program.standing_bytes,
        "accumulations": program.accumulations,
        "facts": dict(program.facts),
        "assumptions": list(program.assumptions),
        "data": _plain_data(tuple(program.data.values()), texts),
        "moments": _plain_moments(program.moments, texts),
        "uses": _plain_uses([use for moment in program.moments for use in moment.uses], texts),
        "work": _plain_work([work for moment in program.moments for work in moment.work], texts),
        "units": _plain_units(program.units, texts),
        "texts": texts.listed,
    }


def program_from_mapping(given: object) -> Program:
    """Read plain values.

    Raises:
        ConfigError: as `program_from_json`.
    """
    faults = WrongValues()
    table = ColumnTable(given, _OWNER, faults)
    faults.raise_if_any(_OWNER)
    table.require_version(PROGRAM_VERSION, _OWNER)
    texts = table.value("texts", columns.several(TEXTS), ())
    data = _data(table.table("data"), texts, faults)
    moments = _moments(table, texts, faults)
    units = _units(table.table("units"), texts)
    nothing: dict[str, str] = {}
    name, source, fingerprint = (table.value(each, TEXTS, "") for each in ("name", "source", "fingerprint"))
    standing_bytes = table.value("standing_bytes", BYTES, 0)
    accumulations = table.value("accumulations", COUNTS, 1)
    facts = table.value("facts", columns.by_name(TEXTS), nothing)
    assumptions = table.value("assumptions", columns.several(TEXTS), ())
    faults.raise_if_any(_OWNER)
    return Program(
        name,
        source,
        data,
        moments,
        units,
        standing_bytes,
        accumulations,
        facts,
        assumptions,
        fingerprint,
    )


# ---------------------------------------------------------------------- writing


def _plain_data(data: Sequence[Datum], texts: NumberedTexts) -> dict[str, object]:
    return {
        "key": texts.numbers([each.key for each in data]),
        "nbytes": [each.nbytes for each in data],
        "kind": texts.numbers([each.kind.value for each in data]),
        "owner": texts.numbers([each.owner for each in data]),
        "layer": [each.layer for each in data],
        "operator": texts.numbers([each.operator for each in data]),
    }


def _plain_moments(moments: Sequence[Moment], texts: NumberedTexts) -> dict[str, object]:
    return {
        "phase": texts.numbers([each.phase.value for each in moments]),
        "name": texts.numbers([each.name for each in moments]),
        "compute_s": [each.compute_s for each in moments],
        "host_s": [each.host_s for each in moments],
        "workspace_bytes": [each.workspace_bytes for each in moments],
        "live_bytes": [each.live_bytes for each in moments],
        "layer": [each.layer for each in moments],
        "nodes": [each.nodes for each in moments],
        "uses": [len(each.uses) for each in moments],
        "work": [len(each.work) for each in moments],
    }


def _plain_uses(uses: Sequence[KeyUse], texts: NumberedTexts) -> dict[str, object]:
    return {
        "key": texts.numbers([each.key for each in uses]),
        "does": texts.numbers([each.does.value for each in uses]),
        "moments": [each.moments for each in uses],
    }


def _plain_work(work: Sequence[OperatorWork], texts: NumberedTexts) -> dict[str, object]:
    return {
        "sort": texts.numbers([each.sort for each in work]),
        "dtype": texts.numbers([each.dtype for each in work]),
        "flops": [each.flops for each in work],
        "moved_bytes": [each.moved_bytes for each in work],
        "operators": [each.operators for each in work],
    }


def _plain_units(units: Sequence[Unit], texts: NumberedTexts) -> dict[str, object]:
    return {
        "optimizer": texts.numbers([each.optimizer for each in units]),
        "bundle": texts.numbers([each.bundle for each in units]),
        "state": texts.numbers([each.state for each in units]),
        "gradients": [texts.numbers(each.gradients) for each in units],
        "device_step_s": [each.device_step_s for each in units],
        "host_step_s": [each.host_step_s for each in units],
        "may_step_ahead": [each.may_step_ahead for each in units],
    }


# ---------------------------------------------------------------------- reading


def _data(table: ColumnTable, texts: Sequence[str], faults: WrongValues) -> dict[str, Datum]:
    text = columns.numbered(texts, TEXTS)
    keys = table.column("key", columns.numbered(texts, columns.FILLED_TEXTS))
    rows = zip(
        keys,
        table.column("nbytes", BYTES),
        table.column("kind", columns.numbered(texts, columns.chosen(ByteKind))),
        table.column("owner", columns.perhaps(text)),
        table.column("layer", columns.perhaps(BYTES)),
        table.column("operator", text),
        strict=False,
    )
    found = {row[0]: Datum(*row) for row in rows}
    if len(set(keys)) < len(keys):
        former = set[str]()
        twice = next(key for key in keys if key in former or former.add(key))  # type: ignore[func-returns-value]
        faults.add("program.data.key", twice, "each key once")
    return found


def _moments(program: ColumnTable, texts: Sequence[str], faults: WrongValues) -> tuple[Moment, ...]:
    table = program.table("moments")
    uses = _uses(program.table("uses"), texts)
    work = _work(program.table("work"), texts)
    counts = {each: table.column(each, BYTES) for each in _BY_MOMENT}
    rows = zip(
        table.column("phase", columns.numbered(texts, columns.chosen(Phase))),
        table.column("name", columns.numbered(texts, TEXTS)),
        _parts(uses, counts["uses"], "uses", faults),
        table.column("compute_s", FIGURES),
        table.column("host_s", FIGURES),
        _parts(work, counts["work"], "work", faults),
        table.column("workspace_bytes", BYTES),
        table.column("live_bytes", BYTES),
        table.column("layer", columns.perhaps(BYTES)),
        table.column("nodes", BYTES),
        strict=False,
    )
    return tuple(itertools.starmap(Moment, rows))


def _uses(table: ColumnTable, texts: Sequence[str]) -> list[KeyUse]:
    rows = zip(
        table.column("key", columns.numbered(texts, TEXTS)),
        table.column("does", columns.numbered(texts, columns.chosen(Does))),
        table.column("moments", COUNTS),
        strict=False,
    )
    return list(itertools.starmap(KeyUse, rows))


def _work(table: ColumnTable, texts: Sequence[str]) -> list[OperatorWork]:
    text = columns.numbered(texts, TEXTS)
    rows = zip(
        table.column("sort", text),
        table.column("dtype", text),
        table.column("flops", FIGURES),
        table.column("moved_bytes", BYTES),
        table.column("operators", BYTES),
        strict=False,
    )
    return list(itertools.starmap(OperatorWork, rows))


def _units(table: ColumnTable, texts: Sequence[str]) -> tuple[Unit, ...]:
    text = columns.numbered(texts, TEXTS)
    rows = zip(
        table.column("optimizer", text),
        table.column("bundle", text),
        table.column("state", columns.perhaps(text)),
        table.column("gradients", columns.several(text)),
        table.column("device_step_s", FIGURES),
        table.column("host_step_s", columns.perhaps(FIGURES)),
        table.column("may_step_ahead", TRUTHS),
        strict=False,
    )
    return tuple(itertools.starmap(Unit, rows))


def _parts(
    rows: Sequence[columns.T], counts: Sequence[int], name: str, faults: WrongValues
) -> list[tuple[columns.T, ...]]:
    """Return the rows of each moment; note it where there are not as many as the moments say."""
    found = columns.parts(rows, counts)
    if found is None:
        faults.add(f"sum(program.moments.{name})", sum(counts), f"{len(rows)}, the rows of program.{name}")
    return found or []
