"""Plain values with one of them wrong or gone: what hostile files are made of."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import strategies as st

WRONG: tuple[object, ...] = (
    *(None, True, -1, 0, 1.5, 2**63, 10**400, "x", "", [], {}, [[]], [-1], ["x"], {"a": -1}),
    *(float("nan"), float("inf"), -0.5, 10**6),
)


def damaged(document: dict[str, object], data: st.DataObject) -> dict[str, object]:
    """Return plain values in which one, anywhere, is another or is left out."""
    found: Any = copy.deepcopy(document)
    *way, last = data.draw(st.sampled_from([path for path in _paths(found) if path]))
    inner = found
    for name in way:
        inner = inner[name]
    if data.draw(st.booleans()):
        inner[last] = data.draw(st.sampled_from(WRONG))
    else:
        del inner[last]
    return dict(found)


def _paths(value: object, path: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
    """Return the way to everything in plain values."""
    found = [path]
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, each in pairs:
            found += _paths(each, (*path, name))
    return found
