"""Whatever kernels and copies are late by: an offloaded loop has the bits of a plain one."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.accelerator import DEVICE, late
from tests.training.twins import Trial, adam, assert_equal_lists, blocks, steps
from tierstore.training import offload

_COMMON = {
    "device": "openreg",
    "offload_disk_size": 0,
    "host_mem_block_size": "1MB",
    "offload_cpu_size": "64MB",
}
_TIGHT = {**_COMMON, "max_device_memory": "400KB"}
_OBEYED = {**_COMMON, "max_device_memory": "64MB", "offload_param": "cpu", "auto_offload": False}


def _logged(config: Mapping[str, object] | None) -> list[torch.Tensor | None]:
    torch.manual_seed(0)
    with DEVICE:
        model = blocks(2)
        trial = Trial(model, adam(model))
        if config is None:
            steps(3)(trial)
        else:
            with offload(model, trial.optimizers[0], config):
                steps(3)(trial)
    return trial.logged


@settings(max_examples=8)
@given(
    kernel_us=st.integers(0, 200),
    copy_us=st.integers(0, 2000),
    seed=st.integers(0, 2**32),
    config=st.sampled_from([_TIGHT, _OBEYED]),
)
def test_delays_change_no_bit(kernel_us: int, copy_us: int, seed: int, config: Mapping[str, object]) -> None:
    expected = _logged(None)
    with late(kernel_us=kernel_us, copy_us=copy_us, seed=seed):
        assert_equal_lists(expected, _logged(config))
