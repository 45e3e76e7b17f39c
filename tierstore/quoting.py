"""What messages show of what they were given: as ``repr`` does, and bounded.

The one place for that.  It takes time and memory by what is shown, however large, deep or cyclic a value
is, and runs none of its code: what is of no known kind is shown as its type.
"""

from __future__ import annotations

import itertools
import numbers
from collections.abc import Callable, Iterable, Iterator
from typing import Any

SHOWN_CHARS = 120
"""How much of a value a message shows."""

_SHOWN_BITS = 1024  # of an int; beyond some thousand digits Python itself refuses to print one
_SLICE = slice(1000)  # more of a text than any message shows
_BRACKETS: tuple[tuple[type, str, str], ...] = (
    (list, "[", "]"),
    (tuple, "(", ")"),
    (set, "{", "}"),
    (frozenset, "{", "}"),
)


def quoted(value: object, most_chars: int = SHOWN_CHARS) -> str:
    """Return what a message shows of a value; what is longer than ``most_chars`` ends in ``...`` there."""
    text = ""
    for piece in _pieces(value):
        text += piece
        if len(text) > most_chars:
            break
    return shortened(text, most_chars)


def shortened(text: str, most_chars: int) -> str:
    """Return a text for a message, cut where it is longer."""
    return text if len(text) <= most_chars else f"{text[:most_chars]}..."


def named(key: object) -> str:
    """Return a key as a message names it: as it is where it is a short, printable text."""
    is_plain = type(key) is str and len(key) <= SHOWN_CHARS and key.isprintable() and key
    return str(key) if is_plain else quoted(key)


def listed(
    values: Iterable[object],
    most: int = 8,
    *,
    show: Callable[[object], str] = quoted,
    separator: str = ", ",
) -> str:
    """Return the first ``most`` of several values, and how many more there are."""
    each = iter(values)
    shown = [show(value) for value in itertools.islice(each, most)]
    more = sum(1 for _ in each)
    return separator.join([*shown, f"and {more} more"] if more else shown)


def _pieces(value: object) -> Iterator[str]:
    """Yield what is shown, bit by bit: each bit is short, and each level yields one."""
    for kind, begin, end in _BRACKETS:
        if isinstance(value, kind):
            members: Iterator[Any] = kind.__iter__(value)  # type: ignore[attr-defined]
            alone = "," if kind is tuple and tuple.__len__(value) == 1 else ""  # type: ignore[arg-type]
            yield from _members(begin, members, f"{alone}{end}")
            return
    if isinstance(value, dict):
        yield from _members("{", iter(dict.items(value)), "}", is_of_pairs=True)
    else:
        yield _plain(value)


def _members(begin: str, members: Iterator[Any], end: str, *, is_of_pairs: bool = False) -> Iterator[str]:
    yield begin
    for number, member in enumerate(members):
        yield ", " if number else ""
        if is_of_pairs:
            yield from _pieces(member[0])
            yield ": "
        yield from _pieces(member[1] if is_of_pairs else member)
    yield end


def _plain(value: object) -> str:
    """Return what is shown of a value that has no members."""
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int) and int.bit_length(value) > _SHOWN_BITS:
        return f"<an int of {int.bit_length(value)} bits>"
    for kind in (int, float, complex):
        if isinstance(value, kind):
            return kind.__repr__(value)
    if isinstance(value, str):
        return repr(str.__getitem__(value, _SLICE))
    if isinstance(value, bytes):
        return repr(bytes.__getitem__(value, _SLICE))
    return _of_another_kind(value)


def _of_another_kind(value: object) -> str:
    """Return a class, a path, a device, a dtype or a number of numpy as it prints; others as their type."""
    if isinstance(value, type):
        return type.__repr__(value)
    kind = type(value)
    where, name = str(kind.__module__), str(kind.__qualname__)
    is_known = where.startswith("pathlib") or (where == "torch" and name in ("device", "dtype", "Size"))
    if is_known or (where == "numpy" and isinstance(value, numbers.Number)):
        return repr(value)
    return f"<{where}.{name} object>"
