"""``run.save`` and ``run.load`` resume bit for bit; ``weights=`` fills a model that has none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.training.twins import (
    WIDTH,
    Block,
    Optimizer,
    Trial,
    assert_equal_lists,
    assert_equal_models,
    assert_equal_states,
    blocks,
    build_blocks,
    config_of,
    every_layout,
    loss_of,
    step,
)
from tierstore.errors import UsageError
from tierstore.training import offload


def build(seed: int = 0) -> tuple[nn.Module, Sequence[Optimizer]]:
    """Return a model with buffers and two optimizers of different kinds."""
    torch.manual_seed(seed)
    model = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.Linear(WIDTH, 5))
    first = torch.optim.AdamW(model[:2].parameters(), lr=torch.tensor(1e-2), betas=(0.8, 0.95))
    second = torch.optim.SGD(model[2:].parameters(), lr=0.1, momentum=0.9)
    return model, [first, second]


def some_steps(trial: Trial, seed: int, count: int = 2) -> None:
    torch.manual_seed(seed)
    for _ in range(count):
        step(trial)


@every_layout
def test_a_checkpoint_resumes_bit_for_bit(layout: str, tmp_path: Path) -> None:
    plain = Trial(*build())
    some_steps(plain, 1)
    some_steps(plain, 2)
    first = Trial(*build())
    with offload(first.model, first.optimizers, config_of(layout, tmp_path)) as run:
        some_steps(first, 1)
        run.save(tmp_path / "saved")
    second = Trial(*build(seed=9))
    with offload(second.model, second.optimizers, config_of(layout, tmp_path)) as run:
        some_steps(second, 5, 1)
        run.load(tmp_path / "saved")
        second.logged.clear()
        some_steps(second, 2)
    assert_equal_lists(plain.logged[len(first.logged) :], second.logged)
    assert_equal_models(plain.model, second.model)
    for expected, found in zip(plain.optimizers, second.optimizers, strict=True):
        assert_equal_states(expected, found)


def test_the_weights_are_a_safetensors_file_with_the_names_of_the_state_dict(tmp_path: Path) -> None:
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers, config_of("three", tmp_path)) as run:
        some_steps(trial, 1)
        run.save(tmp_path / "saved")
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    expected = trial.model.state_dict()
    assert set(saved) == set(expected)
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())


def test_a_checkpoint_goes_between_offloaded_and_plain(tmp_path: Path) -> None:
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers, config_of("disk", tmp_path)) as run:
        some_steps(trial, 1)
        run.save(tmp_path / "saved")
    other = Trial(*build(seed=3))
    with offload(other.model, other.optimizers, {"memory_offload": "OFF"}) as run:
        run.load(tmp_path / "saved")
        assert_equal_models(trial.model, other.model)
        run.save(tmp_path / "again")
    for name in ("model.safetensors", "optimizer.safetensors", "optimizer.json"):
        assert (tmp_path / "saved" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_a_later_checkpoint_replaces_the_former(tmp_path: Path) -> None:
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers, config_of("host", tmp_path)) as run:
        run.save(tmp_path / "saved")
        some_steps(trial, 1)
        run.save(tmp_path / "saved")
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]
    saved = load_file(tmp_path / "saved" / "model.safetensors")
    assert torch.equal(saved["3.weight"], trial.model.state_dict()["3.weight"])


def test_a_value_that_cannot_be_saved_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers, config_of("host", tmp_path)) as run:
        run.save(tmp_path / "saved")
        before = (tmp_path / "saved" / "optimizer.json").read_bytes()
        trial.optimizer.param_groups[0]["odd"] = object()
        with pytest.raises(UsageError, match="'0/group 0/odd' is a object"):
            run.save(tmp_path / "saved")
        assert (tmp_path / "saved" / "optimizer.json").read_bytes() == before
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    trial = Trial(*build())
    with offload(trial.model, trial.optimizers, config_of("host", tmp_path)) as run:
        run.save(tmp_path / "saved")
    other, optimizers = build_blocks()
    before = [p.detach().clone() for p in other.parameters()]
    with offload(other, optimizers, config_of("host", tmp_path)) as run:
        with pytest.raises(UsageError, match=r"missing: 1\.norm\.weight.*not in the model: 1\.bias"):
            run.load(tmp_path / "saved")
        with pytest.raises(UsageError, match="is not a checkpoint"):
            run.load(tmp_path / "nothing")
    assert_equal_lists(before, list(other.parameters()))


# ---------------------------------------------------------------------- weights=


def weights_file(tmp_path: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(4)
    model = blocks()
    path = tmp_path / "weights.safetensors"
    save_file(model.state_dict(), path)
    return path, model


@every_layout
def test_a_model_without_values_gets_them_from_a_file(layout: str, tmp_path: Path) -> None:
    path, plain = weights_file(tmp_path)
    reference = Trial(plain, [torch.optim.Adam(plain.parameters(), lr=1e-2)])
    some_steps(reference, 1)
    with torch.device("meta"):
        model = blocks()
    trial = Trial(model, [torch.optim.Adam(model.parameters(), lr=1e-2)])
    with offload(model, trial.optimizers, config_of(layout, tmp_path), weights=path):
        some_steps(trial, 1)
    assert_equal_lists(reference.logged, trial.logged)
    assert_equal_models(plain, model)


def test_weights_also_fill_a_model_that_is_not_offloaded(tmp_path: Path) -> None:
    path, plain = weights_file(tmp_path)
    with torch.device("meta"):
        model = blocks()
    with offload(model, None, {"memory_offload": "OFF"}, weights=path):
        assert_equal_models(plain, model)


def test_buffers_and_tied_parameters_are_found_under_any_name(tmp_path: Path) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8, bias=False)
            self.second = nn.Linear(8, 8, bias=False)
            self.second.weight = self.first.weight
            self.norm = nn.BatchNorm1d(8)

    plain = Small()
    plain.norm.running_mean = torch.arange(8.0)
    state = plain.state_dict()
    del state["first.weight"]
    save_file(state, tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = Small()
    with offload(model, None, config_of("disk", tmp_path), weights=tmp_path / "w.safetensors"):
        pass
    assert model.second.weight is model.first.weight
    assert_equal_models(plain, model)


def test_every_name_that_does_not_fit_is_listed(tmp_path: Path) -> None:
    path, plain = weights_file(tmp_path)
    state = plain.state_dict()
    del state["0.norm.bias"]
    state["extra"] = torch.zeros(1)
    state["3.bias"] = torch.zeros(7)
    save_file(state, path)
    with torch.device("meta"):
        model = blocks()
    with pytest.raises(UsageError) as caught:
        offload(model, None, config_of("host", tmp_path), weights=path)
    text = str(caught.value)
    assert "missing: 0.norm.bias" in text
    assert "not in the model: extra" in text
    assert "3.bias is [7], the model's is [5]" in text
    assert all(p.is_meta for p in model.parameters())


def test_a_file_that_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"not this")
    with pytest.raises(UsageError, match="cannot read the weights in"):
        offload(blocks(), None, config_of("host", tmp_path), weights=tmp_path / "bad")


def test_buffers_that_no_file_holds_are_refused(tmp_path: Path) -> None:
    class Rotary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)
            self.register_buffer("table", torch.ones(3), persistent=False)

    save_file(Rotary().state_dict(), tmp_path / "w.safetensors")
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(UsageError, match="no file holds them: table"):
        offload(model, None, config_of("host", tmp_path), weights=tmp_path / "w.safetensors")


def test_a_model_without_values_and_without_weights_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = blocks()
    with pytest.raises(UsageError, match=r"'0\.norm\.weight' cannot be offloaded.*meta.*weights="):
        offload(model, None, config_of("host", tmp_path))


def test_inference_alone_needs_no_optimizer(tmp_path: Path) -> None:
    path, plain = weights_file(tmp_path)
    with torch.device("meta"):
        model = blocks()
    inputs = torch.randn(3, WIDTH)
    expected = plain(inputs)
    with offload(model, None, config_of("three", tmp_path), weights=path), torch.inference_mode():
        for _ in range(4):
            assert torch.equal(model(inputs), expected)


def test_loading_over_values_that_are_there(tmp_path: Path) -> None:
    path, plain = weights_file(tmp_path)
    model = blocks()
    with offload(model, None, config_of("device", tmp_path), weights=path):
        loss_of(model, torch.randn(2, WIDTH), torch.tensor([0, 1]))
    assert_equal_models(plain, model)
