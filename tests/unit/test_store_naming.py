"""New bytes beside old ones, and names that change: the store's `split` and `rename`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tierstore as ts
from tests.stores import make_store, numbered


@pytest.fixture
def store() -> Iterator[ts.Store]:
    with make_store(300, 400, 5000) as store:
        store.put("k", numbered(1), tier="host")
        store.fetch("k").result(10)
        yield store


def test_new_bytes_are_written_beside_the_old_ones_and_take_their_place(store: ts.Store) -> None:
    with store.lease("k", write=True) as lease:
        assert lease.split({"k": "new"})
        lease.tensor.add_(1)
        assert torch.equal(store.get("k"), numbered(1))
    assert torch.equal(store.get("k"), numbered(1))
    store.rename({"new": "k"}, replace=True)
    assert torch.equal(store.get("k"), numbered(2))
    assert store.keys() == ("k",)


def test_what_was_split_off_can_be_forgotten(store: ts.Store) -> None:
    with store.lease("k", write=True) as lease:
        assert lease.split({"k": "new"})
        lease.tensor.zero_()
    store.drop("new")
    assert torch.equal(store.get("k"), numbered(1))


def test_both_keys_survive_being_evicted(store: ts.Store) -> None:
    with store.lease("k", write=True) as lease:
        lease.split({"k": "new"})
        lease.tensor.zero_()
    store.evict("k", "new", to="disk").result(10)
    assert torch.equal(store.get("k"), numbered(1))
    assert torch.equal(store.get("new"), numbered(0))


def test_a_split_without_a_second_replica_says_so_and_changes_nothing(store: ts.Store) -> None:
    store.put("single", numbered(2))
    with store.lease("k", "single", write=True) as lease:
        assert not lease.split({"k": "a", "single": "b"})
    assert set(store) == {"k", "single"}


def test_no_names_are_no_work(store: ts.Store) -> None:
    with store.lease("k", write=True) as lease:
        assert lease.split({})
    store.rename({})


def test_a_split_names_what_is_wrong_with_the_call(store: ts.Store) -> None:
    with store.lease("k", write=True) as lease:
        with pytest.raises(ts.UsageError, match="text"):
            lease.split({"k": 1})  # type: ignore[dict-item]
        with pytest.raises(ts.KeyNotFound, match="other"):
            lease.split({"other": "new"})
        with pytest.raises(ts.UsageError, match="another name"):
            lease.split({"k": "k"})
    with pytest.raises(ts.UsageError, match="released"):
        lease.split({"k": "new"})
    with store.lease("k") as reading, pytest.raises(ts.UsageError, match="for writing"):
        reading.split({"k": "new"})


def test_a_name_is_text(store: ts.Store) -> None:
    with pytest.raises(ts.UsageError, match="text"):
        store.rename({"k": None})  # type: ignore[dict-item]


def test_a_rename_names_what_is_in_its_way(store: ts.Store) -> None:
    store.put("other", numbered(2))
    with pytest.raises(ts.KeyExists, match="other"):
        store.rename({"k": "other"})
    with store.lease("other", tier="host"), pytest.raises(ts.LeaseError, match="other"):
        store.rename({"k": "other"}, replace=True)
    with pytest.raises(ts.KeyNotFound, match="nothing"):
        store.rename({"nothing": "k"}, replace=True)
    assert torch.equal(store.get("k"), numbered(1))
