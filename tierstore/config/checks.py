"""Checks of one value each, and a place to gather what they find.

A check takes a value as it was written and returns it as it is kept, or raises `ConfigError`
saying what is accepted.  It knows neither the key nor the other values.
"""

from __future__ import annotations

import difflib
import itertools
import numbers
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePath

from tierstore.errors import ConfigError
from tierstore.units import parse_bytes

Check = Callable[[object], object]

TARGETS = ("cpu", "disk")
CODECS = ("none", "lz4")
ENGINE_WITHOUT_AIO = "plain"
ENGINES = ("threads", "io_uring", "aiofiles", ENGINE_WITHOUT_AIO)

_LARGEST_SIZE = 2**63 - 1  # what the system calls below can express
_SHOWN_CHARS = 120
_DEVICE = re.compile(r"[a-z_]+(:[0-9]+)?", re.ASCII)
_BACKEND_MEMBERS = ("capabilities", "reserve", "read", "write", "free", "resize", "close")


class Faults:
    """Gathers everything that is wrong with one configuration, so that one error can say all of it."""

    def __init__(self, owner: str) -> None:
        self._owner = owner
        self._lines: list[str] = []

    def add(self, key: object, value: object, accepted: str) -> None:
        """Note that ``key`` cannot be ``value``, and what it could be."""
        shown = repr(value)
        if len(shown) > _SHOWN_CHARS:
            shown = f"{shown[:_SHOWN_CHARS]}..."
        self._lines.append(f"{key}={shown}: {accepted}")

    def add_unknown(self, key: object, value: object, known: Sequence[str]) -> None:
        """Note that there is no such key, and which of the ``known`` ones may have been meant."""
        near = difflib.get_close_matches(str(key), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"accepted: {', '.join(known)}"
        self.add(key, value, f"unknown key; {hint}")

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
            count = len(self._lines)
            head = f"{self._owner}: {count} fault{'s' if count > 1 else ''}"
            raise ConfigError("\n  ".join([head, *self._lines]))


def flag(value: object) -> bool:
    """Accept a bool."""
    if not isinstance(value, bool):
        raise ConfigError("accepted: true or false")
    return value


def positive_int(value: object) -> int:
    """Accept an int greater than 0; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value <= 0:
        raise ConfigError("accepted: an int greater than 0")
    return int(value)


def ratio(value: object) -> float:
    """Accept a share: 0 < x <= 1.  The int 1 is one; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ConfigError("accepted: a number greater than 0 and at most 1")
    return float(value)


def size(value: object) -> int:
    """Accept a size and return its bytes."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigError("accepted: a size, as an int of bytes or as text such as '1.5GiB'")
    nbytes = parse_bytes(value)
    if nbytes > _LARGEST_SIZE:
        raise ConfigError(f"accepted: a size of at most {_LARGEST_SIZE} bytes")
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
    near = difflib.get_close_matches(str(value).lower(), known, n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def target(value: object) -> str:
    """Accept ``"cpu"`` or ``"disk"`` in any case, and return it in lower case."""
    if not isinstance(value, str) or value.lower() not in TARGETS:
        raise ConfigError("accepted: 'cpu' or 'disk' (in any case), or None")
    return value.lower()


def directory(value: object) -> str:
    """Accept the path of a directory, there or not, and return it as text."""
    if not isinstance(value, str | PurePath) or not str(value) or "\0" in str(value):
        raise ConfigError("accepted: the path of a directory, which need not exist")
    return str(value)


def directories(value: object) -> str | tuple[str, ...]:
    """Accept the path of a directory, or a list of different ones, none inside another."""
    if not isinstance(value, list | tuple):
        return directory(value)
    paths = tuple(directory(each) for each in value)
    if not paths:
        raise ConfigError("accepted: the path of a directory, or a list of at least one")
    for one, other in itertools.permutations(paths, 2):
        where, there = (PurePath(os.path.normpath(Path(path).absolute())) for path in (one, other))
        if there.is_relative_to(where):
            what = "the same directory as" if there == where else "inside"
            raise ConfigError(f"accepted: directories on different drives; {other!r} is {what} {one!r}")
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


def backend(value: object) -> object:
    """Accept the name of a backend, or an object that has a backend's members."""
    if isinstance(value, str) and value:
        return value
    lacking = [member for member in _BACKEND_MEMBERS if not hasattr(value, member)]
    if lacking or isinstance(value, type):
        hint = f" (it has no {', '.join(lacking)})" if lacking else " (it is a class)"
        raise ConfigError(f"accepted: the name of a backend, or an instance of one{hint}")
    return value
