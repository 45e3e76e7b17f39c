"""What is known of a run's machine before anything was measured there."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tierstore.planning.accelerators import accelerator
from tierstore.training.run_machine import machine_of


class _Named:
    """A store on an accelerator that is not here: what is asked of it before anything moves."""

    def __init__(self, store: ts.Store, device: torch.device) -> None:
        self.config = store.config
        self.device = device


@pytest.mark.parametrize(
    ("named", "entry"), [("NVIDIA A100-SXM4-80GB", "a100-80gb"), ("a device of nobody", None), (None, None)]
)
def test_an_accelerator_of_the_sheet_computes_as_the_sheet_says(
    named: str | None, entry: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.SimpleNamespace()
    if named is not None:
        module.get_device_name = lambda index: named if index == 1 else "another one"
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    config = ts.OffloadConfig(device="emulated", max_device_memory="1MB", offload_cpu_size="1MB")
    store_config = ts.StoreConfig.default(
        "emulated", max_device_memory="1MB", offload_cpu_size="1MB", offload_path=str(tmp_path)
    )
    with ts.Store(store_config) as store:
        found = machine_of(_Named(store, torch.device("cuda", 1)), config)  # type: ignore[arg-type]
        emulated = machine_of(store, config)
    assert emulated.sources["device"] == "assumed"
    assert found.sources["host"] == "assumed"
    if entry is None:
        assert found.sources["device"] == "assumed"
        assert found.device == emulated.device
    else:
        assert found.device == accelerator(entry).device
        assert found.sources["device"].startswith("nominal: NVIDIA A100")
