"""The entry itself: what it accepts, what it leaves behind, what it refuses, where bytes go."""

from __future__ import annotations

import copy
import gc
import json
import pickle
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import tierstore as ts
from tests.training.twins import (
    WIDTH,
    Trial,
    batch,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    step,
    steps,
)
from tierstore.errors import ConfigError, StoreClosed, UsageError
from tierstore.stats import Traffic
from tierstore.training import offload
from tierstore.training.bundles.grouping import group_parameters


def test_a_configuration_is_an_object_a_mapping_or_a_file(tmp_path: Path) -> None:
    mapping = config_of("host", tmp_path)
    file = tmp_path / "config.yaml"
    file.write_text("offload_config:\n  device: cpu\n  offload_cpu_size: 64MB\n  offload_disk_size: 0\n")
    for config in (mapping, ts.OffloadConfig.from_mapping(mapping), file, str(file)):
        model, optimizers = build_blocks()
        with offload(model, optimizers, config) as run:
            assert run.store.tier_names == ("host",)
            loss_of(model, *batch())


def test_a_wrong_configuration_changes_nothing(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with pytest.raises(ConfigError):
        offload(model, optimizers, {"no_such_key": 1})
    with pytest.raises(ConfigError, match="offload_param='disk' needs the tier 'disk'"):
        offload(model, optimizers, config_of("host", tmp_path, {"offload_param": "disk"}))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_off_does_nothing_and_still_has_the_methods() -> None:
    model, optimizers = build_blocks()
    trial = Trial(model, optimizers)
    with offload(model, optimizers, {"memory_offload": "OFF"}) as run:
        steps(2)(trial)
        assert run.clip_grad_norm_(1.0) == 0
        assert run.stats().store is None
        assert not run.stats().tiers
        assert not run.stats().traffic
        with pytest.raises(UsageError, match="OFF"):
            _ = run.store
    run.close()


def _hooks(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Count everything that hooks of any kind leave behind."""
    names = ("_forward_pre_hooks", "_forward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks",
             "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")  # fmt: skip
    found = sum(len(getattr(module, name)) for module in model.modules() for name in names)
    found += sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    return found + sum(len(value) for name, value in vars(optimizer).items() if name.endswith("_hooks"))


@every_layout
def test_closing_leaves_nothing_behind(layout: str, tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    before = _hooks(model, optimizer)
    attributes = {module: set(vars(module)) for module in model.modules()}
    run = offload(model, optimizer, config_of(layout, tmp_path))
    assert _hooks(model, optimizer) > before
    step(Trial(model, [optimizer]))
    loss_of(model, *batch()).backward()
    run.close()
    run.close()
    assert _hooks(model, optimizer) == before
    assert attributes == {module: set(vars(module)) for module in model.modules()}
    assert all(type(p) is nn.Parameter and type(p.grad) is Tensor for p in model.parameters())
    assert all(not vars(p) for p in model.parameters())
    with pytest.raises(StoreClosed):
        run.store.put("k", torch.ones(1))
    step(Trial(model, [optimizer]))


def test_a_closed_run_is_garbage(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    run = offload(model, optimizer, config_of("device", tmp_path))
    step(Trial(model, [optimizer]))
    store = weakref.ref(run.store)
    run.close()
    del run
    gc.collect()
    assert store() is None


def test_offloading_again_after_closing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Trial(*build_blocks())
    ours = Trial(*copy.deepcopy((plain.model, plain.optimizers)))
    for seed in range(3):
        torch.manual_seed(seed)
        steps(2)(plain)
        torch.manual_seed(seed)
        with offload(ours.model, ours.optimizer, config_of("three", tmp_path)):
            steps(2)(ours)
    for a, b in zip(plain.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_what_is_offloaded_already_is_refused(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, optimizers, config_of("host", tmp_path)):
        with pytest.raises(UsageError, match="is offloaded already"):
            offload(model, optimizers, config_of("host", tmp_path))
        loss_of(model, *batch())


def test_an_error_inside_the_context_restores_the_model(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()

    def stumble() -> None:
        with offload(model, optimizer, config_of("disk", tmp_path)):
            loss_of(model, *batch()).backward()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        stumble()
    assert all(type(p) is nn.Parameter and p.grad is not None for p in model.parameters())
    optimizer.step()


def test_parameters_look_like_themselves_without_being_brought(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    with offload(model, optimizers, config_of("device", tmp_path)) as run:
        weight = model[0].up.weight  # type: ignore[index]
        assert isinstance(weight, nn.Parameter)
        before = run.store.stats()
        assert weight.shape == (2 * WIDTH, WIDTH)
        assert (weight.dtype, weight.device.type, weight.dim()) == (torch.float32, "cpu", 2)
        assert (weight.stride(), weight.is_contiguous(), weight.numel()) == ((WIDTH, 1), True, 2 * WIDTH**2)
        assert weight.requires_grad
        assert weight.is_leaf
        assert weight.grad is None
        assert len(weight) == 2 * WIDTH
        assert {weight: 1}[weight] == 1
        after = run.store.stats()
        assert (before.hits, before.faults) == (after.hits, after.faults)
        assert "Parameter containing" in repr(weight)


def test_frozen_parameters_are_never_written_back(tmp_path: Path) -> None:
    model = blocks(4).requires_grad_(requires_grad=False)
    inputs, classes = batch()
    inputs.requires_grad_()
    with offload(model, None, config_of("device", tmp_path)) as run:
        loss_of(model, inputs, classes).backward()
        written = _writes(run.store)
        for _ in range(3):
            loss_of(model, inputs, classes).backward()
        assert _writes(run.store) == written
        assert run.store.stats().evictions > 20


def test_forward_and_backward_write_no_parameter_back(tmp_path: Path) -> None:
    model, (optimizer,) = build_blocks()
    with offload(model, optimizer, config_of("device", tmp_path)) as run:
        for _ in range(2):
            loss_of(model, *batch())
        copies = _writes(run.store)
        for _ in range(3):
            loss_of(model, *batch())
        assert _writes(run.store) == copies


def _writes(store: ts.Store) -> int:
    return store.stats().traffic.get(("device", "host"), Traffic(0, 0)).copies


@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_without_auto_offload_everything_goes_where_it_is_told(tmp_path: Path, place: str) -> None:
    wish = {"auto_offload": False, "offload_param": place, "offload_grad": place, "offload_optimizer": place,
            "max_device_memory": "16MB", "offload_cpu_size": "16MB", "offload_disk_size": "16MB"}  # fmt: skip
    trial = Trial(*build_blocks())
    tier = {"cpu": "host", "disk": "disk"}[place]
    with offload(trial.model, trial.optimizer, config_of("three", tmp_path, wish)) as run:
        step(trial)
        loss_of(trial.model, *batch()).backward()
        run._session.bindings.sweep()  # type: ignore[union-attr]
        run.store.evict(*run.store.keys(), to=tier).result()  # returns when what is under way has ended
        kinds = {key.split("/")[0] for key in run.store}
        assert kinds == {"param", "grad", "state"}
        assert all(run.store.where(key)[0] == tier for key in run.store)


def test_step_times_are_told(tmp_path: Path) -> None:
    trial = Trial(*build_blocks())
    with offload(trial.model, trial.optimizer, config_of("disk", tmp_path)) as run:
        steps(2)(trial)
        stats = run.stats()
    assert stats.forward_s > 0
    assert stats.backward_s > 0
    assert stats.optimizer_s > 0
    assert stats.store is not None
    assert stats.tiers["host"] is stats.store.tiers["host"]
    assert stats.traffic is stats.store.traffic
    assert stats.stall_s == stats.store.stall_seconds
    assert copy.deepcopy(stats) == pickle.loads(pickle.dumps(stats)) == stats
    told = json.loads(json.dumps(stats.as_dict()))
    assert told["optimizer_s"] == stats.optimizer_s
    assert told["store"] == json.loads(json.dumps(stats.store.as_dict()))


def test_a_model_of_odd_parameters_is_refused_by_name(tmp_path: Path) -> None:
    lazy = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(UsageError, match=r"'0\.weight' cannot be offloaded: it has no shape yet"):
        offload(lazy, None, config_of("host", tmp_path))
    sparse = nn.Module()
    sparse.weight = nn.Parameter(torch.eye(3).to_sparse())
    with pytest.raises(UsageError, match="'weight' cannot be offloaded: it is sparse"):
        offload(sparse, None, config_of("host", tmp_path))


def test_small_modules_travel_together_and_large_ones_alone() -> None:
    model = blocks(2)
    optimizer = torch.optim.SGD(model.parameters())
    groups = group_parameters(model, [optimizer], small_bytes=10_000)
    assert [group.names for group in groups] == [
        ["0.norm.weight", "0.norm.bias"],
        ["0.up.weight", "0.up.bias"],
        ["0.down.weight", "0.down.bias"],
        ["1.norm.weight", "1.norm.bias"],
        ["1.up.weight", "1.up.bias"],
        ["1.down.weight", "1.down.bias"],
        ["2.weight", "2.bias"],
    ]
    (together,) = group_parameters(nn.Sequential(nn.LayerNorm(4), nn.LayerNorm(4)), [], small_bytes=10_000)
    assert together.names == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert len(together.modules) == 2


def test_parameters_of_different_optimizers_and_frozen_ones_travel_apart() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[2].requires_grad_(requires_grad=False)
    optimizers = [torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[1:].parameters())]
    groups = group_parameters(model, optimizers, small_bytes=10_000)
    found = [(group.names[0], group.optimizer) for group in groups]
    assert found == [("0.weight", 0), ("1.weight", 1), ("2.weight", 1)]


def test_layers_that_leave_their_fast_path_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(
        nn.Linear(16, 16),
        nn.TransformerEncoderLayer(16, 4, 64, batch_first=True),
        nn.TransformerEncoderLayer(16, 4, 64),  # it has no fast path
    )
    with offload(model, None, config_of("host", tmp_path)):
        assert "1 transformer encoder layers do not take" in caplog.text
        assert "differ: 1. " in caplog.text
    caplog.clear()
    with offload(model, None, config_of("host", tmp_path), ignored=["1.*"]):
        assert not caplog.records
