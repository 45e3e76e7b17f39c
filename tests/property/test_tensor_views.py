"""A tensor is the same over a copy of its storage, however it lies there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tierstore.training.activations.runtime.tensor_views import TensorView

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "turn": lambda x: x.mT if x.dim() > 1 else x,
    "halve": lambda x: x[: max(1, x.shape[0] // 2)],
    "skip": lambda x: x[1:] if x.shape[0] > 1 else x,
    "step": lambda x: x[::2],
    "repeat": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "empty": lambda x: x[:0] if x.shape[0] > 3 else x,
    "conjugate": torch.conj,
    "imaginary": lambda x: x.conj().imag if x.is_complex() else x,
    "bits": lambda x: x.view(torch.int32) if x.dtype is torch.float32 and not x.is_neg() else x,
}


@pytest.mark.parametrize("begin_bytes", [0, 64])
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.complex64]),
    st.lists(st.sampled_from(sorted(CHANGES)), max_size=5),
)
def test_a_view_is_the_same_over_a_copy_of_its_storage(
    begin_bytes: int, dtype: torch.dtype, changes: Sequence[str]
) -> None:
    tensor = torch.arange(48).to(dtype).reshape(6, 8)
    for change in changes:
        tensor = CHANGES[change](tensor)
    view = TensorView.of(tensor)
    storage = tensor.untyped_storage()
    copied = torch.zeros(storage.nbytes() + begin_bytes, dtype=torch.uint8)
    copied[begin_bytes:] = torch.empty(0, dtype=torch.uint8).set_(storage)
    found = view.over(copied.untyped_storage(), begin_bytes)
    assert TensorView.of(found, begin_bytes) == view
    assert torch.equal(found, tensor)
    assert (found.is_conj(), found.is_neg()) == (tensor.is_conj(), tensor.is_neg())
