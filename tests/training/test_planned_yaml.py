"""What ``tierstore plan`` writes is obeyed by `offload`, and the run's bits are those of plain PyTorch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.training import twins
from tierstore.cli import main
from tierstore.config import OffloadConfig
from tierstore.planning import Placement
from tierstore.training import offload
from tierstore.training.activations import read_sections
from tierstore.training.placing import marks_in

_MODULE = "planned_blocks"
_LAYERS = 4
_RECOMPUTED = """
offload_config: {device: emulated, max_device_memory: 160KB}
recompute_config: {recompute: true}
"""
_SOURCE = """
import torch
from tests.training import twins


def build():
    model = twins.like_blocks()
    return model, torch.zeros(6, twins.WIDTH), twins.adam(model)
"""


@pytest.mark.parametrize(
    ("config", "quotas"),
    [
        ("device: emulated\nmax_device_memory: 160KB\n", ["--max-host-memory", "64MB", "--max-disk", "0"]),
        (
            "device: emulated\nmax_device_memory: 112KB\n",
            ["--max-host-memory", "144KB", "--max-disk", "64MB"],
        ),
        ("device: cpu\n", ["--max-host-memory", "160KB", "--max-disk", "64MB"]),
        (
            _RECOMPUTED,
            ["--max-host-memory", "64MB", "--max-disk", "0"],
        ),
    ],
    ids=["device", "three", "disk", "recomputed"],
)
def test_a_planned_run_is_obeyed_and_has_the_bits_of_plain_pytorch(
    config: str, quotas: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / f"{_MODULE}.py").write_text(_SOURCE)
    (tmp_path / "run.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    words = [f"{_MODULE}:build", "--config", "run.yaml", *quotas, "--write", "planned.yaml"]
    assert main(["plan", *words]) == 0

    plain, ours = _trial(), _trial()
    torch.manual_seed(1)
    twins.steps()(plain)
    planned = Placement.from_mapping(OffloadConfig.from_yaml("planned.yaml").placement)
    with offload(ours.model, list(ours.optimizers), "planned.yaml") as run:
        torch.manual_seed(1)
        twins.steps()(ours)
        run.store.check()
        assert run.placement.bundles == planned.bundles
        assert (run.placement.ahead, run.placement.high) == (planned.ahead, planned.high)
        assert run.placement.marks == marks_in(read_sections("planned.yaml"), _LAYERS)
        assert run.placement.marks or config != _RECOMPUTED
    twins.assert_equal_lists(plain.logged, ours.logged)
    twins.assert_equal_models(plain.model, ours.model)


def _trial() -> twins.Trial:
    torch.manual_seed(0)
    model = twins.like_blocks()
    return twins.Trial(model, twins.adam(model))
