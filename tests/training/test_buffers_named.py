"""What names large buffers and counts them: patterns, needs, checkpoints, files, the ends of a run."""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest
import torch
from torch import Tensor, nn

from tests.training.buffer_models import (
    ALL,
    KINDS,
    Holder,
    Shared,
    Writing,
    head,
    in_place,
    of,
    travels,
)
from tests.training.twins import (
    WIDTH,
    Optimizer,
    Trial,
    adam,
    assert_equal_models,
    assert_same,
    batch,
    config_of,
    every_layout,
    is_simulated,
    step,
    steps,
)
from tierstore.errors import CapacityError, UsageError
from tierstore.training import Offload, offload

# ---------------------------------------------------------------------- what names them


def test_patterns_name_buffers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(Holder(KINDS["float"]), Holder(KINDS["float"]), Holder(KINDS["float"]), head())
    config = config_of("three", tmp_path, ALL)
    with offload(model, adam(model), config, ignored=[r"0\.held"], pinned=[r"1\.held"]) as run:
        assert [travels(each) for each in model.buffers()] == [False, True, True]
        assert all(map(travels, model.parameters()))
        for _ in range(3):
            model(batch()[0]).sum().backward()
            assert run.store.where("buffer/1.held")[0] == run.store.tier_names[0]
    with offload(model, None, config, ignored=["0"]):
        assert [travels(each) for each in model.buffers()] == [False, True, True]
    assert not caplog.records
    with pytest.raises(UsageError, match=r"1 parameters and buffers are both ignored and pinned \('0.held'"):
        offload(model, None, config, ignored=[r"0\.held"], pinned=["0"])


def test_what_a_module_needs_together_is_known_before_the_first_step(tmp_path: Path) -> None:
    large = nn.Linear(WIDTH, WIDTH)
    large.register_buffer("held", torch.zeros(20 * 1024))
    model = nn.Sequential(large, head())
    for layout, key in [("three", "max_device_memory"), ("disk", "offload_cpu_size")]:
        config = config_of(layout, tmp_path, {**ALL, "offload_disk_size": "64MB", key: "85KB"})
        text = r"'0' cannot be run .*its forward needs the bundles of '0.weight', '0.held', .* 89.* KiB"
        with pytest.raises(CapacityError, match=text):
            offload(model, None, config)
        assert not any(map(travels, model.buffers()))
        config = config_of(layout, tmp_path, {**ALL, "offload_disk_size": "64MB", key: "112KB"})
        with offload(model, None, config), torch.no_grad():
            model(batch()[0])


# ---------------------------------------------------------------------- checkpoints


def durable(tmp_path: Path, more: dict[str, object]) -> dict[str, object]:
    """Return a configuration whose disk survives."""
    return config_of("disk", tmp_path, {**ALL, "durable": True, "offload_disk_size": "64MB", **more})


def built(seed: int) -> tuple[nn.Module, Sequence[Optimizer]]:
    """Return a model with buffers of both kinds, and its optimizer."""
    torch.manual_seed(seed)
    return of(
        lambda: Writing(in_place),
        Shared,
        lambda: Holder(KINDS["mask"]),
        lambda: Holder(KINDS["float"], persistent=False),
        lambda: nn.BatchNorm1d(WIDTH),
    )()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, {}),
        ({}, {"buffer_min_size": None}),
        ({"buffer_min_size": None}, {}),
        ({}, {"buffer_min_size": "4KB"}),
    ],
)
def test_a_checkpoint_holds_buffers_wherever_they_were(
    before: dict[str, object], after: dict[str, object], tmp_path: Path
) -> None:
    model, optimizers = built(0)
    with offload(model, optimizers, durable(tmp_path, before)) as run:
        trial = Trial(model, optimizers, run)
        steps(3)(trial)
        run.checkpoint()
        expected = {name: each.clone() for name, each in model.state_dict().items()}
        steps(1)(trial)
    model, optimizers = built(1)
    passing = model.get_buffer("3.held").clone()
    with offload(model, optimizers, durable(tmp_path, after)) as run:
        found = model.state_dict()
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert torch.equal(value, found[name]), name
        assert torch.equal(model.get_buffer("3.held"), passing)
        run.checkpoint()
    other, others = built(2)
    cast("nn.Sequential", other)[2].register_buffer("more", torch.zeros(3))
    with pytest.raises(UsageError, match=r"the buffer 2.more \(float32\[3\]\) was not saved"):
        offload(other, others, durable(tmp_path, after))


@pytest.mark.skipif(is_simulated, reason="safetensors does not know it")
@every_layout
def test_saved_files_hold_buffers_and_fill_models_without_values(layout: str, tmp_path: Path) -> None:
    model, optimizers = built(0)
    with offload(model, optimizers, config_of(layout, tmp_path, ALL)) as run:
        steps(2)(Trial(model, optimizers, run))
        run.save(tmp_path / "saved")
        steps(1)(Trial(model, optimizers, run))
        changed = model.get_buffer("0.average").clone()
        run.load(tmp_path / "saved")
        assert not torch.equal(model.get_buffer("0.average"), changed)
        expected = {name: each.clone() for name, each in model.state_dict().items()}
    built_anew, _ = built(1)
    meta = copy.deepcopy(built_anew)
    for module in meta.modules():
        for name, each in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            if name not in module._non_persistent_buffers_set:
                value = each.detach().to("meta")
                setattr(module, name, nn.Parameter(value) if isinstance(each, nn.Parameter) else value)
    first = cast("Shared", meta.get_submodule("1"))
    first.two.held = first.one.held
    first.other.held = first.one.held
    buffers = list(meta.buffers())
    for target in (built_anew, meta):
        config = config_of(layout, tmp_path, ALL)
        with offload(target, None, config, weights=tmp_path / "saved" / "model.safetensors"):
            assert travels(target.get_buffer("2.held"))
            for name, value in expected.items():
                assert torch.equal(
                    target.get_parameter(name) if "linear" in name else target.state_dict()[name], value
                )
        assert torch.equal(target.state_dict()["2.held"], expected["2.held"])
    assert [id(each) for each in buffers if each.dim()][:1] == [id(meta.get_buffer("0.average"))]


# ---------------------------------------------------------------------- modes and ends


def test_a_suspended_run_has_no_buffer_on_the_device(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        step(trial)
        if trial.run is not None:
            trial.run.suspend()
            assert trial.run.stats().tiers["device"].charged_bytes == 0
            trial.log(trial.model.state_dict()["0.held"])
            with pytest.raises(UsageError, match="suspended"):
                trial.model.get_buffer("0.held").sum()
            trial.run.resume()
        else:
            trial.log(trial.model.state_dict()["0.held"])
        step(trial)

    build = of(*[lambda: Holder(KINDS["float"])] * 3)
    assert_same(build, loop, "three", tmp_path, ALL)


@every_layout
def test_recomputed_and_swapped_modules_use_their_buffers(layout: str, tmp_path: Path) -> None:
    from torch.utils.checkpoint import checkpoint

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Writing(in_place)

        def forward(self, x: Tensor) -> Tensor:
            return cast("Tensor", checkpoint(self.inner, x, use_reentrant=False))

    assert_same(of(*[Again] * 3, lambda: Holder(KINDS["float"])), steps(3), layout, tmp_path, ALL)


def test_what_an_interrupted_opening_took_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierstore.training.session import Session

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    model = nn.Sequential(Holder(KINDS["float"]), head())
    plain = copy.deepcopy(model)
    monkeypatch.setattr(Session, "watch", fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        offload(model, None, config_of("three", tmp_path, ALL))
    assert_equal_models(plain, model)


def test_nothing_is_left_of_a_run(tmp_path: Path) -> None:
    model = nn.Sequential(Holder(KINDS["float"]), head())
    run: Offload = offload(model, adam(model), config_of("three", tmp_path, ALL))
    model(batch()[0]).sum().backward()
    run.close()
    gc.collect()
    assert all(type(each) is Tensor and each.is_contiguous() for each in model.buffers())
    model.get_buffer("0.held").zero_()
    ones = torch.ones(1, WIDTH)
    assert torch.equal(model[0](ones), model.get_submodule("0.linear")(ones))
