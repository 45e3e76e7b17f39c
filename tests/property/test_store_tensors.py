"""Any tensor that can be copied as bytes comes back as it was."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.stores import make_store
from tierstore.testing.strategies import same_bytes, tensors

TIERS = ("device", "host", "disk")


@given(tensor=tensors(), put_tier=st.sampled_from(TIERS), path=st.lists(st.sampled_from(TIERS), max_size=4))
def test_a_tensor_is_the_same_wherever_it_has_been(
    tensor: torch.Tensor, put_tier: str, path: list[str]
) -> None:
    with make_store(10_000, 10_000, 10_000) as store:
        store.put("k", tensor, tier=put_tier)
        for tier in path:
            store.fetch("k", tier=tier).result(10)
            store.evict("k", to=tier).result(10)
        assert same_bytes(store.get("k"), tensor)
        with store.lease("k", tier="device") as lease:
            assert same_bytes(lease.tensor, tensor)
        assert store.spec("k").shape == tensor.shape
        assert store.spec("k").dtype == tensor.dtype
        assert store.spec("k").nbytes == tensor.numel() * tensor.element_size()


@given(tensor=tensors())
def test_dense_strides_are_kept(tensor: torch.Tensor) -> None:
    with make_store(10_000) as store:
        store.put("k", tensor, tier="disk")
        stride = store.get("k").stride()
        is_dense = tensor.numel() and torch.empty_like(tensor).stride() == tensor.stride()
        if is_dense:
            assert stride == tensor.stride()
