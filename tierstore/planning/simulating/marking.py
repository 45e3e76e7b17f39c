r"""Which activations marks mean.

A pattern is levels separated by a backslash and a point, each a regular expression that matches one name of
an operator's path fully, as in ``swap_config`` and ``recompute_config``.  Later marks override earlier ones.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

from tierstore.errors import ConfigError
from tierstore.planning.homes import PlacedMark
from tierstore.planning.program import ByteKind, Datum

_SEPARATOR = r"\."


@functools.cache
def _levels(pattern: str) -> tuple[re.Pattern[str], ...]:
    try:
        return tuple(re.compile(level) for level in pattern.split(_SEPARATOR))
    except re.error as fault:
        raise ConfigError(f"the pattern {pattern!r} of a mark is no regular expression: {fault}") from fault


def matches(pattern: str, operator: str) -> bool:
    """Say whether a pattern means an operator, by its path from the layer; an empty one means all."""
    levels, names = _levels(pattern), operator.split(".")
    if not pattern:
        return True
    return len(levels) == len(names) and all(
        level.fullmatch(name) for level, name in zip(levels, names, strict=True)
    )


def mark_of(datum: Datum, marks: Sequence[PlacedMark]) -> PlacedMark | None:
    """Return what happens to an activation; ``None``: it stays."""
    if datum.kind is not ByteKind.ACTIVATION:
        return None
    meant = [each for each in marks if each.layer == datum.layer and matches(each.operators, datum.operator)]
    return meant[-1] if meant else None
