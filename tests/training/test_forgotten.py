"""Runs that nobody closed: what is dropped gives its directory back, and a cell runs again."""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import tierstore as ts
from tierstore.config.host_memory import HostRoom
from tierstore.errors import StoreClosed, UsageError
from tierstore.training import Offload, offload

SIZES: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "4MB"},
    "device": {
        "device": "emulated",
        "max_device_memory": "64KB",
        "offload_cpu_size": "48KB",
        "offload_disk_size": "4MB",
    },
    "durable": {"device": "cpu", "offload_cpu_size": "48KB", "offload_disk_size": "4MB", "durable": True},
}
PATIENCE_S = 60.0
every_layout = pytest.mark.parametrize("layout", SIZES)


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> Tensor:
    losses = []
    for _ in range(steps):
        loss = model(torch.ones(2, 32)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses)


def config_of(layout: str, path: Path) -> dict[str, object]:
    return {**SIZES[layout], "offload_path": str(path)}


# ---------------------------------------------------------------------- what is dropped


@every_layout
def test_a_run_that_is_dropped_with_its_model_gives_its_directory_back(layout: str, tmp_path: Path) -> None:
    model, optimizer = build()
    run = offload(model, optimizer, config_of(layout, tmp_path / "x"))
    train(model, optimizer)
    store = weakref.ref(run.store)
    del run, model, optimizer
    # What has a finalizer goes with one collection, what only that has kept with the next, and what bytes on
    # their way have kept with one after they have moved.
    begin_s = time.monotonic()
    while store() is not None or (layout != "durable" and (tmp_path / "x").exists()):
        assert time.monotonic() - begin_s < PATIENCE_S
        gc.collect()
    with offload(*build(), config_of(layout, tmp_path / "x")):
        pass


def test_a_run_that_nobody_collected_makes_way_for_the_next_in_its_directory(tmp_path: Path) -> None:
    gc.disable()
    try:
        for _ in range(3):
            model, optimizer = build()
            run = offload(model, optimizer, config_of("host", tmp_path))
            train(model, optimizer)
            del run, model, optimizer  # as a cell does that builds all of them again
    finally:
        gc.enable()


def test_a_store_whose_bytes_are_on_their_way_makes_way_when_they_have_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, writes = threading.Event(), threading.Event()
    write, sleep = os.pwritev, time.sleep

    def held(fd: int, buffers: list[memoryview], offset: int) -> int:
        writes.set()
        assert may_write.wait(PATIENCE_S)
        return write(fd, buffers, offset)

    def pause(seconds: float) -> None:
        if seconds:
            may_write.set()
        sleep(seconds)

    disk = ts.TierConfig("disk", "files", "4MB", options={"path": str(tmp_path), "engine": "threads"})
    config = ts.StoreConfig([ts.TierConfig("host", "pinned", "64KB"), disk])
    store = ts.Store(config)
    monkeypatch.setattr(os, "pwritev", held)
    store.put("a", torch.ones(1000))
    store.evict("a", to="disk")
    assert writes.wait(PATIENCE_S)
    monkeypatch.setattr(time, "sleep", pause)
    del store
    with ts.Store(config) as store:
        assert list(store) == []
    assert may_write.is_set()


def test_a_run_whose_handle_alone_is_dropped_goes_on(tmp_path: Path) -> None:
    plain, ours = build(), build()
    expected = train(*plain, 4)
    offload(*ours, config_of("host", tmp_path))
    gc.collect()
    assert torch.equal(train(*ours, 4), expected)


def test_a_parameter_that_is_kept_has_its_values_or_says_that_they_are_gone(tmp_path: Path) -> None:
    model, optimizer = build()
    values = [each.detach().clone() for each in model.parameters()]
    kept, frozen, *_ = model.parameters()
    frozen.requires_grad = False
    run = offload(model, optimizer, config_of("host", tmp_path))
    del run, model, optimizer, _
    gc.collect()
    assert torch.equal(kept, values[0])  # by autograd's hook it keeps the run
    assert torch.equal(frozen, values[1])
    del kept
    gc.collect()
    with pytest.raises(StoreClosed, match=r"'0\.bias' are gone.*without run\.close\(\)"):
        frozen.sum()


def test_hooks_for_all_optimizers_are_taken_away_after_a_run_that_was_dropped(tmp_path: Path) -> None:
    gc.collect()
    before = len(_global_optimizer_pre_hooks)
    for _ in range(3):
        offload(*build(), config_of("host", tmp_path))
        train(*build())
        gc.collect()
        assert len(_global_optimizer_pre_hooks) <= before + 1


# ---------------------------------------------------------------------- a directory that is in use


def test_a_directory_that_is_in_use_names_the_call_that_has_it(tmp_path: Path) -> None:
    first = offload(*build(), config_of("host", tmp_path))
    with pytest.raises(
        UsageError, match=r"offload\(\.\.\.\) in .*test_forgotten\.py, line \d+, opened it"
    ) as raised:
        offload(*build(), config_of("host", tmp_path))
    assert "close()" in str(raised.value)
    first.close()
    offload(*build(), config_of("host", tmp_path)).close()


@pytest.mark.parametrize("is_durable", [False, True])
def test_a_store_that_is_in_use_names_the_call_that_has_it(is_durable: bool, tmp_path: Path) -> None:
    def config() -> ts.StoreConfig:
        settings = config_of("durable" if is_durable else "host", tmp_path)
        return ts.OffloadConfig.from_mapping(settings).store_config()

    said = r"Store\(\.\.\.\) in .*test_forgotten\.py, line \d+, opened it"
    with ts.Store(config()), pytest.raises(UsageError, match=said):
        ts.Store(config())
    store = ts.Store(config())
    store.put("a", torch.ones(10))
    del store
    with ts.Store(config()) as store:
        assert list(store) == []


# ---------------------------------------------------------------------- a cell that runs again


@pytest.mark.parametrize("layout", ["host", "device"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_a_cell_that_runs_again_replaces_its_own_run_and_loses_nothing(
    layout: str, is_kept: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours = build(), build()
    expected = train(*plain, 6)
    found, runs = [], []
    for _ in range(3):
        run = offload(
            *ours, config_of(layout, tmp_path)
        )  # which is bound to the name still, but for the first
        if is_kept:
            runs.append(run)
        else:
            del run
        found.append(train(*ours))
    assert torch.equal(torch.cat(found), expected)
    assert sum("takes its place" in record.getMessage() for record in caplog.records) == 2
    assert {record.levelno for record in caplog.records if "takes its place" in record.getMessage()} == {
        logging.WARNING
    }
    for each in runs:
        each.close()


def test_a_run_whose_optimizer_was_built_again_is_replaced(tmp_path: Path) -> None:
    model, optimizer = build()
    offload(model, optimizer, config_of("host", tmp_path))
    train(model, optimizer)
    fresh = torch.optim.SGD(model.parameters(), lr=0.1)
    with offload(model, fresh, config_of("host", tmp_path)):
        train(model, fresh)
    assert optimizer.state[next(model.parameters())]["exp_avg"].sum().isfinite()


def refused(model: nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, object], why: str) -> None:
    with pytest.raises(
        UsageError, match=rf"offloaded already: offload\(.*test_forgotten.*{why}.*run\.close\(\)"
    ):
        offload(model, optimizer, config)


def test_a_run_that_is_durable_is_not_replaced(tmp_path: Path) -> None:
    model, optimizer = build()
    run = offload(model, optimizer, config_of("durable", tmp_path))
    refused(model, optimizer, config_of("durable", tmp_path), "durable")
    train(model, optimizer)
    run.close()


def test_a_run_is_not_replaced_inside_its_block_or_in_the_midst_of_a_pass(tmp_path: Path) -> None:
    model, optimizer = build()
    config = config_of("host", tmp_path)
    with offload(model, optimizer, config):
        refused(model, optimizer, config, "with block")
        train(model, optimizer)
    run: Offload = offload(model, optimizer, config)
    handle = model.get_submodule("2").register_forward_hook(
        lambda *_: refused(model, optimizer, config, "under way")
    )
    train(model, optimizer)
    handle.remove()
    run.close()


def test_a_run_that_memory_cannot_take_back_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = build()
    run = offload(model, optimizer, config_of("host", tmp_path))
    narrow = HostRoom(1000, "the limit of a test", counts_addresses=True)
    monkeypatch.setattr("tierstore.training.budgets.host_room.host_rooms", lambda: [narrow])
    refused(model, optimizer, config_of("host", tmp_path), "the limit of a test leaves 1000 B")
    train(model, optimizer)
    run.close()


def test_a_cell_that_runs_again_loses_nothing_of_a_run_that_was_to_be_released(tmp_path: Path) -> None:
    model, optimizer = build()
    former = offload(model, optimizer, config_of("host", tmp_path), on_close="release")
    train(model, optimizer)
    before = model[0].weight.detach().clone()  # type: ignore[index]
    with offload(model, optimizer, config_of("host", tmp_path)):
        assert torch.equal(model[0].weight, before)  # type: ignore[index]
    del former
