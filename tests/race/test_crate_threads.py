"""Sixteen threads do what they like with the same crates."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest
import torch

import tierstore as ts
from tests.crate_stores import CRATE_BYTES, CrateDisk, check_index, check_waste
from tierstore.crates import Crates

KEYS = [f"k{n}" for n in range(24)]
THREADS = 16
SECONDS = float(os.environ.get("TIERSTORE_RACE_SECONDS", "6"))


def whole(tensor: torch.Tensor) -> None:
    """Fail if bytes are a mixture of what was put or written."""
    assert tensor.numel() == 0 or bool((tensor == tensor[0]).all())


class CrateThread(threading.Thread):
    """Calls at random; what it reads must be a whole tensor that somebody put or wrote."""

    def __init__(self, crates: Crates, seed: int, deadline: float) -> None:
        super().__init__(name=f"worker-{seed}", daemon=True)
        self.crates = crates
        self.random = random.Random(seed)
        self.deadline = deadline
        self.failure: BaseException | None = None
        self.done = 0

    def run(self) -> None:
        try:
            while time.monotonic() < self.deadline:
                self.done += self.is_done(self.random.choice(KEYS))
        except BaseException as error:
            self.failure = error
            raise

    def is_done(self, key: str) -> bool:
        """Do something; return false where others who drop, put and lease as well were in the way."""
        try:
            self.step(key)
        except ts.KeyNotFound as error:
            if error.key not in KEYS:
                raise  # a crate is lost
            return False
        except (ts.KeyExists, ts.LeaseError, ts.CapacityError):
            return False
        return True

    def tensor(self) -> torch.Tensor:
        return torch.full(
            (self.random.choice([0, 1, 100, 240]),), self.random.randrange(251), dtype=torch.uint8
        )

    def step(self, key: str) -> None:
        match self.random.randrange(9):
            case 0 | 1:
                self.crates.put(key, self.tensor(), replace=True)
            case 2:
                self.crates.put_all(
                    {each: self.tensor() for each in self.random.sample(KEYS, 6)}, replace=True
                )
            case 3 | 4:
                whole(self.crates.get(key))
            case 5:
                with self.crates.lease(*self.random.sample(KEYS, 3), tier="host") as lease:
                    for each in list(lease._use.records):
                        whole(lease[each])
            case 6 | 7:
                with self.crates.lease(key, tier="host", write=True) as lease:
                    lease.tensor.fill_(self.random.randrange(251))
            case 8:
                self.rare(key)

    def rare(self, key: str) -> None:
        match self.random.randrange(6):
            case 4:
                self.crates.fetch(key, tier="host").result(30)
            case 5:
                self.crates.prefetch(*KEYS[:4], tier="host")
            case 0:
                self.crates.drop(*self.random.sample(KEYS, 2))
            case 1:
                self.crates.evict(key, to="disk").result(30)
            case 2:
                self.crates.flush()
            case 3:
                self.crates.store.flush()


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_threads_read_whole_tensors_and_leave_the_crates_in_order() -> None:
    disk = CrateDisk(host_bytes=12 * CRATE_BYTES, disk_bytes=200 * CRATE_BYTES)
    store = disk.open()
    crates = Crates(store, crate_bytes=CRATE_BYTES)
    deadline = time.monotonic() + SECONDS
    threads = [CrateThread(crates, seed, deadline) for seed in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 60)
        assert not thread.is_alive(), f"{thread.name} hangs"
    assert [thread.failure for thread in threads if thread.failure] == []
    assert all(thread.done > 0 for thread in threads)
    store.check()
    check_index(crates)
    assert all(crate.is_idle for crate in crates._sharing.index.crates.values())
    crates._stock._rests_until = 0
    crates._stock.tidy()
    check_waste(crates)
    values = {key: crates.get(key) for key in crates}
    store.close()
    found = Crates(disk.open(), crate_bytes=CRATE_BYTES)
    assert set(found) == set(values)
    assert all(torch.equal(found.get(key), value) for key, value in values.items())
