"""Values of ``recompute_config``: what is accepted, and the table that each becomes.

Rule 1: a tuple is accepted wherever a list is; what was given is never changed.
Rule 2: a table holds plain ints, and never more than a cell has layers.
Rule 3: a list is never longer than there are stages or interleaves; what is missing at its end is 0.

A value is kept as bools, ints and tuples.  Two ways to read it: by *stage* (how many layers of each) and,
when swap is on, by *index* (which layers).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tierstore.config.checks import Check, whole
from tierstore.errors import ConfigError
from tierstore.quoting import listed, named, quoted
from tierstore.training.activations.config.geometry import Geometry, Table
from tierstore.training.activations.config.patterns import pattern_text

Count = int | bool
"""How many layers; true: all."""

Value = bool | tuple[Count | tuple[Count, ...], ...]
"""Which layers, as a user says it."""

Selection = Value | tuple[str, ...] | Mapping[str, Value]
"""Which operators of which layers, as a user says it."""

_BY_STAGE = (
    "accepted: true or false; a list that says how many layers of each stage, such as [2, 1, true, 0]; "
    "or a list of those, one an interleave"
)
_BY_INDEX = "accepted, because swap is on: true or false, or a list of the layers' indices, such as [0, 3]"
_NAMES = "a list of operators' patterns, or a mapping of those to such values"


def by_stage(value: object) -> Value:
    """Accept how many layers of each stage.

    Raises:
        ConfigError: it is nothing of that.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple):
        if all(map(_is_count, value)):
            return _counts(value)
        return tuple(_row(item) for item in value)
    raise ConfigError(_BY_STAGE)


def by_index(value: object) -> Value:
    """Accept which layers.

    Raises:
        ConfigError: it is neither a bool nor a list of indices.
    """
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and all(map(is_index, value)):
        return tuple(map(int, value))
    raise ConfigError(_BY_INDEX)


def selection(check: Check) -> Check:
    """Return a check of operators: a value for the default ones, names, or a value for each name.

    Args:
        check: `by_stage` or `by_index`; names alone are accepted by stage only.
    """

    def accept(value: object) -> object:
        if isinstance(value, Mapping):
            return _by_pattern(value, check)
        if check is by_stage and _is_names(value):
            assert isinstance(value, list | tuple)
            return tuple(map(pattern_text, value))
        try:
            return check(value)
        except ConfigError as fault:
            names = (
                f"; or {_NAMES}" if check is by_stage else "; or a mapping of operators' patterns to those"
            )
            raise ConfigError(f"{fault}{names}") from fault

    return accept


def table_of(value: Value, geometry: Geometry) -> Table:
    """Return how many of the first layers of each cell are meant.

    Args:
        value: as `by_stage` returned it.
        geometry: the cells.

    Raises:
        ConfigError: there are more numbers than stages, or more lists than interleaves.
    """
    if isinstance(value, bool):
        return [[count if value else 0 for count in row] for row in geometry.layers]
    if any(isinstance(item, tuple) for item in value):
        return _table_of_rows(value, geometry)
    counts = [item for item in value if not isinstance(item, tuple)]
    _require_length(counts, geometry.stages, "stages", value)
    columns = [
        _spread(count, [row[stage] for row in geometry.layers])
        for stage, count in enumerate([*counts, *[0] * (geometry.stages - len(counts))])
    ]
    return [list(row) for row in zip(*columns, strict=True)]


def indices_of(value: Value) -> bool | list[int]:
    """Return which layers are meant; true: all.

    Args:
        value: as `by_index` returned it.
    """
    if isinstance(value, bool):
        return value or []
    return [int(item) for item in value if not isinstance(item, tuple)]


def _table_of_rows(rows: Sequence[Count | tuple[Count, ...]], geometry: Geometry) -> Table:
    _require_length(rows, geometry.interleaves, "interleaves", rows)
    table = []
    for i, capacities in enumerate(geometry.layers):
        row = rows[i] if i < len(rows) else ()
        counts = row if isinstance(row, tuple) else (row,) * geometry.stages
        _require_length(counts, geometry.stages, "stages", rows)
        padded = [*counts, *[0] * (geometry.stages - len(counts))]
        table.append([_at_most(capacity, count) for capacity, count in zip(capacities, padded, strict=True)])
    return table


def _spread(count: Count, capacities: Sequence[int]) -> list[int]:
    """Hand one stage's layers out to its interleaves in turn, one at a time, passing over full ones."""
    left = _at_most(sum(capacities), count)
    given = [0] * len(capacities)
    while left:
        for i, capacity in enumerate(capacities):
            if left and given[i] < capacity:
                given[i] += 1
                left -= 1
    return given


def _at_most(capacity: int, count: Count) -> int:
    if isinstance(count, bool):
        return capacity if count else 0
    return min(capacity, count)


def _require_length(items: Sequence[object], most: int, what: str, value: object) -> None:
    if len(items) > most:
        raise ConfigError(
            f"{quoted(value)} has {len(items)} entries for {most} {what}; accepted: at most {most}"
        )


def _row(item: object) -> Count | tuple[Count, ...]:
    """Return one interleave's numbers."""
    if isinstance(item, bool):
        return item
    if isinstance(item, list | tuple) and all(map(_is_count, item)):
        return _counts(item)
    raise ConfigError(_BY_STAGE)


def is_index(value: object) -> bool:
    """Say whether a value is an int from 0 on; a bool is none."""
    number = whole(value)
    return number is not None and number >= 0


def _is_count(value: object) -> bool:
    return isinstance(value, bool) or is_index(value)


def _counts(values: Iterable[Any]) -> tuple[Count, ...]:
    """Return numbers as plain ones."""
    return tuple(each if isinstance(each, bool) else int(each) for each in values)


def _is_names(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, str) for each in value)


def _by_pattern(value: Mapping[object, object], check: Check) -> dict[str, object]:
    kept: dict[str, object] = {}
    wrong = []
    for key, each in value.items():
        try:
            text = pattern_text(key)
            kept[text] = check(each)
        except ConfigError as fault:
            wrong.append(f"'{named(key)}': {fault}")
    if wrong:
        raise ConfigError(listed(wrong, show=str, separator="; "))
    return kept
