"""Checks of one value each, and a place to gather what they find.

A check takes a value as it was written and returns it as it is kept, or raises `ConfigError`
saying what is accepted.  It knows neither the key nor the other values.
"""

from __future__ import annotations

import difflib
import itertools
import math
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from tierstore.errors import ConfigError
from tierstore.quoting import named, quoted, shortened
from tierstore.units import parse_bytes

Check = Callable[[object], object]

TARGETS = ("cpu", "disk")
CODECS = ("none", "lz4")
ENGINE_WITHOUT_AIO = "plain"
ENGINES = ("threads", "io_uring", "aiofiles", ENGINE_WITHOUT_AIO)

LARGEST_INT = 2**63 - 1
"""The largest number that a configuration may give: what the system calls below can express."""

_MOST_FAULTS = 32  # the most that one error tells; whoever has more reads no further
_REASON_CHARS = 2000
_MOST_PATHS = 256
_NEAR_CHARS = 64  # no key is as long
_DEVICE = re.compile(r"[a-z_]{1,64}(:[0-9]{1,9})?", re.ASCII)
_BACKEND_MEMBERS = ("capabilities", "reserve", "read", "write", "free", "resize", "close")


class Faults:
    """Gathers everything that is wrong with one configuration, so that one error can say all of it."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lines: list[str] = []
        self._count = 0

    def add(self, key: object, value: object, accepted: str) -> None:
        """Note that ``key`` cannot be ``value``, and what it could be."""
        self._count += 1
        if not self.is_full:
            self._lines.append(f"{named(key)}={quoted(value)}: {shortened(accepted, _REASON_CHARS)}")

    def add_unknown(self, key: object, value: object, known: Sequence[str]) -> None:
        """Note that there is no such key, and which of the ``known`` ones may have been meant."""
        meant = () if self.is_full else near(key, known)
        hint = f"did you mean {meant[0]!r}?" if meant else f"accepted: {', '.join(known)}"
        self.add(key, value, f"unknown key; {hint}")

    @property
    def is_full(self) -> bool:
        """Whether further faults are only counted."""
        return len(self._lines) >= _MOST_FAULTS

    def checked(self, values: Mapping[str, object], checks: Mapping[str, Check]) -> dict[str, object]:
        """Return those ``values`` that pass their check, as they are kept; note the others."""
        kept: dict[str, object] = {}
        for key, check in checks.items():
            try:
                kept[key] = check(values[key])
            except ConfigError as fault:
                self.add(key, values[key], str(fault))
        return kept

    def raise_if_any(self) -> None:
        """Raise one `ConfigError` that lists every fault noted."""
        if self._lines:
            head = f"{self._owner}: {self._count} fault{'s' if self._count > 1 else ''}"
            more = self._count - len(self._lines)
            raise ConfigError("\n  ".join([head, *self._lines, *[f"and {more} more"] * bool(more)]))


def near(key: object, known: Sequence[str], *, cutoff: float = 0.6) -> list[str]:
    """Return which of the ``known`` names may have been meant: one, or none."""
    if not isinstance(key, str) or len(key) > _NEAR_CHARS:
        return []
    return difflib.get_close_matches(key, known, n=1, cutoff=cutoff)


def flag(value: object) -> bool:
    """Accept a bool."""
    if not isinstance(value, bool):
        raise ConfigError("accepted: true or false")
    return value


def whole(value: object) -> int | None:
    """Return an int, or an integral number of another kind, as an int; ``None``: it is none, or too large.

    A bool is none.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        return None
    number = int(value)
    return number if abs(number) <= LARGEST_INT else None


def positive_int(value: object) -> int:
    """Accept an int greater than 0; a bool is none."""
    number = whole(value)
    if number is None or number <= 0:
        raise ConfigError("accepted: an int greater than 0")
    return number


def ratio(value: object) -> float:
    """Accept a share: 0 < x <= 1.  The int 1 is one; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < _as_float(value) <= 1:
        raise ConfigError("accepted: a number greater than 0 and at most 1")
    return float(value)


def _as_float(value: numbers.Real) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def size(value: object) -> int:
    """Accept a size and return its bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError("accepted: a size, as an int of bytes or as text such as '1.5GiB'")
    nbytes = parse_bytes(value)
    if nbytes > LARGEST_INT:
        raise ConfigError(f"accepted: a size of at most {LARGEST_INT} bytes")
    return nbytes


def positive_size(value: object) -> int:
    """Accept a size greater than 0 and return its bytes."""
    nbytes = size(value)
    if nbytes == 0:
        raise ConfigError("accepted: a size greater than 0")
    return nbytes


def optional(check: Check) -> Check:
    """Return a check that accepts ``None`` too."""
    return lambda value: None if value is None else check(value)


def one_of(*choices: str) -> Check:
    """Return a check that accepts the ``choices`` exactly as they are written."""

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise ConfigError(f"accepted: {', '.join(map(repr, choices))}")
        return value

    return check


eviction = one_of("lru", "size-class", "next-use")
"""Accept the name of an eviction policy."""


def codec(value: object) -> str | None:
    """Accept the name of a codec; ``None`` and ``"none"`` are no codec."""
    if value is None or value == "none":
        return None
    if not isinstance(value, str) or value not in CODECS:
        raise ConfigError(f"{_hint(value, CODECS)}accepted: {', '.join(map(repr, CODECS))}, or None")
    return value


def aio_engine(value: object) -> str:
    """Accept the name of an engine that moves the bytes of files."""
    if not isinstance(value, str) or value not in ENGINES:
        raise ConfigError(
            f"{_hint(value, ENGINES)}accepted: {', '.join(map(repr, ENGINES))}, or None: what measured best"
        )
    return value


def _hint(value: object, known: Sequence[str]) -> str:
    """Ask whether a near one of the ``known`` was meant, if there is one."""
    meant = near(value.lower() if isinstance(value, str) else value, known)
    return f"did you mean {meant[0]!r}? " if meant else ""


def target(value: object) -> str:
    """Accept ``"cpu"`` or ``"disk"`` in any case, and return it in lower case."""
    if not isinstance(value, str) or value.lower() not in TARGETS:
        raise ConfigError("accepted: 'cpu' or 'disk' (in any case), or None")
    return value.lower()


def directory(value: object) -> str:
    """Accept the path of a directory, there or not, and return it as text."""
    if not isinstance(value, str | PurePath) or not str(value) or not _is_path(str(value)):
        raise ConfigError("accepted: the path of a directory, which need not exist")
    return str(value)


def _is_path(text: str) -> bool:
    """Say whether a file could be called so."""
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:
        return False


def directories(value: object) -> str | tuple[str, ...]:
    """Accept the path of a directory, or a list of different ones, none inside another."""
    if not isinstance(value, list | tuple):
        return directory(value)
    if not 0 < len(value) <= _MOST_PATHS:
        raise ConfigError(f"accepted: the path of a directory, or a list of 1 to {_MOST_PATHS}")
    paths = tuple(directory(each) for each in value)
    places = [(path, PurePath(os.path.normpath(Path(path).absolute()))) for path in paths]
    for (one, where), (other, there) in itertools.permutations(places, 2):
        if there.is_relative_to(where):
            what = "the same directory as" if there == where else "inside"
            raise ConfigError(
                f"accepted: directories on different drives; {quoted(other)} is {what} {quoted(one)}"
            )
    return paths


def name(value: object) -> str:
    """Accept text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError("accepted: a name, as text that is not empty")
    return value


def texts(value: object) -> tuple[str, ...]:
    """Accept a list of texts that are not empty."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and each for each in value):
        raise ConfigError("accepted: a list of patterns, each a text that is not empty")
    return tuple(value)


def device(value: object) -> str:
    """Accept the name of a device (or a ``torch.device``, which prints as its name)."""
    is_torch_device = type(value).__module__ == "torch" and type(value).__name__ == "device"
    text = str(value) if is_torch_device else value
    if not isinstance(text, str) or _DEVICE.fullmatch(text) is None:
        raise ConfigError(
            "accepted: a torch accelerator such as 'cuda' or 'cuda:1', 'emulated' or 'cpu'; "
            "None: the accelerator if there is one, else 'cpu'"
        )
    return text


def options(value: object) -> dict[str, object]:
    """Accept a mapping from names, and return a copy."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError("accepted: a mapping of option names to values")
    return dict(value)


def placement(value: object) -> dict[str, object]:
    """Accept a mapping from texts, and return a copy."""
    if isinstance(value, Mapping) and (others := [key for key in value if not isinstance(key, str)]):
        named = ", ".join(f"{key!r}" for key in others[:3])
        raise ConfigError(
            f"accepted: texts, as patterns of module names and the parts of a placement are; not {named}. In "
            f"YAML a number wants quotes: '{others[0]}': cpu"
        )
    if not isinstance(value, Mapping):
        raise ConfigError("accepted: patterns of module names, each with cpu or device; or a whole placement")
    return dict(value)


def backend(value: object) -> object:
    """Accept the name of a backend, or an object that has a backend's members."""
    if isinstance(value, str) and value:
        return value
    lacking = [member for member in _BACKEND_MEMBERS if not hasattr(value, member)]
    if lacking or isinstance(value, type):
        hint = f" (it has no {', '.join(lacking)})" if lacking else " (it is a class)"
        raise ConfigError(f"accepted: the name of a backend, or an instance of one{hint}")
    return value
