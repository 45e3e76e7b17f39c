"""The figures of sharded processes at a small scale, with two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from bench import shards
from bench.command import Settings
from bench.record import Figure
from bench.training import Floor
from bench.workload import Workload
from tests.sampling import too_long_for_ci

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")


def _asked(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Figure:
    monkeypatch.setattr(shards, "PROCESSES", 2)
    figure = shards.QUESTIONS[name](Settings(tmp_path, repeats=1, warmups=0, scale=0.04))
    assert figure.name == name
    assert figure.reached > 0
    assert figure.details["losses"] == "18 of 18 equal, bit for bit"  # of 3 turns of 3 steps in both
    return figure


@pytest.mark.slow
@too_long_for_ci
def test_shards_on_disk_take_turns_with_fsdp_and_the_raw_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = _asked("shards-disk", tmp_path, monkeypatch)
    workload = Workload.scaled(shards.SHARE * 0.04)
    floor = Floor.of(workload.parameter_bytes, shards.host_bytes(workload))
    moved_mib = [float(figure.details[way].split()[0]) for way in ("disk to host", "host to disk")]
    least_mib = [each / 1024**2 for each in (floor.read_bytes, floor.write_bytes)]
    assert all(moved >= 0.8 * least for moved, least in zip(moved_mib, least_mib, strict=True))  # first step
    assert figure.reached <= float(figure.details["times bytes alone"].split()[0]) * 1.01


@pytest.mark.slow
@pytest.mark.long
def test_shards_in_host_memory_take_turns_with_the_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = _asked("shards-host", tmp_path, monkeypatch)
    assert "host to disk" not in figure.details


def test_a_process_that_fails_fails_the_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "PROCESSES", 1)
    with pytest.raises(RuntimeError, match=r"ended with \[1\]"):
        shards.ask("nothing of the kind", Settings(tmp_path))
