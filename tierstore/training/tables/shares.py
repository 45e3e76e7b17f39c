"""How much of the host tier the frames of tables take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from tierstore.errors import CapacityError
from tierstore.training.bundles.working_sets import WorkingSet
from tierstore.units import KIB, align_up, format_bytes

LEAST_BYTES = 64 * KIB
"""What a table has at least, unless all of it is smaller."""
_PAGE_BYTES = 4096
_LEFT_SHARE = 4
"""One part in so many of what is left is for what comes and goes, such as values that cross."""


def shares(
    tables: Mapping[str, int],
    sets: Sequence[WorkingSet],
    capacity_bytes: int,
    setting: str,
    given: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, int]:
    """Return the bytes of frames that each table gets: what it is given, or a part of the rest.

    All tables whole, if there is room for them beside all else that is offloaded and a quarter of the rest.
    If not, what these leave, or half of what the largest bundle leaves, whichever is more.  Of that all get
    the same, and those that are smaller leave what they do not need to the others: batches name rows of all
    tables, so narrow rows, and tables of few, are used most often a byte.

    Args:
        tables: bytes of all rows with their state, by name.
        sets: what else is offloaded.
        capacity_bytes: of the host tier.
        setting: what messages tell to raise.
        given: bytes of frames of some tables.

    Raises:
        CapacityError: the largest bundle does not leave what tables are given, or the least that they have.
    """
    if not tables:
        return {}
    given = {name: align_up(nbytes, _PAGE_BYTES) for name, nbytes in given.items()}
    if given:
        _require(len(given), sum(given.values()), sets, capacity_bytes, setting)
    rest = {name: nbytes for name, nbytes in tables.items() if name not in given}
    capacity_bytes -= sum(given.values())
    divided = _divided(rest, sets, capacity_bytes, setting) if rest else {}
    return {name: given[name] if name in given else divided[name] for name in tables}


def _divided(
    tables: Mapping[str, int], sets: Sequence[WorkingSet], capacity_bytes: int, setting: str
) -> dict[str, int]:
    wholes = {name: align_up(nbytes, _PAGE_BYTES) for name, nbytes in tables.items()}
    least = {name: min(nbytes, LEAST_BYTES) for name, nbytes in wholes.items()}
    needed_bytes, total_bytes = sum(least.values()), sum(wholes.values())
    needs = [_in_pages(each) for each in sets]
    beside_largest = _require(len(tables), needed_bytes, sets, capacity_bytes, setting)
    left_bytes = capacity_bytes - sum(needs)
    room_bytes = max(left_bytes - left_bytes // _LEFT_SHARE, beside_largest // 2, needed_bytes)
    if total_bytes <= room_bytes:
        return wholes
    given: dict[str, int] = {}
    for left, (name, nbytes) in zip(
        range(len(wholes), 0, -1), sorted(wholes.items(), key=lambda each: each[1]), strict=True
    ):
        same = room_bytes // left // _PAGE_BYTES * _PAGE_BYTES
        given[name] = max(least[name], min(nbytes, same))
        room_bytes -= given[name]
    return {name: given[name] for name in tables}


def _require(
    count: int, needed_bytes: int, sets: Sequence[WorkingSet], capacity_bytes: int, setting: str
) -> int:
    """Return what the largest bundle leaves, which is enough."""
    beside_largest = capacity_bytes - max(map(_in_pages, sets), default=0)
    if needed_bytes > beside_largest:
        raise CapacityError(
            f"{count} tables need at least {format_bytes(needed_bytes)} of host memory, and beside the "
            f"largest bundle there are {format_bytes(max(0, beside_largest))}. Raise {setting}.",
            needed_bytes=needed_bytes,
            free_bytes=max(0, beside_largest),
        )
    return beside_largest


def _in_pages(needed: WorkingSet) -> int:
    """Return what a bundle takes of host memory: each of its pieces begins on a page, as do frames around."""
    pieces = 2 + len(needed.gradients)
    return needed.nbytes + (pieces + 1) * _PAGE_BYTES
