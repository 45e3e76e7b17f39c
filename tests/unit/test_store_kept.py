"""Two moments in one directory: what a flush keeps is found by whoever opens it again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import tierstore as ts
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import CapacityError

BYTES = 64 * 1024


def opened(path: Path, capacity_bytes: int = 32 * BYTES) -> ts.Store:
    disk = TierConfig("disk", "files", capacity_bytes, options={"path": str(path), "durable": True})
    return ts.Store(StoreConfig([TierConfig("host", "memory", 8 * BYTES), disk]))


def filled(value: int) -> torch.Tensor:
    return torch.full((BYTES,), value, dtype=torch.uint8)


def values_in(store: ts.Store) -> dict[str, int]:
    return {key: int(store.get(key)[0]) for key in store}


def two_moments(path: Path) -> ts.Store:
    store = opened(path)
    for key, value in (("changes", 1), ("stays", 2), ("goes", 3)):
        store.put(key, filled(value))
    store.flush()
    store.put("changes", filled(4), replace=True)
    store.drop("goes")
    store.put("comes", filled(5))
    store.flush("changes", "stays", "comes", keep="old/")
    return store


def test_both_moments_are_found_again(tmp_path: Path) -> None:
    store = two_moments(tmp_path)
    assert sorted(store) == ["changes", "comes", "stays"]
    store.put("changes", filled(6), replace=True)
    store.close(flush=False)
    with opened(tmp_path) as store:
        expected = {"changes": 4, "stays": 2, "comes": 5, "old/changes": 1, "old/goes": 3}
        assert values_in(store) == expected
        store.rename({"old/changes": "changes", "old/goes": "goes"}, replace=True)
        store.drop("comes")
        store.flush()
    with opened(tmp_path) as store:
        assert values_in(store) == {"changes": 1, "stays": 2, "goes": 3}


def test_what_was_released_is_not_found_again_and_takes_no_room(tmp_path: Path) -> None:
    store = two_moments(tmp_path)
    held = store.stats().tiers["disk"].charged_bytes
    store.put("note", filled(7))
    store.flush("note", release="old/")
    assert store.stats().tiers["disk"].charged_bytes == held - BYTES
    store.close(flush=False)
    with opened(tmp_path) as store:
        assert values_in(store) == {"changes": 4, "stays": 2, "comes": 5, "note": 7}


def test_without_room_for_two_moments_the_former_is_unharmed(tmp_path: Path) -> None:
    store = opened(tmp_path, 3 * BYTES)
    store.put("k", filled(1))
    store.flush()
    for value in (2, 3):
        store.put("k", filled(value), replace=True)
        if value == 2:
            store.flush("k", keep="old/")
    store.flush("k", keep="old/")
    for key in ("some", "more"):
        store.put(key, filled(4))
    with pytest.raises(CapacityError):
        store.flush("some", "more")
    store.close(flush=False)
    with opened(tmp_path) as store:
        assert values_in(store) == {"k": 3, "old/k": 1}
