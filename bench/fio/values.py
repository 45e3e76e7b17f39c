"""Values as fio writes them: sizes, times, shares, pairs, mixes.

Each reader takes the text after ``key=`` and returns the value, or raises `ValueFaultError` that says what is
accepted.  fio reads as far as it understands and drops the rest (``4q`` is 4, ``1.5m`` is 1): here that
is a fault, and so is what fio 3.33 reads as something else than it says.  Knows nothing of which keys
there are.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

_SIZE = re.compile(r"(?P<number>0x[0-9a-f]+|[0-9]+)(?P<unit>[kmgtp]?)(?P<tail>i?b?)", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5}
_TIME = re.compile(r"(?P<number>[0-9]+)(?P<unit>d|h|m|s|ms|msec|us|usec|)", re.IGNORECASE)
_SECONDS = {"d": 86400.0, "h": 3600.0, "m": 60.0, "s": 1.0, "": 1.0}
_SECONDS |= {"ms": 1e-3, "msec": 1e-3, "us": 1e-6, "usec": 1e-6}


class ValueFaultError(ValueError):
    """A value that a key cannot have.  The message says what is accepted."""


def size(text: str) -> int:
    """Read a number of bytes: ``k``, ``m``, ``g``, ``t``, ``p``, also with ``b``, are powers of 1024.

    ``kib`` and the like are refused: with its default ``kb_base`` fio reads them as powers of 1000.
    """
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueFaultError("accepted: a whole number of bytes, or with k, m, g, t or p for powers of 1024")
    unit, tail = match["unit"].lower(), match["tail"].lower()
    if tail == "ib":
        letter = unit or "k"
        raise ValueFaultError(
            f"fio reads {letter}ib as a power of 1000; accepted: {letter} for a power of 1024, or the bytes"
        )
    if tail == "i" and not unit:
        raise ValueFaultError("accepted: a number of bytes, with k, m, g, t or p for powers of 1024")
    base = 16 if match["number"].lower().startswith("0x") else 10
    factor: int = 1024 ** _POWERS[unit]
    return int(match["number"], base) * factor


def positive_size(text: str) -> int:
    """Read a size above 0."""
    if (nbytes := size(text)) == 0:
        raise ValueFaultError("accepted: a size above 0")
    return nbytes


def print_size(nbytes: int) -> str:
    """Write a size so that `size` reads it back, with the largest unit that divides it."""
    for unit, power in reversed(_POWERS.items()):
        if power and nbytes and nbytes % 1024**power == 0:
            return f"{nbytes // 1024**power}{unit}"
    return str(nbytes)


def seconds(text: str) -> float:
    """Read a time: seconds, or with d, h, m, s, ms or us."""
    match = _TIME.fullmatch(text)
    if match is None:
        raise ValueFaultError("accepted: whole seconds, or a whole number with d, h, m, s, ms or us: 500ms")
    return int(match["number"]) * _SECONDS[match["unit"].lower()]


def count(text: str) -> int:
    """Read an int above 0."""
    if (number := size(text)) == 0:
        raise ValueFaultError("accepted: an int above 0")
    return number


def percent(text: str) -> int:
    """Read an int from 0 to 100."""
    if not re.fullmatch(r"[0-9]{1,3}%?", text) or int(text.rstrip("%")) > 100:
        raise ValueFaultError("accepted: an int from 0 to 100")
    return int(text.rstrip("%"))


def flag(text: str) -> bool:
    """Read 0 or 1; the key alone is 1."""
    if text not in {"", "0", "1"}:
        raise ValueFaultError("accepted: 0, 1, or the key alone, which is 1")
    return text != "0"


def word(text: str) -> str:
    """Read any text but none."""
    if not text:
        raise ValueFaultError("accepted: text")
    return text


def one_of(*words: str) -> Callable[[str], str]:
    """Return a reader of one of ``words``."""

    def read(text: str) -> str:
        if text not in words:
            raise ValueFaultError(f"accepted: {', '.join(words)}")
        return text

    return read


# ---------------------------------------------------------------------- amounts


@dataclass(frozen=True, slots=True)
class Amount:
    """So many bytes, or so many hundredths of something that is known later."""

    nbytes: int = 0
    percent: int | None = None

    def of(self, whole_bytes: int) -> int:
        """Return the bytes, where 100 % is ``whole_bytes``."""
        return self.nbytes if self.percent is None else whole_bytes * self.percent // 100

    def __str__(self) -> str:
        """Write it as `amount` reads it."""
        return print_size(self.nbytes) if self.percent is None else f"{self.percent}%"


def amount(text: str) -> Amount:
    """Read a size or a percentage, which may be above 100."""
    if text.endswith("%"):
        if not re.fullmatch(r"[0-9]{1,6}%", text):
            raise ValueFaultError("accepted: a size, or whole percents: 50%")
        return Amount(percent=int(text[:-1]))
    return Amount(nbytes=size(text))


# ---------------------------------------------------------------------- one for reads, one for writes


@dataclass(frozen=True, slots=True)
class Pair(Generic[T]):
    """What holds for reads and what holds for writes."""

    read: T
    write: T


def pair(reader: Callable[[str], T]) -> Callable[[str], Pair[T]]:
    """Return a reader of ``both`` or of ``read,write``."""

    def read(text: str) -> Pair[T]:
        first, comma, second = text.partition(",")
        if "," in second:
            raise ValueFaultError("accepted: one value, or two for reads and writes: there is no third, trim")
        for_reads = reader(first)
        return Pair(for_reads, reader(second) if comma else for_reads)

    return read


# ---------------------------------------------------------------------- block sizes


@dataclass(frozen=True, slots=True)
class Mix:
    """Block sizes with their percentages, which sum to 100."""

    parts: tuple[tuple[int, float], ...]

    @property
    def is_single(self) -> bool:
        """Whether there is one block size only."""
        return len(self.parts) == 1

    @property
    def smallest(self) -> int:
        """The fewest bytes of a block."""
        return min(nbytes for nbytes, _ in self.parts)

    @property
    def largest(self) -> int:
        """The most bytes of a block."""
        return max(nbytes for nbytes, _ in self.parts)


def block(text: str) -> Mix:
    """Read one block size."""
    return Mix(((positive_size(text), 100.0),))


def block_range(text: str) -> Mix:
    """Read ``low-high``: every multiple of ``low`` up to ``high``, equally often."""
    low_text, separator, high_text = text.replace(":", "-").partition("-")
    if not separator:
        raise ValueFaultError("accepted: the smallest and the largest block size: 4k-64k")
    low, high = sorted((positive_size(low_text), positive_size(high_text)))
    sizes = range(low, high + 1, low)
    return Mix(tuple((nbytes, 100.0 / len(sizes)) for nbytes in sizes))


def block_split(text: str) -> Mix:
    """Read ``4k/10:64k/90``: block sizes with percentages; those left empty share what remains."""
    entries = [entry.partition("/") for entry in text.split(":")]
    given = [(positive_size(nbytes), percent(share) if share else None) for nbytes, _, share in entries]
    stated = sum(share for _, share in given if share is not None)
    open_count = sum(share is None for _, share in given)
    if stated > 100 or (stated < 100 and not open_count):
        raise ValueFaultError(f"the percentages sum to {stated}; accepted: 100")
    rest = (100 - stated) / open_count if open_count else 0.0
    return Mix(tuple((nbytes, rest if share is None else float(share)) for nbytes, share in given))


# ---------------------------------------------------------------------- where random I/O goes


class Shape(enum.Enum):
    """How often each block is chosen."""

    UNIFORM = "random"
    ZIPF = "zipf"
    PARETO = "pareto"
    NORMAL = "normal"


_DEFAULT_PARAMETER = {Shape.UNIFORM: 0.0, Shape.ZIPF: 1.1, Shape.PARETO: 0.2}


@dataclass(frozen=True, slots=True)
class Spreading:
    """A random distribution: its shape, and theta, power or deviation."""

    shape: Shape = Shape.UNIFORM
    parameter: float = 0.0

    def __str__(self) -> str:
        """Write it as `spreading` reads it."""
        return self.shape.value if self.shape is Shape.UNIFORM else f"{self.shape.value}:{self.parameter:g}"


def spreading(text: str) -> Spreading:
    """Read ``random``, ``zipf:theta``, ``pareto:power`` or ``normal:deviation``, as fio bounds them."""
    accepted = "accepted: random, zipf:THETA (not 1), pareto:POWER (0 to 1), normal:DEVIATION (0 to 100)"
    name, colon, rest = text.partition(":")
    shapes = {shape.value: shape for shape in Shape}
    if name not in shapes or (colon and name == "random"):
        raise ValueFaultError(accepted)
    shape = shapes[name]
    try:
        parameter = float(rest) if colon else _DEFAULT_PARAMETER[shape]
    except (ValueError, KeyError):
        raise ValueFaultError(accepted) from None
    bounds = {
        Shape.UNIFORM: parameter == 0,
        Shape.ZIPF: parameter > 0 and parameter != 1 and parameter < 1e6,
        Shape.PARETO: 0 < parameter < 1,
        Shape.NORMAL: 0 < parameter <= 100,
    }
    if not bounds[shape]:
        raise ValueFaultError(accepted)
    return Spreading(shape, parameter)
