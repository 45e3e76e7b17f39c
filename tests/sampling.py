"""What CI tries of large grids: a part, the same one each time.  `make test` by itself tries all."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable
from typing import TypeVar

import pytest

Case = TypeVar("Case")

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "default")
IS_CI = PROFILE == "ci"

too_long_for_ci = pytest.mark.skipif(IS_CI, reason="it takes long, and CI tries the like of it elsewhere")
"""For tests of half a minute: `make test` by itself runs them."""


def tried(
    cases: Iterable[Case], *, always: int = 2, of: int = 6, name: Callable[[Case], str] = str
) -> list[Case]:
    """Return the cases to try, in their order: a few, and one of so many of the rest.

    Which ones is decided by a checksum of their names.  All of them, where it is not CI that tries.

    Args:
        cases: all there are.
        always: how many are tried of however many.
        of: of so many others, one is tried: of fewer none.
        name: says what a case is called.
    """
    every = list(cases)
    if not IS_CI:
        return every
    by_checksum = sorted(range(len(every)), key=lambda n: zlib.crc32(name(every[n]).encode()))
    return [every[n] for n in sorted([*by_checksum[:always], *by_checksum[always + of - 1 :: of]])]
