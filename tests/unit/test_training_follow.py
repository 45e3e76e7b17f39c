"""What the plan of a recorded step makes of the store's choice."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

import tierstore as ts
from tierstore.training.budgets.prefetcher import Prefetcher, PrefetchWindow


@pytest.mark.parametrize(
    ("windows", "kept"), [([PrefetchWindow("host", 0)], "gradient"), ([], "gradient"), (None, "first")]
)
def test_a_gradient_is_needed_until_the_step_ends_whether_something_is_prefetched_or_not(
    windows: list[PrefetchWindow] | None, kept: str
) -> None:
    tiers = [ts.TierConfig("host", "memory", 2048), ts.TierConfig("disk", "memory", 65536)]
    with ts.Store(ts.StoreConfig(tiers=tiers, eviction="next-use")) as store:
        prefetcher = Prefetcher(store, windows, lambda _: 0, optimizers=1)

        def begin_step() -> None:
            prefetcher.begin_use()
            prefetcher.note("first")
            prefetcher.note_gradient("gradient")
            prefetcher.note("last")
            prefetcher.note_step(0)

        for key in ("gradient", "first"):
            store.put(key, torch.zeros(1024, dtype=torch.uint8), tier="host")
        begin_step()
        begin_step()  # by the plan: what comes next is the end, and then "first"
        store.put("new", torch.zeros(1024, dtype=torch.uint8), tier="host")
        assert prefetcher.has_plan == (windows is not None)
        (gone,) = {"gradient", "first"} - {kept}
        assert (store.where(kept), store.where(gone)) == (("host",), ("disk",))


def test_an_activation_is_brought_to_host_memory_ahead_of_its_use_and_no_further() -> None:
    tiers = [
        ts.TierConfig("device", "memory", 4096),
        ts.TierConfig("host", "memory", 8192),
        ts.TierConfig("disk", "memory", 65536),
    ]
    with ts.Store(ts.StoreConfig(tiers=tiers, eviction="next-use")) as store:
        prefetcher = Prefetcher(
            store, [PrefetchWindow("device", 4096), PrefetchWindow("host", 8192)], lambda _: 0, optimizers=1
        )
        prefetcher.note("first")
        prefetcher.note_passing("activation", 1024)
        prefetcher.note("last")
        prefetcher.note_step(0)
        prefetcher.begin_use()
        store.put("activation", torch.zeros(1024, dtype=torch.uint8), tier="disk")
        asked: list[tuple[str, str]] = []
        prefetch = store.prefetch

        def note_prefetch(*keys: str, tier: str) -> None:
            asked.extend((key, tier) for key in keys)
            prefetch(*keys, tier=tier)

        with mock.patch.object(store, "prefetch", note_prefetch):
            prefetcher.note("first")
        assert asked == [("activation", "host")]


def test_what_comes_next_is_asked_for_at_once_whatever_of_it_is_not_there() -> None:
    tiers = [ts.TierConfig("device", "memory", 4096), ts.TierConfig("host", "memory", 8192)]
    keys = ["first", "second", "missing", "third", "last"]
    with ts.Store(ts.StoreConfig(tiers=tiers, eviction="next-use")) as store:
        window = PrefetchWindow("device", 4096)
        prefetcher = Prefetcher(store, [window], lambda _: 64, optimizers=1)
        prefetcher.note(*keys)
        prefetcher.note_step(0)
        prefetcher.begin_use()
        for key in keys:
            if key != "missing":
                store.put(key, torch.zeros(64, dtype=torch.uint8), tier="host")
        asked: list[tuple[str, ...]] = []
        prefetch = store.prefetch

        def note_prefetch(*keys: str, tier: str) -> ts.Transfer[None]:
            asked.append(keys)
            return prefetch(*keys, tier=tier)

        with mock.patch.object(store, "prefetch", note_prefetch):
            prefetcher.note("first", "second")
        assert asked == [
            ("second", "missing", "third", "last", "first"),  # again, in the next step
            ("second", "third", "last", "first"),
        ]
        for key in asked[-1]:
            store.lease(key).release()
        assert store.stats().tiers["device"].faults == 0, "a lease had to bring what was asked for ahead"


def test_a_window_that_a_key_has_passed_is_free_again_whatever_became_of_its_bytes() -> None:
    tiers = [ts.TierConfig("device", "memory", 4096), ts.TierConfig("host", "memory", 8192)]
    with ts.Store(ts.StoreConfig(tiers=tiers)) as store:
        window = PrefetchWindow("host", 1024)
        prefetcher = Prefetcher(store, [window], lambda _: 0, optimizers=1)
        for nbytes in (1024, 64, 4096, 512):
            prefetcher.begin_use()
            prefetcher.note("first")
            prefetcher.note_passing("activation", nbytes)
            prefetcher.note("last")
            prefetcher.note_step(0)
        assert window.ahead_bytes == sum(window.ahead) <= 1024


def test_a_key_may_be_used_in_the_midst_of_another_use() -> None:
    """As garbage is collected anywhere, and what dies with it may use keys."""
    tiers = [ts.TierConfig("device", "memory", 4096), ts.TierConfig("host", "memory", 8192)]
    keys = [f"key {number}" for number in range(6)]
    with ts.Store(ts.StoreConfig(tiers=tiers)) as store:
        window = PrefetchWindow("host", 4096)
        prefetcher = Prefetcher(store, [window], lambda _: 64, optimizers=1)

        def step() -> None:
            prefetcher.begin_use()
            for key in keys:
                prefetcher.note(key)
            prefetcher.note_step(0)

        step()
        step()
        prefetcher.begin_use()
        prefetcher.note(keys[0])
        advance = store.advance

        def advance_and_use(position: int) -> None:
            advance(position)
            if position == 2:
                prefetcher.note(keys[4])

        with mock.patch.object(store, "advance", advance_and_use):
            for key in keys[1:]:
                prefetcher.note(key)
        assert window.ahead_bytes == sum(window.ahead)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """Let threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("hasty_threads")
def test_threads_may_go_through_a_step_together() -> None:
    tiers = [ts.TierConfig("device", "memory", 4096), ts.TierConfig("host", "memory", 8192)]
    keys = [f"activation/{number}" for number in range(60)]
    with ts.Store(ts.StoreConfig(tiers=tiers)) as store:
        window = PrefetchWindow("host", 10_000)
        prefetcher = Prefetcher(store, [window], lambda _: 0, optimizers=1)
        for key in keys:
            prefetcher.note_passing(key, 1000)
        prefetcher.note_step(0)
        prefetcher.begin_use()
        errors: list[BaseException] = []
        begin = threading.Barrier(4)

        def work(first: int) -> None:
            try:
                begin.wait()
                for _ in range(8):
                    for key in keys[first::2] + keys[::-1][first::2]:
                        prefetcher.note_passing(key, 1000)
            except BaseException as error:  # noqa: BLE001 - looked at below
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number % 2,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors
        assert window.ahead_bytes == sum(window.ahead) <= window.limit_bytes
