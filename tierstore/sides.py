"""Which storages are the host's and which the device's, where an emulated device has memory of the same kind.

On hardware a tensor says where it is.  Beside an emulated device all say ``cpu``: there a storage's side
follows from what it was made of, as it does on hardware.

1. A side is noted of what the store lends, and of what crosses from one side to the other.
2. What an operator makes of what is on the host, and of nothing that is on the device, is on the host.
   Whoever sees operators asks `side_of_result`.
3. Of everything else nothing is known: fresh tensors, a loader's batch.  It counts as the device's, and goes
   with either.

A storage is told by the object, never by an address, as long as it lives.  From any thread.
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable, Iterable

import torch


class Side(enum.Enum):
    """Where memory is."""

    HOST = enum.auto()
    DEVICE = enum.auto()


class _SidedStorage(weakref.ref[torch.UntypedStorage]):
    """A live storage, and where it is."""

    __slots__ = ("key", "side")

    key: int
    side: Side


_known: dict[int, _SidedStorage] = {}


def note(storage: torch.UntypedStorage, side: Side) -> None:
    """Take in where a storage is."""
    known = _SidedStorage(storage, _forget)
    known.key, known.side = id(storage), side
    _known[known.key] = known


def side_of(storage: torch.UntypedStorage) -> Side | None:
    """Return where a storage is; ``None``: nobody has said."""
    known = _known.get(id(storage))
    return known.side if known is not None and known() is storage else None


def side_of_result(given: Iterable[torch.UntypedStorage]) -> Side | None:
    """Return where an operator's result is that was given these; ``None``: nobody has said."""
    sides = {side_of(each) for each in given} if _known else set()
    if Side.DEVICE in sides:
        return Side.DEVICE
    return Side.HOST if Side.HOST in sides else None


allocation_listeners: list[Callable[[torch.UntypedStorage], None]] = []
"""Whoever wants to know of memory that the library allocates for the program, out of sight of every mode."""


def note_allocation(storage: torch.UntypedStorage, side: Side) -> None:
    """Take in a storage that the library has allocated for the program; tell who wants to know.

    Raises:
        RuntimeError: one of them refuses it.
    """
    note(storage, side)
    for listener in tuple(allocation_listeners) if side is Side.DEVICE else ():
        listener(storage)


def _forget(known: weakref.ref[torch.UntypedStorage]) -> None:
    """A storage has died.  Runs anywhere: what a dictionary does to one key is one step."""
    assert isinstance(known, _SidedStorage)
    if _known.get(known.key) is known:
        del _known[known.key]
