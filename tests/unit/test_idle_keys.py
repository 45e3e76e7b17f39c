"""What a key costs that nobody uses: memory of the process beside its bytes."""

from __future__ import annotations

import gc
import tracemalloc
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tierstore.units import KIB

KEYS = 4_000


def fill(store: ts.Store, *, is_durable: bool) -> None:
    tensor = torch.ones(8)
    for number in range(KEYS):
        store.put(f"{number:05d}.weight", tensor)
    if is_durable:
        store.flush()


@pytest.mark.parametrize("tier", ["host", "disk", "durable"])
def test_an_idle_key_costs_two_kib(tier: str, tmp_path: Path) -> None:
    host, disk = ("64MB", None) if tier == "host" else ("64KB", "256MB")
    config = ts.StoreConfig.default("cpu", None, host, disk, tmp_path, durable=tier == "durable")
    with ts.Store(config) as store:
        store.put("what is made once", torch.ones(8))
        gc.collect()
        tracemalloc.start(1)
        try:
            fill(store, is_durable=tier == "durable")
            gc.collect()
            nbytes, most_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert store.spec("00000.weight") is store.spec("01999.weight")  # one of all that look alike
    assert nbytes / KEYS < 2 * KIB
    assert (most_bytes - nbytes) / KEYS < KIB * 3 / 4  # what a flush takes for a while, the process keeps
