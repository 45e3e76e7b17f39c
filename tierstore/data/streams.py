"""What a loader has been asked for and nobody has been given: kept, so that who goes on loses nothing.

1. Each time that a loader is iterated anew, it begins anew.
2. An iterator (what ``iter`` returns as it is: a generator, say) goes on where it was: whoever reads it
   through here again is given first what was asked for ahead.
3. Nothing here keeps an iterator alive that can be referred to weakly; another one is let go of when the next
   one comes and nobody else has it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from typing import Any, Final
from weakref import WeakKeyDictionary

_ONLY_OURS: Final = 3
"""References to an iterator that nobody has: that of its place, of the loop over places, and of the call."""

_weakly: WeakKeyDictionary[Iterator[Any], deque[Any]] = WeakKeyDictionary()
_strongly: list[tuple[Iterator[Any], deque[Any]]] = []


def due_of(loader: object, batches: Iterator[Any]) -> deque[Any]:
    """Return what a loader was asked for ahead and is still to be handed out.

    Args:
        loader: that is iterated.
        batches: ``iter(loader)``.
    """
    if batches is not loader:
        return deque()
    try:
        return _weakly.setdefault(batches, deque())
    except TypeError:  # no weak reference to it can be made
        return _kept_strongly(batches)


def _kept_strongly(batches: Iterator[Any]) -> deque[Any]:
    known = [due for kept, due in _strongly if kept is batches]
    if known:
        return known[0]
    _strongly[:] = [(kept, due) for kept, due in _strongly if due and sys.getrefcount(kept) > _ONLY_OURS]
    due: deque[Any] = deque()
    _strongly.append((batches, due))
    return due


def waiting_iterators() -> int:
    """How many iterators are kept alive here, as no weak reference to them can be made."""
    return len(_strongly)
