"""A run whose tensors go back to where they were, on whatever device, is left and goes on bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.fault.failing_memory import MemoryOut
from tests.training.twins import (
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    build_blocks,
    config_of,
    every_layout,
    is_on_accelerator,
    steps,
    with_device,
)
from tierstore.errors import BackendError, StoreClosed
from tierstore.training import offload


def beside(layout: str) -> dict[str, object]:
    """Return what gives an accelerator room for the run that is not offloaded."""
    return with_device(layout, "1MB") if is_on_accelerator else {}


def begin(where: str) -> Trial:
    """Return what is trained, in host memory or where these tests run."""
    torch.manual_seed(0)
    trial = Trial(*build_blocks())
    if where == "host":
        trial.model.to("cpu")
    return trial


def seeded_steps(trial: Trial) -> None:
    """Make steps on the same batches each time."""
    torch.manual_seed(1)
    steps(2)(trial)


@every_layout
@pytest.mark.parametrize("where", ["host", "there"])
@pytest.mark.parametrize("error", [MemoryError, BackendError])
def test_a_run_that_could_not_be_left_goes_on_bit_for_bit(
    layout: str, where: str, error: type[Exception], tmp_path: Path
) -> None:
    plain, ours = begin("there"), begin(where)
    seeded_steps(plain)
    run = offload(ours.model, list(ours.optimizers), config_of(layout, tmp_path, beside(layout)))
    seeded_steps(ours)
    with MemoryOut(12, 10**9, error), pytest.raises(error):
        run.close(restore=True)
    for trial in (plain, ours):
        seeded_steps(trial)
    run.store.check()
    run.close(restore=True)
    assert_equal_lists(plain.logged, ours.logged)
    if where == "host":
        ours.model.to(next(plain.model.parameters()).device)
    assert_equal_models(plain.model, ours.model)
    if where == "there":
        assert_equal_states(plain.optimizer, ours.optimizer)


@every_layout
def test_a_released_run_raises_and_goes_on_elsewhere(layout: str, tmp_path: Path) -> None:
    ours = begin("there")
    run = offload(ours.model, list(ours.optimizers), config_of(layout, tmp_path, beside(layout)))
    steps(2)(ours)
    run.save(tmp_path / "saved")
    device = next(ours.model.parameters()).device
    run.close(restore=False)
    for parameter in ours.model.parameters():
        assert parameter.device == device
        with pytest.raises(StoreClosed, match="scratch space"):
            parameter.sum()
