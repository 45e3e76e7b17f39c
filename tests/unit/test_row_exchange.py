"""What goes between processes as bytes, whatever strides it has."""

from __future__ import annotations

import pytest
import torch
from torch import distributed

from tierstore.training.ranks.row_exchange import _bytes
from tierstore.training.ranks.row_slices import RowSlice

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(1, 1).as_strided((1, 1), (0, 0)),
        torch.ones(1).expand(3, 1),
        torch.ones(1).expand(3, 4),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(5),
        torch.arange(4).half(),
        torch.arange(6).view(3, 2).to(torch.bfloat16),
        torch.ones(0, 3),
        torch.ones(1).expand(1, 1)[:0],
        torch.ones(0, dtype=torch.int64),
    ],
)
def test_rows_of_any_strides_are_bytes_row_by_row(tensor: torch.Tensor) -> None:
    found = _bytes(tensor)
    assert found.dtype == torch.uint8
    assert len(found) == len(tensor)
    assert found.is_contiguous()
    back = torch.frombuffer(bytearray(found.flatten().tolist()), dtype=tensor.dtype) if len(tensor) else found
    assert torch.equal(back.view_as(tensor.contiguous()) if len(tensor) else tensor, tensor)


@pytest.mark.parametrize("processes", [1, 2, 3, 8])
@pytest.mark.parametrize("rows_per_slice", [1, 7, 256])
def test_every_row_has_one_owner_and_slices_are_dealt_in_turn(processes: int, rows_per_slice: int) -> None:
    ids = torch.arange(5000)
    slices = [RowSlice(rank, processes, rows_per_slice) for rank in range(processes)]
    assert torch.stack([each.own(ids) for each in slices]).sum(0).eq(1).all()
    owners = slices[0].owner_of(ids)
    assert owners.tolist() == [number // rows_per_slice % processes for number in range(5000)]
    assert slices[0].owner_of(torch.tensor([2**40 * rows_per_slice])).item() == 2**40 % processes
