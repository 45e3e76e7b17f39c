"""Backend names to backends, lazily, through the entry points of the group ``tierstore.backends``.

Knows no backend by name: an installed package that declares an entry point is enough.
A factory is loaded when its backend is opened, and not earlier.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Final

from tierstore.errors import BackendError, ConfigError, TierStoreError
from tierstore.quoting import named, quoted
from tierstore.spi import Backend, BackendFactory

GROUP = "tierstore.backends"

_found: Final[dict[str, EntryPoint]] = {}
"""By name: to look through all installed packages takes some 8 ms, and every tier of every store asks."""


def backend_names() -> tuple[str, ...]:
    """Return the names that `open_backend` takes, in alphabetical order."""
    return tuple(sorted(entry_points(group=GROUP).names))


def open_backend(name: str, *, capacity_bytes: int, options: Mapping[str, object]) -> Backend:
    """Open the backend that an entry point names.

    Raises:
        ConfigError: no such backend, or the factory refuses an option.
        BackendError: the backend cannot be loaded, or its medium cannot be used; cause attached.
    """
    factory = _load(_entry_point(name))
    try:
        return factory(capacity_bytes=capacity_bytes, options=options)
    except TierStoreError:
        raise
    except Exception as cause:
        given = quoted(dict(options))
        raise BackendError(
            f"backend {name!r} did not open ({capacity_bytes} bytes, options {given}): {cause!r}"
        ) from cause


def _entry_point(name: str) -> EntryPoint:
    if name not in _found:
        _found[name] = _search(name)
    return _found[name]


def _search(name: str) -> EntryPoint:
    found = entry_points(group=GROUP, name=name)
    if name in found.names:
        return found[name]
    known = backend_names()
    near = difflib.get_close_matches(named(name), known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"backend={quoted(name)}: no such backend; {hint}accepted: {', '.join(known) or 'nothing'} (from the "
        f"entry points in the group {GROUP!r} of the installed packages), or an instance of a backend"
    )


def _load(entry_point: EntryPoint) -> BackendFactory:
    try:
        factory: BackendFactory = entry_point.load()
    except (ImportError, AttributeError) as cause:
        raise BackendError(
            f"backend {entry_point.name!r} cannot be loaded from {entry_point.value!r}: {cause}"
        ) from cause
    return factory
