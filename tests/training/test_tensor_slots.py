"""Slots: every tensor of a bundle gets its bytes and gives them back through one, whoever moves them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, distributed

from tests.training.twins import (
    LAYOUTS,
    adam,
    assert_same,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    steps,
)
from tierstore.training import offload
from tierstore.training.bundles import binding
from tierstore.training.bundles.bindings import natively
from tierstore.training.bundles.layout import flat_bytes, lay_out, span_of
from tierstore.training.bundles.tensor_slots import PlainSlot, memory_of, slot_of


class Watched(PlainSlot):
    """A plain slot that knows which tensors have their bytes."""

    def __init__(self) -> None:
        self.attached: dict[int, bool] = {}
        self.changes = 0

    def attach(self, tensor: Tensor, view: Tensor) -> None:
        """Note it."""
        super().attach(tensor, view)
        self.changes += not self.attached.get(id(tensor), False)
        self.attached[id(tensor)] = True

    def detach(self, tensor: Tensor, poison: Tensor) -> None:
        """Note it."""
        super().detach(tensor, poison)
        self.attached[id(tensor)] = False


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    slot = Watched()
    monkeypatch.setattr(binding, "slot_of", lambda kind: slot)
    return slot


@every_layout
def test_all_bits_come_and_go_through_slots(layout: str, tmp_path: Path, watched: Watched) -> None:
    assert_same(build_blocks, steps(3), layout, tmp_path)
    assert watched.changes > 3 * 2 * len(list(blocks().parameters()))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_between_steps_no_parameter_is_attached_and_in_the_end_all_are(
    layout: str, tmp_path: Path, watched: Watched
) -> None:
    model = blocks()
    parameters = list(model.parameters())
    with offload(model, adam(model), config_of(layout, tmp_path)):
        assert not any(watched.attached[id(each)] for each in parameters)
        model(torch.ones(2, parameters[0].numel())).sum().backward()
        assert not any(watched.attached[id(each)] for each in parameters)
    assert all(watched.attached[id(each)] for each in parameters)


def test_a_plain_tensor_has_its_bytes_itself() -> None:
    tensor, view, poison = torch.ones(3), torch.arange(3.0), torch.zeros(1).expand(3)
    slot = slot_of(torch.Tensor)
    assert slot.local(tensor) is tensor
    version = tensor._version
    with natively():
        slot.attach(tensor, view)
        assert tensor.data_ptr() == view.data_ptr()
        slot.detach(tensor, poison)
        assert tensor.data_ptr() == poison.data_ptr()
    assert tensor._version == version


@pytest.fixture
def _group() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")
@pytest.mark.usefixtures("_group")
def test_a_sharded_tensor_has_its_bytes_in_its_local_one() -> None:
    sharded = pytest.importorskip("torch.distributed.tensor")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    whole = sharded.DTensor.from_local(
        torch.ones(2, 3), mesh, [sharded.Shard(0)], shape=(4, 3), stride=(3, 1)
    )
    local = whole.to_local()
    assert memory_of(local) is local
    assert memory_of(whole) is slot_of(type(whole)).local(whole)
    assert memory_of(whole).data_ptr() == local.data_ptr()
    view, poison = torch.arange(6.0).view(2, 3), torch.zeros(1).expand(2, 3)
    memory = memory_of(whole)
    with natively():
        slot_of(type(whole)).attach(whole, view)
        assert memory_of(whole) is memory
        assert memory.data_ptr() == view.data_ptr()
        slot_of(type(whole)).detach(whole, poison)
    assert memory.data_ptr() == poison.data_ptr()
    assert whole.shape == (4, 3)


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")
@pytest.mark.usefixtures("_group")
def test_a_sharded_tensor_lies_as_its_local_one() -> None:
    sharded = pytest.importorskip("torch.distributed.tensor")
    mesh = distributed.device_mesh.init_device_mesh("cpu", (1,))
    whole = sharded.DTensor.from_local(
        torch.ones(2, 3), mesh, [sharded.Shard(0)], shape=(4, 3), stride=(3, 1)
    )
    places, nbytes = lay_out([("whole", whole)])
    assert (places[0].shape, places[0].nbytes, nbytes) == ((2, 3), 24, 24)
    assert span_of(whole) == 24
    assert torch.equal(places[0].view(flat_bytes(whole, places[0], nbytes)), torch.ones(2, 3))
