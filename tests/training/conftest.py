"""On the simulated accelerator every tensor of these tests is the device's, and its streams are late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._C._dynamo.eval_frame import set_eval_frame


@pytest.fixture(autouse=True)
def _on_the_accelerator() -> Iterator[None]:
    from tests.training.twins import is_simulated  # which looks for an accelerator: not before there is one

    if not is_simulated:
        yield
        return
    from tests.accelerator import DEVICE, late

    with late(kernel_us=20, copy_us=500), DEVICE:
        yield
    torch.accelerator.synchronize()


@pytest.fixture
def compiler_at_work() -> Iterator[None]:
    """Let the compiler evaluate frames, as it does while something compiled runs or was interrupted."""
    before = set_eval_frame(False)
    yield
    set_eval_frame(before)
