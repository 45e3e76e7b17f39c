"""The options of a backend, read once when it opens.

Promises: an unknown name, a wrong type or a bad value is a `ConfigError` that names the backend
and says what is accepted.  Knows nothing of what an option does.

A backend with a handful of options asks `Options` for each.  One with many gives `read_all` a table of
readers, and all faults are told at once.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeGuard

from tierstore.errors import ConfigError
from tierstore.quoting import listed, named, quoted
from tierstore.units import parse_bytes

Reader = Callable[[object], object]
"""Returns the value that one option means; raises ``ConfigError``, which says what is accepted."""


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_duration(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


# ---------------------------------------------------------------------- one by one


class Options:
    """What was given to one backend.

    Args:
        backend: the name that messages give it.
        given: the options as the user wrote them.
        accepted: every name the backend knows.

    Raises:
        ConfigError: a name that is not accepted.
    """

    def __init__(self, backend: str, given: Mapping[str, object], accepted: Collection[str]) -> None:
        unknown = sorted(set(given) - set(accepted))
        if unknown:
            known = ", ".join(sorted(accepted)) or "none"
            raise ConfigError(f"the {backend!r} backend has no option {listed(unknown)}. Accepted: {known}")
        self._backend = backend
        self._given = given

    def flag(self, name: str, *, default: bool) -> bool:
        """Return a truth value."""
        value = self._given.get(name, default)
        if not isinstance(value, bool):
            raise self._fault(name, value, "True or False")
        return value

    def text(self, name: str, *, default: str) -> str:
        """Return a text."""
        value = self._given.get(name, default)
        if not isinstance(value, str):
            raise self._fault(name, value, "a text")
        return value

    def number(self, name: str) -> int | None:
        """Return an int, or ``None`` if it was not given."""
        value = self._given.get(name)
        if value is not None and not _is_int(value):
            raise self._fault(name, value, "an int or None")
        return value

    def seconds(self, name: str, *, default: float) -> float:
        """Return a duration that is finite and not negative."""
        value = self._given.get(name, default)
        if not _is_duration(value):
            raise self._fault(name, value, "seconds, 0 or more")
        return float(value)

    def nbytes(self, name: str) -> int | None:
        """Return a positive number of bytes from an int or a text; ``None`` if it was not given."""
        value = self._given.get(name)
        if value is None:
            return None
        if not isinstance(value, int | str):
            raise self._fault(name, value, "a size such as '1.5GiB', or None")
        try:
            nbytes = parse_bytes(value)
        except ConfigError as error:
            raise self._fault(name, value, "a size such as '1.5GiB', or None") from error
        if nbytes == 0:
            raise self._fault(name, value, "a size above 0, or None")
        return nbytes

    def _fault(self, name: str, value: object, accepted: str) -> ConfigError:
        return ConfigError(
            f"option {name!r} of the {self._backend!r} backend is {quoted(value)}. Accepted: {accepted}"
        )


# ---------------------------------------------------------------------- all at once


def read_all(
    backend: str,
    given: Mapping[str, object],
    readers: Mapping[str, Reader],
    *,
    needed: Mapping[str, str],
    contradictions: Callable[[Mapping[str, object]], Iterable[str]],
    secret: Collection[str] = (),
) -> dict[str, object]:
    """Return the values of the options that were given.

    Args:
        backend: the name that messages give it.
        given: the options as the user wrote them.
        readers: how each option that the backend knows is read.
        needed: what is said of an option that must be given, by its name.
        contradictions: says what is wrong with values that are each well by themselves; those that could
            not be read are not among them.
        secret: options whose values no message may show.

    Raises:
        ConfigError: every fault in one message: unknown names, with near misses, and bad values, with what
            is accepted.
    """
    faults: list[str] = []
    values: dict[str, object] = {}
    for name, value in given.items():
        read = readers.get(name)
        if read is None:
            faults.append(_unknown(name, readers))
            continue
        try:
            values[name] = read(value)
        except ConfigError as error:
            shown = "..." if name in secret else quoted(value)
            faults.append(f"{named(name)}={shown}: {error}")
    faults += [f"{name} is missing: {what}" for name, what in needed.items() if name not in given]
    faults += contradictions(values)
    if faults:
        raise ConfigError(f"options of the {backend!r} backend: " + listed(faults, show=str, separator="; "))
    return values


def _unknown(name: object, known: Collection[str]) -> str:
    near = difflib.get_close_matches(named(name), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown option {quoted(name)}{hint}; accepted: {', '.join(known)}"


def switch(given: object) -> bool:
    """Read a truth value."""
    if not isinstance(given, bool):
        raise ConfigError("accepted: True or False")
    return given


def seconds(given: object) -> float:
    """Read a duration that is finite and not negative."""
    if not _is_duration(given):
        raise ConfigError("accepted: seconds, 0 or more")
    return float(given)


def count(most: int | None = None) -> Reader:
    """Return what reads an int from 1 to ``most``; ``None``: from 1 on."""
    accepted = "an int above 0" if most is None else f"an int from 1 to {most}"

    def read(given: object) -> int:
        if not _is_int(given) or given < 1 or (most is not None and given > most):
            raise ConfigError(f"accepted: {accepted}")
        return given

    return read


def size(most: str, example: str) -> Reader:
    """Return what reads a number of bytes from 1 to ``most``, from an int or a text such as ``example``."""
    most_bytes = parse_bytes(most)

    def read(given: object) -> int:
        if isinstance(given, int | str) and not isinstance(given, bool):
            nbytes = parse_bytes(given)
            if 0 < nbytes <= most_bytes:
                return nbytes
        raise ConfigError(f"accepted: a size from 1 to {most}, in bytes or as text such as {example!r}")

    return read
