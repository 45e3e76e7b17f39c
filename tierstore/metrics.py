"""Statistics as plain numbers under stable names: what ``metrics()`` of runs and stores returns.

1. Every number of the statistics is here, and nothing else: texts, and what is ``None``, are left out.
2. A name is such as Prometheus asks for: what it is of, the field, its unit (``_bytes``, ``_seconds``), and
   ``_total`` if it only grows.  Which do, `tierstore.metrics_catalogue.CATALOGUE` says; a field that it does
   not know, such as one of somebody's backend, may go up and down.
3. What there are several of (tiers, directions, tables, drives) is told apart by labels.
"""

from __future__ import annotations

import dataclasses
import functools
import numbers
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tierstore.metrics_catalogue import CATALOGUE
from tierstore.stats import StoreStats

Number = int | float
Labels = tuple[tuple[str, str], ...]

_SECTIONS: Final = {
    ("run", "store"): "store",
    ("run", "activations"): "swap",
    ("run", "recompute"): "recompute",
    ("tier", "wrappers"): "tier",  # each by its own name
}
"""What parts of statistics are called where it is not as their field."""

_MANY: Final[Mapping[tuple[str, str], tuple[str, tuple[str, ...]]]] = {
    ("store", "tiers"): ("tier", ("tier",)),
    ("store", "traffic"): ("traffic", ("source", "target")),
    ("run", "tables"): ("table", ("table",)),
    ("tier_io", "drives"): ("tier_io_drive", ("drive",)),
}
"""What there are several of, and the labels that tell them apart."""

_FIELDS: Final = {
    "nbytes": "bytes",
    "bytes_to_device": "to_device_bytes",
    "bytes_to_host": "to_host_bytes",
    "page_bytes_read": "page_read_bytes",
    "page_bytes_written": "page_written_bytes",
    "row_bytes_missed": "row_missed_bytes",
}
"""Fields whose unit is not at their end."""

_COUNTER: Final = "total"
_NOT_IN_NAMES: Final = re.compile(r"[^a-zA-Z0-9_]")
_LABEL: Final = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_ESCAPE: Final = re.compile(r"\\(.)")
_ESCAPED: Final = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Sample:
    """One number.

    Attributes:
        name: what it is.
        labels: names and values of what tells it from others of its name.
        value: an ``int`` where the statistics have one, also for what is true or false.
    """

    name: str
    labels: Labels
    value: Number

    @property
    def is_counter(self) -> bool:
        """Whether it only grows."""
        return is_counter(self.name)

    @property
    def text(self) -> str:
        """Name and labels in one, as Prometheus writes them: ``tierstore_tier_hits_total{tier="host"}``."""
        if not self.labels:
            return self.name
        inside = ",".join(f'{name}="{value.translate(_ESCAPED)}"' for name, value in self.labels)
        return f"{self.name}{{{inside}}}"


def samples(stats: object) -> list[Sample]:
    """Return every number of what ``stats()`` of a run or of a store has returned.

    Args:
        stats: a `StoreStats`, or the ``RunStats`` of `tierstore.training.Offload.stats`.
    """
    return list(_walk("store" if isinstance(stats, StoreStats) else "run", stats, ()))


def as_metrics(stats: object) -> dict[str, Number]:
    """Return `samples` as a mapping of `Sample.text` to the value."""
    return {sample.text: sample.value for sample in samples(stats)}


def is_counter(name: str) -> bool:
    """Whether a metric of a name only grows."""
    return name.rpartition("_")[2] == _COUNTER


def parsed(text: str) -> tuple[str, dict[str, str]]:
    """Return name and labels of a `Sample.text`."""
    name, _, inside = text.partition("{")
    found = _LABEL.findall(inside)
    return name, {
        label: _ESCAPE.sub(lambda each: "\n" if each[1] == "n" else each[1], value) for label, value in found
    }


def _walk(section: str, part: object, labels: Labels) -> Iterator[Sample]:
    for field, value in _items(part):
        if (section, field) in _MANY:
            inner, names = _MANY[section, field]
            for key, each in _each(value):
                yield from _walk(inner, each, (*labels, *zip(names, key, strict=True)))
        elif isinstance(value, numbers.Real):
            yield Sample(_name(section, field), labels, _plain(value))
        elif isinstance(value, Mapping) or dataclasses.is_dataclass(value):
            yield from _walk(_SECTIONS.get((section, field), f"{section}_{field}"), value, labels)


def _items(part: object) -> Iterator[tuple[str, object]]:
    if isinstance(part, Mapping):
        yield from ((str(name), value) for name, value in part.items())
    elif dataclasses.is_dataclass(part):
        yield from ((field.name, getattr(part, field.name)) for field in dataclasses.fields(part))


def _each(value: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield parts of which there are several, each with what tells it apart."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield (tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)), each
    elif isinstance(value, tuple | list):
        yield from (((str(number),), each) for number, each in enumerate(value))


def _plain(value: numbers.Real) -> Number:
    return int(value) if isinstance(value, numbers.Integral) else float(value)


@functools.lru_cache(1024)
def _name(section: str, field: str) -> str:
    field = _FIELDS.get(field, field)
    field = re.sub(r"(?<=_)s$", "seconds", re.sub(r"(?<=per_)s$", "second", field))
    name = _NOT_IN_NAMES.sub("_", f"tierstore_{section}_{field}")
    counter = "_".join((name, _COUNTER))
    return counter if counter in CATALOGUE else name
