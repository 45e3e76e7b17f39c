"""Bare addresses of parameters: bytes stay where they are for as long as somebody may use one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.training.twins import (
    Trial,
    adam,
    batch,
    blocks,
    config_of,
    every_layout,
    loss_of,
    same,
    step,
    with_device,
)
from tierstore.errors import CapacityError
from tierstore.training import offload


def _bytes_at(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


@every_layout
def test_addresses_of_several_parameters_are_good_together(layout: str, tmp_path: Path) -> None:
    model = blocks(2)
    expected = {n: p.detach().numpy().tobytes() for n, p in model.named_parameters()}
    with offload(model, None, config_of(layout, tmp_path, with_device(layout, "256KB"))):
        loss_of(model, *batch())
        parts = [p for n, p in model.named_parameters() if n.startswith("0.")]
        names = [n for n in expected if n.startswith("0.")]
        addresses = [p.data_ptr() for p in parts]
        assert len(set(addresses)) == len(addresses)
        found = [_bytes_at(a, p.numel() * 4) for a, p in zip(addresses, parts, strict=True)]
        assert found == [expected[name] for name in names]


def test_a_file_that_is_written_from_addresses_is_right(tmp_path: Path) -> None:
    model = blocks()
    expected = {n: p.detach().clone() for n, p in model.named_parameters()}
    with offload(model, None, config_of("host", tmp_path)):
        save_file(dict(model.named_parameters()), tmp_path / "all.safetensors")
    assert all(
        same(tensor, expected[name]) for name, tensor in load_file(tmp_path / "all.safetensors").items()
    )


def test_addresses_that_cannot_be_good_together_are_refused(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(20)))
    with (
        offload(model, None, config_of("disk", tmp_path)),
        pytest.raises(CapacityError, match="leased"),
    ):
        [p.data_ptr() for p in model.parameters()]


@every_layout
def test_an_address_keeps_nothing_once_the_model_is_called(layout: str, tmp_path: Path) -> None:
    model = blocks()
    optimizers = adam(model)
    with offload(model, optimizers, config_of(layout, tmp_path)) as run:
        for _ in range(3):
            for module in model:
                next(module.parameters()).data_ptr()
            step(Trial(model, optimizers))
        run.store.check()
        next(model.parameters()).data_ptr()
    assert all(bool(torch.isfinite(p).all()) for p in model.parameters())
