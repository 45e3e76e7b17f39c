"""A run says at INFO what it is and what it did: a line each, bounded, and with nothing of the user's."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.training.twins import batch, build_blocks, config_of, loss_of
from tierstore.training import offload

_LONGEST_LINE = 1000


def lines(path: Path, caplog: pytest.LogCaptureFixture, model: nn.Module, layout: str) -> list[str]:
    optimizer = torch.optim.AdamW(model.parameters())
    with (
        caplog.at_level(logging.INFO, "tierstore"),
        offload(model, optimizer, config_of(layout, path)) as run,
    ):
        loss_of(model, *batch()).backward()
        optimizer.step()
        run.close()
    return [each.getMessage() for each in caplog.records if each.levelno == logging.INFO]


def test_opening_and_ending_are_a_line_each(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_blocks()
    opened, ended = lines(tmp_path, caplog, model, "three")
    assert opened.startswith("Sequential is offloaded with AdamW: ")
    for key in ("bundles of parameters", "max_device_memory", "offload_cpu_size", "offload_disk_size"):
        assert key in opened
    assert ended.startswith("Sequential is no longer offloaded: device had at most ")
    assert " to device" in ended
    assert "waiting for bytes" in ended


def test_they_are_short_and_say_no_path(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_blocks()
    type(model).__name__ = name = "S" * 5000
    try:
        found = lines(tmp_path, caplog, model, "disk")
    finally:
        type(model).__name__ = "Sequential"
    assert len(found) == 2
    assert all(len(line) < _LONGEST_LINE and str(tmp_path) not in line and name not in line for line in found)


def test_nothing_is_said_by_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build_blocks()
    with offload(model, None, config_of("disk", tmp_path)):
        pass
    assert [each for each in caplog.records if each.levelno == logging.INFO] == []
