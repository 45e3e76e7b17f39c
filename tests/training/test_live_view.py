"""An open run can be looked at from outside, by its process and directory, and nothing of that is left."""

from __future__ import annotations

import itertools
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.forked import in_child
from tierstore import live
from tierstore.cli import top, top_view
from tierstore.integrations.logged import scalars
from tierstore.live import places, server
from tierstore.training import Offload, offload

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(server, "_room", server._Everything())  # another test may have left a run open
    with tempfile.TemporaryDirectory(prefix="ts") as place:
        monkeypatch.setattr(places, "folders", lambda: [Path(place) / "tierstore"])
        yield Path(place) / "tierstore"


class Trained:
    """A small model in training, offloaded to a device that holds a part of it, and to disk."""

    def __init__(self, path: Path, **more: object) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.config = {
            "device": "emulated",
            "max_device_memory": "60KB",
            "offload_cpu_size": "40KB",
            "offload_disk_size": "16MB",
            "offload_path": str(path / "offload"),
            **more,
        }
        self.run: Offload = offload(self.model, self.optimizer, self.config)

    def step(self) -> float:
        loss: torch.Tensor = self.model(torch.ones(4, 32)).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach())


def test_an_open_run_is_seen_with_what_it_has_done(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    with trained.run as run:
        for _ in range(3):
            trained.step()
        path, process = top.find(str(tmp_path / "offload"))
        (seen,) = process.runs
        assert seen.name == "Sequential"
        assert "test_live_view.py" in seen.opened_by
        assert seen.paths == (str(tmp_path / "offload"),)
        assert set(seen.metrics) == set(run.metrics())
        assert seen.metrics["tierstore_run_steps_total"] == 3
        assert seen.metrics['tierstore_tier_capacity_bytes{tier="host"}'] == 40 * 1024
        said = "\n".join(top_view.lines(process, process))
        for text in ("device", "host", "disk", "steps 3", "host to device"):
            assert text in said
    assert not path.exists()


def test_a_run_that_wants_none_has_no_socket_and_no_thread(tmp_path: Path, folder: Path) -> None:
    trained = Trained(tmp_path, live_view=False)
    with trained.run:
        trained.step()
        assert not folder.exists()


def test_several_runs_of_a_process_are_seen_together(tmp_path: Path, folder: Path) -> None:
    first, second = Trained(tmp_path / "a"), Trained(tmp_path / "b")
    with first.run:
        with second.run:
            assert len(live.read(folder / f"{os.getpid()}.sock").runs) == 2
        assert len(live.read(folder / f"{os.getpid()}.sock").runs) == 1
    assert list(folder.iterdir()) == []


def test_a_run_that_cannot_be_opened_leaves_nothing(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("at the very end")

    monkeypatch.setattr("tierstore.training.tables.division.AllHere.opened", fail)
    with pytest.raises(RuntimeError, match="at the very end"):
        Trained(tmp_path)
    assert list(folder.iterdir()) == []


def test_where_nothing_can_be_shown_a_run_goes_on(tmp_path: Path, folder: Path) -> None:
    folder.write_text("a file", encoding="utf-8")
    trained = Trained(tmp_path)
    with trained.run:
        assert trained.step() > 0
    assert folder.read_text(encoding="utf-8") == "a file"


def test_who_looks_all_the_time_changes_no_bit(tmp_path: Path, folder: Path) -> None:
    plain = Trained(tmp_path / "a", live_view=False)
    with plain.run:
        expected = [plain.step() for _ in range(8)]
    trained, ended, looks = Trained(tmp_path / "b"), threading.Event(), []

    def look() -> None:
        while not ended.is_set():
            looks.append(live.read(folder / f"{os.getpid()}.sock", 30))

    looking = threading.Thread(target=look)
    looking.start()
    try:
        found = [trained.step() for _ in range(8)]
    finally:
        ended.set()
        looking.join()
        trained.run.close()
    assert found == expected
    assert looks
    assert not [run.fault for each in looks for run in each.runs if run.fault]
    for before, now in itertools.pairwise(looks):
        for name, value in before.runs[0].metrics.items():
            if name.partition("{")[0].endswith("_total"):
                assert now.runs[0].metrics[name] >= value, f"{name} only grows"


def test_the_child_of_a_fork_shows_nothing_and_closes_nothing(tmp_path: Path, folder: Path) -> None:
    trained = Trained(tmp_path)
    with trained.run as run:
        in_child(run.close)
        assert live.read(folder / f"{os.getpid()}.sock").runs[0].fault == ""
        trained.step()


def test_a_run_that_is_closed_has_its_metrics_still(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    with trained.run as run:
        trained.step()
        before = run.metrics()
    after = run.metrics()
    assert after.keys() >= before.keys(), "closing copies to the caller"
    assert after["tierstore_run_steps_total"] == 1
    assert scalars(run)["tierstore/run_steps_total"] == 1


def test_without_a_store_a_run_has_metrics_of_its_own(tmp_path: Path) -> None:
    trained = Trained(tmp_path, memory_offload="OFF")
    with trained.run as run:
        assert set(run.metrics()) >= {"tierstore_run_steps_total", "tierstore_run_stall_seconds_total"}
