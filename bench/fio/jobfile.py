"""The form of a job file: sections, keys and values, with the line each stands on.

Promises: `print_file` writes what `parse` reads back the same.  Every fault of a file is found, not only
the first.  Knows nothing of what keys mean.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

GLOBAL = "global"
_VARIABLE = re.compile(r"\$\{([^}]*)\}")
_LONGEST_LINE = 8192  # fio's own limit
_DEEPEST_INCLUDE = 16


class JobFileError(Exception):
    """What is wrong with job files: every fault, each with its place."""

    def __init__(self, faults: Iterable[str]) -> None:
        self.faults = tuple(dict.fromkeys(faults))
        super().__init__("\n".join(self.faults))


@dataclass(frozen=True, slots=True)
class Place:
    """A line of a file, to point at."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class Entry:
    """One key with its value; the value of a key that stands alone is empty."""

    key: str
    value: str = ""
    has_value: bool = True
    place: Place = field(default=Place("", 0), compare=False)

    def __str__(self) -> str:
        return f"{self.key}={self.value}" if self.has_value else self.key


@dataclass(frozen=True, slots=True)
class Section:
    """A name in brackets and the keys below it."""

    name: str
    entries: tuple[Entry, ...] = ()
    place: Place = field(default=Place("", 0), compare=False)


@dataclass(frozen=True, slots=True)
class RawJob:
    """A section with what it inherits: its own keys come last and win."""

    section: Section
    inherited: tuple[Entry, ...]

    @property
    def name(self) -> str:
        """The name in brackets."""
        return self.section.name

    def entries(self) -> dict[str, Entry]:
        """Return the entry that holds for each key."""
        return {entry.key: entry for entry in (*self.inherited, *self.section.entries)}


def read(path: Path, environment: Mapping[str, str] | None = None) -> list[Section]:
    """Read a job file.

    Raises:
        JobFileError: it cannot be read, or is not a job file.
    """
    return parse(_text_of(path), str(path), environment)


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError([f"{path}: cannot be read: {error}"]) from error


def parse(text: str, file: str = "job file", environment: Mapping[str, str] | None = None) -> list[Section]:
    """Read the text of a job file: ``${NAME}`` is taken from ``environment`` (None: the process's).

    Raises:
        JobFileError: with every fault.
    """
    reading = _Reading(os.environ if environment is None else environment)
    reading.take(text, file, depth=0)
    if reading.faults:
        raise JobFileError(reading.faults)
    return reading.sections


class _Reading:
    """Sections read so far, and what was wrong."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.sections: list[Section] = []
        self.faults: list[str] = []
        self._environment = environment

    def take(self, text: str, file: str, *, depth: int) -> None:
        for number, line in enumerate(text.split("\n"), 1):
            place = Place(file, number)
            if len(line) > _LONGEST_LINE:
                self._fault(place, f"a line of {len(line)} characters; fio accepts {_LONGEST_LINE}")
                continue
            bare = re.split("[;#]", line, maxsplit=1)[0].strip()
            if bare.startswith("["):
                self._section(bare, place)
            elif bare.startswith("include "):
                self._include(Path(file).parent / bare.removeprefix("include ").strip(), place, depth)
            elif bare:
                self._entry(bare, place)

    def _fault(self, place: Place, message: str) -> None:
        self.faults.append(f"{place}: {message}")

    def _section(self, line: str, place: Place) -> None:
        name = line[1:-1].strip()
        if not line.endswith("]") or not name or "]" in name:
            self._fault(place, f"{line!r} is no section; accepted: a name in brackets")
            return
        self.sections.append(Section(name, place=place))

    def _include(self, path: Path, place: Place, depth: int) -> None:
        if depth == _DEEPEST_INCLUDE:
            self._fault(place, f"include {path}: more than {_DEEPEST_INCLUDE} files deep")
            return
        try:
            self.take(_text_of(path), str(path), depth=depth + 1)
        except JobFileError as error:
            self._fault(place, f"include: {error}")

    def _entry(self, line: str, place: Place) -> None:
        key, equals, value = line.partition("=")
        if not self.sections:
            self._fault(place, f"{line!r} stands before the first section")
        elif not key.strip():
            self._fault(place, f"{line!r} has no key")
        elif equals and value != value.lstrip():
            # fio keeps the blank, and then reads ' 4k' as 4 and ' read' as nothing it knows.
            self._fault(place, f"{line!r}: a blank after '=' changes what fio reads; leave it out")
        else:
            entry = Entry(key.strip(), self._expand(value, place), bool(equals), place)
            self.sections[-1] = replace(self.sections[-1], entries=(*self.sections[-1].entries, entry))

    def _expand(self, value: str, place: Place) -> str:
        def variable(match: re.Match[str]) -> str:
            if match[1] not in self._environment:
                self._fault(place, f"${{{match[1]}}} is not in the environment")
            return self._environment.get(match[1], "")

        return _VARIABLE.sub(variable, value)


def print_file(sections: Sequence[Section]) -> str:
    """Write sections as a job file."""
    return "\n".join("\n".join([f"[{section.name}]", *map(str, section.entries), ""]) for section in sections)


def raw_jobs(sections: Iterable[Section]) -> Iterator[RawJob]:
    """Yield every section but ``[global]`` with the keys of the ``[global]`` sections above it."""
    inherited: tuple[Entry, ...] = ()
    for section in sections:
        if section.name == GLOBAL:
            inherited = (*inherited, *section.entries)
        else:
            yield RawJob(section, inherited)
