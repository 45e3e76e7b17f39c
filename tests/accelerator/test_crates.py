"""Small tensors of a device, in crates."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tierstore as ts
from tests.accelerator import DEVICE, held
from tierstore.crates import Crates
from tierstore.units import MIB


@pytest.fixture
def crates() -> Iterator[Crates]:
    config = ts.StoreConfig.default(
        "openreg", 4 * MIB, offload_cpu_size=16 * MIB, offload_disk_size=0, host_mem_block_size=MIB
    )
    with ts.Store(config) as store:
        yield Crates(store)


def test_small_tensors_of_a_device_come_back_to_it(crates: Crates) -> None:
    crates.put_all({f"k{number}": torch.full((10,), float(number), device=DEVICE) for number in range(20)})
    crates.put("on the host", torch.arange(3))
    crates.evict(*crates, to="host").result(30)
    assert crates.where("k3") == ("host",)
    assert crates.get("k3").device == torch.device(DEVICE)
    assert torch.equal(crates.get("k3").cpu(), torch.full((10,), 3.0))
    assert torch.equal(crates.get("on the host"), torch.arange(3))
    with crates.lease("k4", "k5") as lease:
        assert lease["k4"].device == torch.device(DEVICE)
        assert torch.equal((lease["k4"] + lease["k5"]).cpu(), torch.full((10,), 9.0))


def test_what_a_stream_writes_is_what_others_read(crates: Crates) -> None:
    """Its neighbours are copied meanwhile, and the crate goes down when it is released."""
    crates.put_all({f"k{number}": torch.full((1000,), float(number), device=DEVICE) for number in range(3)})
    side = torch.Stream(DEVICE)
    with crates.lease("k1", write=True) as lease:
        with held(side):
            with side:
                lease.use()
                lease["k1"].fill_(7)
            assert torch.equal(crates.get("k0").cpu(), torch.zeros(1000))
            with crates.lease("k2") as other:
                assert torch.equal(other.tensor.cpu(), torch.full((1000,), 2.0))
        lease.use()
    crates.evict("k1", to="host").result(30)
    assert torch.equal(crates.get("k1").cpu(), torch.full((1000,), 7.0))
