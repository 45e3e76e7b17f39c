"""Directories of durable stores: what is changed in one is right, told, or refused.

An input is the choices of Hypothesis: which rows, texts and bytes of a directory are changed, and how.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz import Judge
from tests.property.test_hostile_manifests import CHANGES, Change, look_into, made_stores

SEEDS = {"nothing": b"", "something": bytes(range(256)), "ones": b"\x01" * 200, "large": b"\xff" * 400}
TOKENS = ()


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    stores = made_stores(directory)

    @given(st.lists(CHANGES, min_size=1, max_size=4), st.booleans(), st.booleans())
    def judge(changes: list[Change], is_crashed: bool, is_salvaged: bool) -> None:
        look_into(stores[is_crashed], changes, {"salvage": True} if is_salvaged else {})

    fuzz_one_input = judge.hypothesis.fuzz_one_input  # type: ignore[attr-defined]
    yield lambda content: fuzz_one_input(content) and None
