"""Sixteen threads do what they like with one store."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable

import pytest
import torch

import tierstore as ts
from tests.stores import make_store
from tierstore.errors import CapacityError, KeyExists, KeyNotFound, LeaseError
from tierstore.spi import Backend
from tierstore.testing.batching import Batching

KEYS = [f"k{n}" for n in range(24)]
THREADS = 16
SECONDS = float(os.environ.get("TIERSTORE_RACE_SECONDS", "6"))


class Worker(threading.Thread):
    """Calls at random; what it reads must be a whole tensor that somebody put or wrote."""

    def __init__(self, store: ts.Store, seed: int, deadline: float) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self.store = store
        self.random = random.Random(seed)
        self.deadline = deadline
        self.failure: BaseException | None = None
        self.calls = 0

    def run(self) -> None:
        try:
            while time.monotonic() < self.deadline:
                self.calls += 1
                try:
                    self.step(self.random.choice(KEYS))
                except (KeyNotFound, KeyExists, LeaseError, CapacityError):
                    continue  # others drop, put and lease as well
        except BaseException as error:
            self.failure = error
            raise

    def step(self, key: str) -> None:
        match self.random.randrange(9):
            case 0 | 1:
                value = self.random.randrange(251)
                size = self.random.choice([0, 1, 100, 700])
                self.store.put(key, torch.full((size,), value, dtype=torch.uint8), replace=True)
            case 2 | 3:
                whole(self.store.get(key))
            case 4:
                with self.store.lease(key, tier=self.random.choice(["device", "host"])) as lease:
                    whole(lease.tensor)
            case 5:
                with self.store.lease(key, write=True) as lease:
                    lease.tensor.fill_(self.random.randrange(251))
            case 6:
                self.store.fetch(key, tier="host").result(30)
            case 7:
                self.store.evict(key, to=self.random.choice([None, "host", "disk"])).result(30)
            case 8:
                self.rare(key)

    def rare(self, key: str) -> None:
        match self.random.randrange(5):
            case 0:
                self.store.drop(key)
            case 1:
                self.store.resize("host", self.random.choice([2000, 3000, 4000]))
            case 2:
                self.store.check()
            case 3:
                self.store.prefetch(*KEYS[:4])
            case 4:
                self.store.evict(*self.random.sample(KEYS, 3)).result(30)


def whole(tensor: torch.Tensor) -> None:
    """Fail if the bytes are of more than one writer."""
    assert tensor.numel() == 0 or bool((tensor == tensor[0]).all()), "torn bytes"


@pytest.mark.timeout(240)
@pytest.mark.parametrize("eviction", ["lru", "size-class"])
@pytest.mark.parametrize("wrap", [lambda backend: backend, Batching], ids=["one by one", "in batches"])
def test_sixteen_threads_at_random_lose_nothing_and_never_hang(
    eviction: str, wrap: Callable[[Backend], Backend]
) -> None:
    with make_store(2000, 4000, 60000, eviction=eviction, wrap=wrap) as store:
        deadline = time.monotonic() + SECONDS / 2
        workers = [Worker(store, seed, deadline) for seed in range(THREADS)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(SECONDS + 60)
        assert not [w.name for w in workers if w.is_alive()], "a thread hangs"
        assert [w.failure for w in workers if w.failure] == []
        store.check()
        for key in store:
            whole(store.get(key))
        for tier in store.stats().tiers.values():
            assert tier.in_flight_bytes == 0
        assert sum(worker.calls for worker in workers) > THREADS
