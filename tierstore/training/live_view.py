"""What ``tierstore top`` sees of a run."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Protocol

from tierstore.metrics import Number
from tierstore.store import Store

MOST_MOVING = 32
"""How many of the copies that are under way are told."""


class WatchedRun(Protocol):
    """A run, as this module sees it.

    Attributes:
        opened_by: which call made it.
    """

    opened_by: str

    @property
    def store(self) -> Store:
        """The store that everything is in."""
        ...

    def metrics(self) -> dict[str, Number]:
        """Return what it did so far."""
        ...


class RunView:
    """Looks at one run; see `tierstore.live.LiveView`.

    Args:
        run: which is not kept alive.
        name: of its model.
    """

    def __init__(self, run: WatchedRun, name: str) -> None:
        self._run = weakref.ref(run)
        self._name = name

    def look(self) -> Mapping[str, object] | None:
        """See `tierstore.live.LiveView.look`."""
        run = self._run()
        if run is None:
            return None
        store = run.store
        return {
            "name": self._name,
            "opened_by": run.opened_by,
            "paths": _paths(store),
            "metrics": run.metrics(),
            "moving": [asdict(each) for each in store.moving(MOST_MOVING)],
        }


def _paths(store: Store) -> list[str]:
    """Return the directories of a store's tiers, as whole paths."""
    found: list[str] = []
    for tier in store.config.tiers:
        path = tier.options.get("path")
        paths = path if isinstance(path, list | tuple) else [path]
        found += [str(Path(str(each)).absolute()) for each in paths if each is not None]
    return found
