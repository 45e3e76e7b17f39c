"""Modes of the library hide no write from the version counters."""

from __future__ import annotations

import torch

from tierstore.testing.memory import DeviceBudget


def test_operators_over_lists_are_counted_under_a_mode_once_for_each_tensor() -> None:
    tensors, others = [torch.zeros(3), torch.zeros(5)], [torch.ones(3), torch.ones(5)]
    with DeviceBudget(1 << 20), DeviceBudget(1 << 20):  # two modes, one seeing the other's operators
        torch._foreach_add_(tensors, others)
        tensors[0].add_(1)
        torch._foreach_mul(tensors, 2.0)
    assert [tensor._version for tensor in tensors] == [2, 1]
    assert [tensor._version for tensor in others] == [0, 0]


def test_a_mode_under_inference_mode_counts_nothing() -> None:
    with torch.inference_mode(), DeviceBudget(1 << 20):
        tensor = torch.zeros(3)
        torch._foreach_add_([tensor], 1.0)
    assert tensor.tolist() == [1.0] * 3
