"""The store's verbs, one rule a test."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import importlib.metadata
import json
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch

import tierstore as ts
from tests.stores import make_store, numbered
from tierstore.config import StoreConfig, TierConfig
from tierstore.planning import Plan
from tierstore_backends.memory import open_backend
from tierstore_backends.pinned import open_backend as open_pinned


@pytest.fixture
def store() -> Iterator[ts.Store]:
    with make_store(300, 400, 5000) as store:
        yield store


# --- put and get --------------------------------------------------------------------------------


def test_put_copies_and_keeps_nothing_of_the_callers(store: ts.Store) -> None:
    tensor = numbered(1)
    store.put("k", tensor)
    tensor.zero_()
    assert torch.equal(store.get("k"), numbered(1))


def test_get_is_independent_of_the_store(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.get("k").zero_()
    assert torch.equal(store.get("k"), numbered(1))


def test_a_large_get_outlives_the_store_and_other_gets() -> None:
    with make_store(1 << 23) as store:
        store.put("k", torch.arange(1 << 20, dtype=torch.int32), tier="disk")
        first = store.get("k")
        for _ in range(3):
            store.get("k").zero_()
    assert torch.equal(first, torch.arange(1 << 20, dtype=torch.int32))


def test_an_existing_key_is_refused_without_replace(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with pytest.raises(ts.KeyExists, match="replace=True"):
        store.put("k", numbered(2))
    assert torch.equal(store.get("k"), numbered(1))


def test_replace_takes_another_shape_and_drops_every_old_replica(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.evict("k", to="disk").result(10)
    store.fetch("k").result(10)
    store.put("k", torch.ones(3, 2), replace=True)
    assert torch.equal(store.get("k"), torch.ones(3, 2))
    assert store.stats().tiers["disk"].charged_bytes == 0


def test_a_lease_outlives_the_replacement_of_its_key(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k") as lease:
        store.put("k", numbered(2), replace=True)
        assert torch.equal(lease.tensor, numbered(1))
        assert torch.equal(store.get("k"), numbered(2))
    store.check()
    assert store.stats().tiers["device"].charged_bytes == 100


def test_put_without_a_tier_goes_to_the_fastest_that_can_take_it(store: ts.Store) -> None:
    store.put("small", numbered(1, 300))
    store.put("middle", numbered(2, 400))
    store.put("large", numbered(3, 3000))
    assert store.where("middle") == ("host",)
    assert store.where("large") == ("disk",)


def test_put_without_a_tier_evicts_by_policy(store: ts.Store) -> None:
    for number in range(4):
        store.put(f"k{number}", numbered(number))
    assert store.where("k3") == ("device",)
    assert store.where("k0") == ("host",)


def test_put_without_a_tier_is_never_blocked_by_leases(store: ts.Store) -> None:
    store.put("leased", numbered(1, 300))
    with store.lease("leased"):
        store.put("k", numbered(2))
        assert store.where("k") == ("host",)


def test_put_into_a_tier_full_of_leases_is_refused_at_once_naming_them(store: ts.Store) -> None:
    store.put("leased", numbered(1, 300))
    with store.lease("leased"), pytest.raises(ts.CapacityError, match="leased there") as caught:
        store.put("k", numbered(2), tier="device")
    error = caught.value
    assert (error.key, error.tier, error.needed_bytes, error.free_bytes) == ("k", "device", 100, 0)
    assert len(error.holders) == 1
    assert "k" not in store


def test_a_tensor_larger_than_every_tier_is_refused(store: ts.Store) -> None:
    with pytest.raises(ts.CapacityError, match="more than the whole capacity"):
        store.put("k", numbered(1, 6000))
    assert len(store) == 0


def test_a_tensor_that_requires_grad_is_stored_by_value(store: ts.Store) -> None:
    parameter = torch.nn.Parameter(torch.ones(3))
    store.put("k", parameter)
    assert torch.equal(store.get("k"), torch.ones(3))
    assert not store.get("k").requires_grad


def test_conjugate_and_negative_views_are_stored_by_value(store: ts.Store) -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    for tier in ("device", "disk"):
        store.put("conj", tensor.conj(), tier=tier, replace=True)
        assert torch.equal(store.get("conj"), tensor.conj().resolve_conj())
        store.put("imag", tensor.conj().imag, tier=tier, replace=True)
        assert torch.equal(store.get("imag"), torch.tensor([-2.0, 4.0]))


class Wrapper(torch.Tensor):
    """A tensor subclass without storage of its own."""

    @classmethod
    def __torch_dispatch__(cls, func: object, *_: object) -> torch.Tensor:
        raise TypeError(f"{func} is not for this test")

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return [], None

    @staticmethod
    def __tensor_unflatten__(*_: object) -> Wrapper:
        return wrapper()


def wrapper() -> Wrapper:
    made = torch.Tensor._make_wrapper_subclass(Wrapper, (3,))
    assert isinstance(made, Wrapper)
    return made


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.empty(3, device="meta"), "meta"),
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (wrapper, "wrapper subclass"),
        (lambda: [1, 2], "not a tensor"),
    ],
)
def test_what_has_no_plain_bytes_is_refused_with_the_reason(
    store: ts.Store, make: Callable[[], torch.Tensor], why: str
) -> None:
    with pytest.raises(ts.UsageError, match=why):
        store.put("k", make())
    assert "k" not in store


# --- wrong calls --------------------------------------------------------------------------------

WRONG_CALLS: list[tuple[str, Callable[[ts.Store], object], type[Exception]]] = [
    ("get of nothing", lambda s: s.get("none"), ts.KeyNotFound),
    ("lease of nothing", lambda s: s.lease("k", "none"), ts.KeyNotFound),
    ("fetch of nothing", lambda s: s.fetch("none"), ts.KeyNotFound),
    ("prefetch of nothing", lambda s: s.prefetch("none"), ts.KeyNotFound),
    ("evict of nothing", lambda s: s.evict("k", "none"), ts.KeyNotFound),
    ("drop of nothing", lambda s: s.drop("k", "none"), ts.KeyNotFound),
    ("where of nothing", lambda s: s.where("none"), ts.KeyNotFound),
    ("spec of nothing", lambda s: s.spec("none"), ts.KeyNotFound),
    ("story of nothing", lambda s: s.story("none"), ts.KeyNotFound),
    ("no such tier", lambda s: s.put("x", numbered(1), tier="moon"), ts.UsageError),
    ("no such tier to lease in", lambda s: s.lease("k", tier="moon"), ts.UsageError),
    ("no such tier to resize", lambda s: s.resize("moon", 3), ts.UsageError),
    ("a tier that cannot be leased in", lambda s: s.lease("k", tier="disk"), ts.UsageError),
    ("a lease on nothing", lambda s: s.lease(), ts.UsageError),
    ("a key that is no text", lambda s: s.put(3, numbered(1)), ts.UsageError),  # type: ignore[arg-type]
    ("a size that is none", lambda s: s.resize("host", "12 parsecs"), ts.ConfigError),
    ("a negative size", lambda s: s.resize("host", -1), ts.ConfigError),
    ("flush without a durable tier", lambda s: s.flush(), ts.UsageError),
]


@pytest.mark.parametrize(("call", "error"), [c[1:] for c in WRONG_CALLS], ids=[c[0] for c in WRONG_CALLS])
def test_a_wrong_call_raises_its_error_and_changes_nothing(
    store: ts.Store, call: Callable[[ts.Store], object], error: type[Exception]
) -> None:
    store.put("k", numbered(1))
    before = (store.keys(), store.where("k"), store.stats().tiers["device"].charged_bytes)
    with pytest.raises(error):
        call(store)
    assert (store.keys(), store.where("k"), store.stats().tiers["device"].charged_bytes) == before
    store.check()


def test_key_not_found_is_a_key_error_with_a_readable_text(store: ts.Store) -> None:
    with pytest.raises(KeyError, match="never put, or it was dropped") as caught:
        store.get("none")
    assert str(caught.value).startswith("no key 'none'")


def test_after_close_every_call_says_so() -> None:
    store = make_store(300)
    store.put("k", numbered(1))
    store.close()
    store.close()
    for call in (lambda: store.get("k"), lambda: store.put("x", numbered(1)), lambda: store.lease("k")):
        with pytest.raises(ts.StoreClosed):
            call()


# --- leases -------------------------------------------------------------------------------------


def test_a_lease_is_the_replica_itself(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k", write=True) as lease:
        lease.tensor.fill_(9)
    assert torch.equal(store.get("k"), numbered(9))


def test_a_leased_key_cannot_be_evicted_or_dropped(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k"):
        with pytest.raises(ts.LeaseError, match="evict"):
            store.evict("k")
        with pytest.raises(ts.LeaseError, match="drop"):
            store.drop("k")
    store.evict("k").result(10)
    assert store.where("k") == ("host",)


def test_a_write_lease_excludes_every_other(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k", write=True):
        for call in (
            lambda: store.lease("k"),
            lambda: store.lease("k", write=True),
            lambda: store.get("k"),
            lambda: store.put("k", numbered(2), replace=True),
        ):
            with pytest.raises(ts.LeaseError):
                call()
    with store.lease("k"), pytest.raises(ts.LeaseError) as caught:
        store.lease("k", write=True)
    assert caught.value.holders


def test_a_write_makes_the_other_replicas_stale(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.evict("k", to="host").result(10)
    with store.lease("k", write=True) as lease:
        assert store.where("k") == ("device", "host")
        lease.tensor.fill_(2)
    assert store.where("k") == ("device",)


def test_a_write_lease_that_wrote_nothing_invalidates_nothing(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.evict("k", to="host").result(10)
    store.lease("k", write=True).release(written=False)
    assert store.where("k") == ("device", "host")


def test_a_lease_on_several_keys_shows_each(store: ts.Store) -> None:
    store.put("a", numbered(1))
    store.put("b", numbered(2))
    with store.lease("a", "b", "a") as lease:
        assert torch.equal(lease["a"], numbered(1))
        assert torch.equal(lease["b"], numbered(2))
        with pytest.raises(ts.UsageError, match="one key"):
            _ = lease.tensor
        with pytest.raises(ts.KeyNotFound):
            _ = lease["c"]


def test_a_released_lease_shows_nothing(store: ts.Store) -> None:
    store.put("k", numbered(1))
    lease = store.lease("k")
    lease.release()
    lease.release()
    with pytest.raises(ts.NotResident, match="released"):
        _ = lease.tensor
    with pytest.raises(ts.NotResident, match="released"):
        _ = lease["k"]
    with pytest.raises(ts.NotResident, match="released"):
        lease.use()


def test_device_stands_for_the_fastest_tier() -> None:
    tiers = [TierConfig("ram", open_backend(capacity_bytes=500, options={}), 500)]
    with ts.Store(StoreConfig(tiers)) as store:
        store.put("k", numbered(1))
        with store.lease("k") as lease:
            assert torch.equal(lease.tensor, numbered(1))


# --- moving -------------------------------------------------------------------------------------


def test_a_clean_replica_is_dropped_not_copied(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.evict("k", to="disk").result(10)
    store.fetch("k").result(10)
    copies = store.stats().copies
    store.evict("k", to="disk").result(10)
    assert store.stats().copies == copies


def test_evicting_what_is_low_enough_leaves_it_alone(store: ts.Store) -> None:
    store.put("k", numbered(1), tier="disk")
    store.evict("k", to="host").result(10)
    store.evict("k").result(10)
    assert store.where("k") == ("disk",)


def test_a_prefetch_takes_free_room_and_never_somebody_elses(store: ts.Store) -> None:
    store.put("a", numbered(1), tier="disk")
    store.put("full", numbered(2, 300), tier="device")
    store.prefetch("a").result(10)
    assert store.where("a") == ("disk",)
    assert store.where("full") == ("device",)
    store.drop("full")
    store.prefetch("a").result(10)
    assert "device" in store.where("a")


def test_a_transfer_can_be_awaited(store: ts.Store) -> None:
    store.put("k", numbered(1))

    async def move() -> None:
        await store.evict("k", to="disk")
        await store.fetch("k", tier="host")

    asyncio.run(move())
    assert store.where("k") == ("host", "disk")


def test_an_awaited_transfer_raises_what_went_wrong(store: ts.Store) -> None:
    store.put("big", numbered(1, 3000), tier="disk")

    async def move() -> None:
        await store.fetch("big", tier="device")

    with pytest.raises(ts.CapacityError):
        asyncio.run(move())


def test_above_high_the_store_evicts_down_to_low() -> None:
    with make_store(1000, 1000, 5000, high=0.8, low=0.5) as store:
        for number in range(8):
            store.put(f"k{number}", numbered(number), tier="device")
        assert store.stats().tiers["device"].charged_bytes == 800
        store.put("k8", numbered(8), tier="device")
        assert store.stats().tiers["device"].charged_bytes == 500
        for number in range(9):
            assert torch.equal(store.get(f"k{number}"), numbered(number))


def test_residents_do_not_go_early_but_where_others_need_their_room() -> None:
    with make_store(1000, 5000, high=0.5, eviction="next-use") as store:
        store.follow(Plan(["k0", "k1", "k2"], residents={"k0", "k1"}))
        for key in ("k0", "k1", "k2"):
            store.put(key, torch.zeros(300, dtype=torch.uint8), tier="host")
        assert [store.where(f"k{number}")[0] for number in range(3)] == ["host", "host", "disk"]
        store.put("large", torch.zeros(900, dtype=torch.uint8), tier="host")
        assert store.where("k0")[0] == store.where("k1")[0] == "disk"


def test_resize_evicts_down_and_grows_again(store: ts.Store) -> None:
    for number in range(3):
        store.put(f"k{number}", numbered(number), tier="device")
    store.resize("device", 150)
    stats = store.stats().tiers["device"]
    assert (stats.capacity_bytes, stats.charged_bytes) == (150, 100)
    store.resize("device", "1KiB")
    store.fetch("k0", "k1", "k2").result(10)
    assert store.stats().tiers["device"].charged_bytes == 300


def _charged_bytes(store: ts.Store, tier: str) -> int:
    return store.stats().tiers[tier].charged_bytes


def test_a_resize_says_above_which_share_a_tier_writes_back_and_later_ones_keep_it() -> None:
    with make_store(1000, 10_000) as store:
        for number in range(6):
            store.put(f"k{number}", numbered(number), tier="host")
        store.resize("host", 800, high=0.5)
        assert _charged_bytes(store, "host") == 400
        store.resize("host", 400)
        assert _charged_bytes(store, "host") == 200
        store.resize("host", 0)
        store.resize("host", 1000)
        store.fetch(*(f"k{number}" for number in range(6))).result(10)
        assert _charged_bytes(store, "host") <= 500
        for number in range(6):
            assert torch.equal(store.get(f"k{number}"), numbered(number))


def test_a_resize_says_down_to_which_share_a_tier_writes_back() -> None:
    with make_store(1000, 10_000) as store:
        for number in range(9):
            store.put(f"k{number}", numbered(number), tier="host")
        store.resize("host", 1000, high=0.75, low=0.5)
        assert _charged_bytes(store, "host") == 500
        for number in range(3):
            store.put(f"more{number}", numbered(number), tier="host")
        assert _charged_bytes(store, "host") == 500  # and so it is from then on
        store.resize("host", 1000, high=0.625)
        for number in range(2):
            store.put(f"others{number}", numbered(number), tier="host")
        assert _charged_bytes(store, "host") == 500
        store.resize("host", 1000, high=0.25)  # below what low was: as high then
        assert _charged_bytes(store, "host") == 200


def test_a_resize_that_fails_leaves_the_shares_as_they_were(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k"), pytest.raises(ts.CapacityError):
        store.resize("device", 50, high=0.1)
    with pytest.raises(ts.ConfigError, match="high"):
        store.resize("device", 300, high=1.5)
    with pytest.raises(ts.ConfigError, match="low"):
        store.resize("device", 300, high=0.5, low=0.6)
    store.resize("device", 300)
    store.put("l", numbered(2), tier="device")
    store.put("m", numbered(3), tier="device")
    assert _charged_bytes(store, "device") == 300


def test_resize_below_what_is_leased_changes_nothing(store: ts.Store) -> None:
    store.put("k", numbered(1))
    with store.lease("k"), pytest.raises(ts.CapacityError) as caught:
        store.resize("device", 50)
    assert caught.value.holders
    assert store.stats().tiers["device"].capacity_bytes == 300


def test_resize_that_the_tiers_below_cannot_take_changes_nothing() -> None:
    with make_store(300, 100) as store:
        store.put("a", numbered(1, 100), tier="host")
        store.put("b", numbered(2, 200), tier="host")
        with pytest.raises(ts.CapacityError):
            store.resize("host", 50)
        assert store.stats().tiers["host"].capacity_bytes == 300
        assert torch.equal(store.get("a"), numbered(1, 100))
        assert torch.equal(store.get("b"), numbered(2, 200))


def test_flush_brings_every_key_to_a_durable_tier() -> None:
    durable = open_backend(capacity_bytes=1000, options={"durable": True})
    host = open_backend(capacity_bytes=300, options={})
    tiers = [TierConfig("host", host, 300), TierConfig("disk", durable, 1000)]
    with ts.Store(StoreConfig(tiers)) as store:
        store.put("a", numbered(1), tier="host")
        store.put("b", numbered(2), tier="disk")
        store.flush()
        assert store.where("a") == ("host", "disk")
        assert store.where("b") == ("disk",)


# --- looking ------------------------------------------------------------------------------------


def test_a_store_is_a_mapping_of_its_keys(store: ts.Store) -> None:
    store.put("a", numbered(1))
    store.put("b", numbered(2), tier="disk")
    assert "a" in store
    assert 3 not in store
    assert len(store) == 2
    assert list(store) == ["a", "b"]
    assert store.keys() == ("a", "b")


def test_stats_tell_bytes_hits_faults_and_directions(store: ts.Store) -> None:
    store.put("k", numbered(1), tier="disk")
    with store.lease("k"):
        pass
    with store.lease("k"):
        pass
    store.get("k")
    stats = store.stats()
    assert (stats.hits, stats.faults) == (1, 1)
    assert stats.tiers["device"].peak_charged_bytes == 100
    assert stats.traffic["caller", "disk"].nbytes == 100
    assert stats.traffic["disk", "device"].copies == 1
    assert stats.traffic["device", "caller"].nbytes == 100
    with pytest.raises(AttributeError):
        stats.stall_seconds = 1.0  # type: ignore[misc]


def test_stats_are_copied_pickled_and_given_to_json(store: ts.Store) -> None:
    store.put("k", numbered(1), tier="disk")
    store.get("k")
    stats = store.stats()
    assert copy.deepcopy(stats) == pickle.loads(pickle.dumps(stats)) == stats
    assert dataclasses.asdict(stats)["traffic"]["caller", "disk"] == {"copies": 1, "nbytes": 100}
    told = json.loads(json.dumps(stats.as_dict()))
    assert told["traffic"]["caller->disk"] == {"copies": 1, "nbytes": 100}
    assert told["tiers"]["disk"]["capacity_bytes"] == stats.tiers["disk"].capacity_bytes


def test_the_version_is_that_of_the_distribution() -> None:
    assert ts.__version__ == importlib.metadata.version("tierstore")


def test_a_story_tells_the_last_events_of_a_key(store: ts.Store) -> None:
    store.put("k", numbered(1))
    store.evict("k").result(10)
    story = " | ".join(store.story("k"))
    assert "ready in device" in story
    assert "freed in device" in story


def test_alignment_is_charged() -> None:
    pool = open_pinned(capacity_bytes=4096, options={"enable_pinned_mem": False})
    with ts.Store(StoreConfig([TierConfig("host", pool, 4096)])) as store:
        store.put("k", numbered(1, 100))
        assert store.stats().tiers["host"].charged_bytes == 512
