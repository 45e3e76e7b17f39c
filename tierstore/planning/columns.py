"""Tables as plain values: a column for each name, texts by their number in one list; what is read is checked.

1. A column is a list, and all columns of a table are equally long.
2. A text stands once in the list of texts; in a column it is its number there.
3. Of what is wrong with a column the first cell is told.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Generic, TypeVar

from tierstore.errors import ConfigError
from tierstore.formats import json_text
from tierstore.planning.homes import is_name, values_of
from tierstore.planning.program import BYTES_LISTED, FIGURE_LISTED, is_bytes, is_figure
from tierstore.planning.wrong_values import WrongValues
from tierstore.quoting import shortened

T = TypeVar("T")
E = TypeVar("E", bound=enum.Enum)

_MESSAGE_CHARS = 300


# ---------------------------------------------------------------------- writing


class NumberedTexts:
    """Numbers texts in the order in which they come."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def number(self, text: str | None) -> int | None:
        """Return the number of a text; ``None`` of none."""
        return None if text is None else self._numbers.setdefault(text, len(self._numbers))

    def numbers(self, texts: Sequence[str | None]) -> list[int | None]:
        """Return the numbers of texts."""
        return [self.number(text) for text in texts]

    @property
    def listed(self) -> list[str]:
        """All of them, by number."""
        return list(self._numbers)


# ---------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True)
class CellReader(Generic[T]):
    """What stands in a cell.

    Attributes:
        read: returns what it says, or raises ``ValueError`` where that is wrong.
        accepted: what would be right.
    """

    read: Callable[[object], T]
    accepted: str


def _checked(value: object, is_right: Callable[[object], bool]) -> object:
    if not is_right(value):
        raise ValueError
    return value


def _figure(value: object) -> float:
    return _checked(value, is_figure)  # type: ignore[return-value]


def _bytes(value: object) -> int:
    return _checked(value, is_bytes)  # type: ignore[return-value]


def _count(value: object) -> int:
    return _checked(value, lambda each: is_bytes(each) and each != 0)  # type: ignore[return-value]


def _filled(value: object) -> str:
    return _checked(value, is_name)  # type: ignore[return-value]


def _text(value: object) -> str:
    return _checked(value, lambda each: isinstance(each, str))  # type: ignore[return-value]


def _truth(value: object) -> bool:
    return _checked(value, lambda each: isinstance(each, bool))  # type: ignore[return-value]


FIGURES = CellReader(_figure, FIGURE_LISTED)
BYTES = CellReader(_bytes, BYTES_LISTED)
COUNTS = CellReader(_count, "an int of at least 1 and less than 2**63")
TEXTS = CellReader(_text, "a text")
FILLED_TEXTS = CellReader(_filled, "a text that is not empty")
TRUTHS = CellReader(_truth, "true or false")


def chosen(kind: type[E]) -> CellReader[E]:
    """Return a cell that is a value of an enum."""
    members = {member.value: member for member in kind}

    def read(value: object) -> E:
        if not isinstance(value, str) or value not in members:
            raise ValueError
        return members[value]

    return CellReader(read, values_of(kind))


def numbered(texts: Sequence[str], cell: CellReader[T]) -> CellReader[T]:
    """Return a cell that is the number of a text which another kind of cell would be."""
    found: dict[int, T] = {}

    def read(value: object) -> T:
        if not is_bytes(value) or not isinstance(value, int) or value >= len(texts):
            raise ValueError
        if value not in found:
            found[value] = cell.read(texts[value])
        return found[value]

    return CellReader(read, f"the number, below {len(texts)}, of one of the texts: {cell.accepted}")


def perhaps(cell: CellReader[T]) -> CellReader[T | None]:
    """Return a cell that may be null."""
    return CellReader(lambda value: None if value is None else cell.read(value), f"{cell.accepted}, or null")


def several(cell: CellReader[T]) -> CellReader[tuple[T, ...]]:
    """Return a cell that is a list of cells."""

    def read(value: object) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise ValueError  # noqa: TRY004 - one kind of refusal
        return tuple(map(cell.read, value))

    return CellReader(read, f"a list, each of it {cell.accepted}")


def by_name(cell: CellReader[T]) -> CellReader[dict[str, T]]:
    """Return a cell that is a mapping of texts to cells."""

    def read(value: object) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise ValueError  # noqa: TRY004 - one kind of refusal
        return {_text(name): cell.read(each) for name, each in value.items()}

    return CellReader(read, f"a mapping of names, each to {cell.accepted}")


def by_member(kind: type[E], cell: CellReader[T]) -> CellReader[dict[E, T]]:
    """Return a cell that is a mapping of values of an enum to cells."""
    member, mapping = chosen(kind), by_name(cell)

    def read(value: object) -> dict[E, T]:
        return {member.read(name): each for name, each in mapping.read(value).items()}

    return CellReader(read, f"a mapping of {member.accepted}, each to {cell.accepted}")


class ColumnTable:
    """Reads a mapping of columns; what is wrong is noted, and read as nothing.

    Args:
        given: a mapping, or what somebody gave for one.
        where: what messages call it.
        faults: where they go.
    """

    def __init__(self, given: object, where: str, faults: WrongValues) -> None:
        self.where = where
        self._faults = faults
        faults.add_unless(isinstance(given, Mapping), where, given, "a mapping")
        self._given: Mapping[object, object] = given if isinstance(given, Mapping) else {}
        self._rows: int | None = None
        self._is_whole = isinstance(given, Mapping)

    def column(self, name: str, cell: CellReader[T]) -> list[T]:
        """Return the values of one column."""
        given = self._given.get(name)
        where = f"{self.where}.{name}"
        if not isinstance(given, list):
            self._note(where, given, "a list")
            return []
        self._rows = len(given) if self._rows is None else self._rows
        if len(given) != self._rows:
            self._note(f"len({where})", len(given), f"{self._rows}, as the columns before it")
            return []
        values: list[T] = []
        try:
            values.extend(map(cell.read, given))
        except ValueError:  # of the first one that `extend` came to
            number = len(values)
            self._note(f"{where}[{number}]", given[number], cell.accepted)
            return []
        return values

    def value(self, name: str, cell: CellReader[T], default: T) -> T:
        """Return what stands under a name that is no column; the default where nothing does."""
        if name not in self._given:
            return default
        try:
            return cell.read(self._given[name])
        except ValueError:
            self._note(f"{self.where}.{name}", self._given[name], cell.accepted)
            return default

    def table(self, name: str) -> ColumnTable:
        """Return the table that stands under a name."""
        return ColumnTable(self._given.get(name), f"{self.where}.{name}", self._faults)

    def lists(self, name: str) -> list[ColumnTable]:
        """Return the mappings of the list that stands under a name."""
        given = self._given.get(name)
        if not isinstance(given, list):
            self._note(f"{self.where}.{name}", given, "a list")
            return []
        return [
            ColumnTable(each, f"{self.where}.{name}[{number}]", self._faults)
            for number, each in enumerate(given)
        ]

    def tables(self, name: str) -> dict[str, ColumnTable]:
        """Return the tables of the mapping that stands under a name, by theirs."""
        given = self._given.get(name)
        if not isinstance(given, Mapping):
            self._note(f"{self.where}.{name}", given, "a mapping")
            return {}
        return {
            str(each): ColumnTable(value, f"{self.where}.{name}[{each}]", self._faults)
            for each, value in given.items()
        }

    def require_version(self, known: int, owner: str) -> None:
        """See to it that the table is of the version that is known.

        Raises:
            ConfigError: it is of another one, or says of none.
        """
        version = self._given.get("version")
        if version != known or isinstance(version, bool):
            said = shortened(repr(version), _MESSAGE_CHARS) if isinstance(version, int | str) else "none"
            raise ConfigError(
                f"{owner}: version {said}; this tierstore reads version {known}: write it again with this "
                "one, or read it with the one that wrote it"
            )

    def _note(self, name: str, value: object, accepted: str) -> None:
        if self._is_whole:  # what is no mapping was told already
            self._faults.add(shortened(name, _MESSAGE_CHARS), value, accepted)


def parts(rows: Sequence[T], counts: Sequence[int]) -> list[tuple[T, ...]] | None:
    """Return rows in groups of so many each; ``None``: there are not as many rows as that."""
    if sum(counts) != len(rows):
        return None
    ends = list(accumulate(counts))
    return [tuple(rows[end - count : end]) for end, count in zip(ends, counts, strict=True)]


def parsed(text: str, owner: str, *, constant: Callable[[str], object] | None = None) -> object:
    """Return what a text of JSON says, read within bounds.

    Args:
        text: of JSON.
        owner: what messages call it.
        constant: as that of `json_text.parse`.

    Raises:
        ConfigError: it is no JSON, or more than is accepted.
    """
    try:
        return json_text.parse(text, constant=constant)
    except ValueError as cause:
        why = shortened(" ".join(str(cause).split()), _MESSAGE_CHARS)
        raise ConfigError(f"{owner}: no JSON that is read: {why}") from cause
