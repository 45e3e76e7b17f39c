"""Numbers that are carried to a device: the same there, in as few bytes as they need."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.row_carriers import DEVICE, CopyingCarrier
from tierstore.tables.device_link import DeviceLink


@pytest.mark.parametrize(
    ("most", "nbytes"), [(0, 2), (1 << 15, 2), (65535, 2), (65536, 4), (2**31 - 1, 4), (2**31, 8), (2**62, 8)]
)
def test_numbers_take_the_bytes_that_the_largest_needs(most: int, nbytes: int) -> None:
    link = DeviceLink(CopyingCarrier(), DEVICE)
    numbers = torch.tensor([0, most, most // 2])
    given_numbers = numbers.clone()
    assert link.bring_numbers(numbers).tolist() == given_numbers.tolist()
    assert numbers.tolist() == given_numbers.tolist(), "they are the caller's"
    assert link.bytes_to_device == 3 * nbytes


@given(st.lists(st.integers(0, 2**40), max_size=9) | st.lists(st.integers(0, 70000), max_size=9))
def test_all_numbers_come_as_they_are(numbers: list[int]) -> None:
    link = DeviceLink(CopyingCarrier(), DEVICE)
    brought = link.bring_numbers(torch.tensor(numbers, dtype=torch.int64))
    assert brought.dtype is torch.int64
    assert brought.tolist() == numbers
