"""How runs with swap and recompute end: nothing is left in force, nothing of an activation is durable."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.one_budget import Way, build, document, train
from tests.training.swap_models import Llama, inputs
from tests.training.twins import Trial, assert_equal_lists, assert_equal_models, assert_equal_states
from tierstore.errors import UsageError
from tierstore.training import offload

QUIET = Way(is_logging=False)
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EVERYTHING = {"swap": "operators swapped", "recompute": "operators recomputed"}


def assert_ordinary(model: nn.Module, *, may_keep: int = 0) -> None:
    """Nothing is left on the model and in force in this thread."""
    for module in model.modules():
        for name in HOOKS:
            assert len(getattr(module, name)) <= may_keep, (type(module), name)
        assert "forward" not in vars(module)
    assert all(type(each) is nn.Parameter for each in model.parameters())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    assert torch._C._autograd._top_saved_tensors_default_hooks(*(True,)) is None
    model(inputs()).sum().backward()


class InterruptionError(Exception):
    """Ends a step in its midst."""


@pytest.mark.parametrize("error", [InterruptionError, KeyboardInterrupt])
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("tiers", ["device and host", "device, host, disk"])
def test_a_run_that_an_exception_ends_leaves_nothing(
    tmp_path: Path, error: type[BaseException], phase: str, tiers: str
) -> None:
    trial = build()
    model = trial.model
    assert isinstance(model, Llama)
    calls = 0

    def interrupt(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise error

    def spoil(module: nn.Module, args: object, output: Tensor) -> None:
        if phase == "forward":
            interrupt()
        else:
            output.register_hook(interrupt)

    handle = model.layers[1].register_forward_hook(spoil)
    with (
        pytest.raises(error),
        offload(model, list(trial.optimizers), document(tmp_path, tiers=tiers, **EVERYTHING)),  # type: ignore[arg-type]
    ):
        train(trial, QUIET)
    handle.remove()
    trial.optimizer.zero_grad()
    assert_ordinary(model)


def test_a_run_that_ends_deep_in_an_interrupted_forward_leaves_nothing(tmp_path: Path) -> None:
    trial = build()
    assert isinstance(trial.model, Llama)
    linear = trial.model.layers[1].get_submodule("feed_forward.w1")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = linear.register_forward_hook(interrupt)
    with (
        pytest.raises(KeyboardInterrupt),
        offload(trial.model, list(trial.optimizers), document(tmp_path, **EVERYTHING)),  # type: ignore[arg-type]
    ):
        train(trial, QUIET)
    handle.remove()
    assert_ordinary(trial.model)


def test_training_goes_on_after_an_interrupted_step(tmp_path: Path) -> None:
    plain, ours = build(), build()
    train(plain, QUIET)
    assert isinstance(ours.model, Llama)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with offload(ours.model, list(ours.optimizers), document(tmp_path, **EVERYTHING)) as run:  # type: ignore[arg-type]
        handle = ours.model.layers[2].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            train(ours, QUIET)
        handle.remove()
        train(ours, QUIET)
        run.store.check()
        assert [key for key in run.store if key.startswith("activation/")] == []
    assert_equal_lists(plain.logged, ours.logged)
    assert_equal_models(plain.model, ours.model)
    assert_ordinary(ours.model)


def test_off_recomputes_and_says_that_it_does_not_swap(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain, ours = build(), build()
    train(plain, QUIET)
    off = {**document(tmp_path, **EVERYTHING), "context": {"memory_offload": "OFF"}}  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING), offload(ours.model, list(ours.optimizers), off) as run:
        train(ours, QUIET)
        stats = run.stats()
    assert "memory_offload is OFF: activations are not swapped either." in caplog.text
    assert stats.activations is None
    assert stats.recompute is not None
    assert stats.recompute.repetitions > 0
    assert_equal_lists(plain.logged, ours.logged)
    assert_ordinary_after(plain, ours)


def test_a_swap_within_what_is_recomputed_is_warned_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial = build()
    with caplog.at_level(logging.WARNING), offload(trial.model, None, document(tmp_path, **EVERYTHING)):  # type: ignore[arg-type]
        pass
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(r"layer 0: 'feed_forward\.mul' is swapped and recomputed; recompute wins")


def assert_ordinary_after(plain: Trial, ours: Trial) -> None:
    assert_equal_models(plain.model, ours.model)
    assert_equal_states(plain.optimizer, ours.optimizer)
    assert_ordinary(ours.model)


@pytest.mark.parametrize("state", ["ON", "OFF"])
def test_layers_that_are_not_there_are_refused_and_nothing_is_changed(tmp_path: Path, state: str) -> None:
    trial = build()
    settings = {**document(tmp_path), "context": {"memory_offload": state}}
    with pytest.raises(UsageError, match="blocks"):
        offload(trial.model, list(trial.optimizers), settings, layers="blocks")
    assert_ordinary(trial.model)
    offload(trial.model, list(trial.optimizers), settings, layers="layers").close()
    assert_ordinary(trial.model)


def test_stats_tell_what_was_swapped_and_recomputed_also_at_the_end(tmp_path: Path) -> None:
    trial = build()
    with offload(trial.model, list(trial.optimizers), document(tmp_path, **EVERYTHING)) as run:  # type: ignore[arg-type]
        train(trial, QUIET)
    stats = run.stats()
    assert stats.activations is not None
    assert stats.recompute is not None
    assert stats.activations.kept_bytes > 0
    assert stats.activations.released == stats.activations.brought > 0
    assert stats.activations.offloaded == 0
    assert stats.recompute.repetitions > 0


def test_without_these_sections_there_is_nothing_to_tell(tmp_path: Path) -> None:
    trial = build()
    settings = document(tmp_path)["offload_config"]
    assert isinstance(settings, Mapping)
    with offload(trial.model, list(trial.optimizers), settings) as run:
        assert (run.stats().activations, run.stats().recompute) == (None, None)


def test_a_checkpoint_has_no_activations_and_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = document(tmp_path, tiers="device, host, disk", **EVERYTHING, durable=True)  # type: ignore[arg-type]
    plain = build()
    train(plain, QUIET)
    train(plain, QUIET)
    begun = build()
    with offload(begun.model, list(begun.optimizers), settings) as run:
        train(begun, QUIET)
        left = begun.model(inputs(7, 4)).square().mean()  # a graph whose backward never runs
        assert any("disk" in run.store.where(key) for key in run.store if key.startswith("activation/"))
        torch.manual_seed(2)
        run.checkpoint()
        run.store.check()
    del left
    resumed = build()
    with offload(resumed.model, list(resumed.optimizers), settings) as run:
        assert run.resumed is not None
        assert [key for key in run.store if key.startswith("activation/")] == []
        train(resumed, QUIET)
    assert_equal_lists(plain.logged[len(begun.logged) :], resumed.logged)
    assert_equal_models(plain.model, resumed.model)
    assert_equal_states(plain.optimizer, resumed.optimizer)
