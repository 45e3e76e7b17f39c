"""Slots: every tensor of a bundle gets its bytes and gives them back through one, whoever moves them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

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
from tierstore.training.bundles.tensor_slots import PlainSlot, slot_of


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
