"""Statistics with another number in each field: made from the classes, so that a new field is in them."""

from __future__ import annotations

import dataclasses
import itertools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from tierstore.stats import StoreStats, TierStats, Traffic
from tierstore.tables import RowStats
from tierstore.training.run_stats import RunStats
from tierstore.wrappers.bandwidth import BandwidthStats
from tierstore.wrappers.retrying import RetryStats
from tierstore_backends.files.io.io_stats import DriveStats, IoStats

Made = TypeVar("Made")


class Numbers:
    """Numbers that differ: whole ones, and halves for fields of floats."""

    def __init__(self) -> None:
        self._numbers = itertools.count(2)

    def next(self, kind: type) -> int | float:
        """Return the next one, as ``kind``."""
        number = next(self._numbers)
        return number + 0.5 if kind is float else number


def filled(kind: type[Made], numbers: Numbers, **given: object) -> Made:
    """Return an object of a dataclass of statistics with a number of its own in every field.

    Raises:
        AssertionError: a field has a type of which nobody knows how to fill it.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # type: ignore[arg-type]
    values = {each.name: given.get(each.name, ...) for each in fields}
    return kind(
        **{name: _value(hints[name], numbers) if value is ... else value for name, value in values.items()}
    )


def _value(hint: Any, numbers: Numbers) -> object:  # noqa: ANN401 - what typing has
    if isinstance(hint, types.UnionType):
        hint = next(each for each in hint.__args__ if each is not types.NoneType)
    if hint is bool:
        return True
    if hint in (int, float):
        return numbers.next(hint)
    if hint is str:
        return "a text"
    assert dataclasses.is_dataclass(hint), f"nobody knows how to fill {hint}"
    return filled(hint, numbers)  # type: ignore[arg-type]


def tier(numbers: Numbers, **more: object) -> TierStats:
    """Return a tier with a codec, files on two drives, and all that stands around a medium."""
    drives = tuple(filled(DriveStats, numbers) for _ in range(2))
    io = asdict(filled(IoStats, numbers, drives=drives))
    wrappers = {
        "bandwidth": asdict(filled(BandwidthStats, numbers)),
        "retries": asdict(filled(RetryStats, numbers)),
    }
    return filled(TierStats, numbers, io=io | more, wrappers=wrappers)


def store(numbers: Numbers, tiers: typing.Sequence[str] = ("device", "disk")) -> StoreStats:
    """Return the statistics of a store."""
    moved = {
        (source, target): filled(Traffic, numbers) for source, target in itertools.permutations(tiers, 2)
    }
    return filled(StoreStats, numbers, tiers={name: tier(numbers) for name in tiers}, traffic=moved)


def run(numbers: Numbers, tables: typing.Sequence[str] = ("users", "items")) -> RunStats:
    """Return the statistics of a run that does all that there is."""
    rows = {name: filled(RowStats, numbers) for name in tables}
    return filled(RunStats, numbers, store=store(numbers), tables=rows)


def leaves(value: object) -> Iterator[int | float]:
    """Yield every number in nested mappings and sequences."""
    if isinstance(value, Mapping):
        for each in value.values():
            yield from leaves(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from leaves(each)
    elif isinstance(value, int | float):
        yield value
