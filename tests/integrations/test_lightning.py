"""`TierstoreStrategy` trains, tests and predicts to the last bit what Lightning does without it."""

from __future__ import annotations

import contextlib
import io
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, TQDMProgressBar

from tests.integrations.lightning_models import (
    Classifier,
    How,
    Outcome,
    data,
    ours,
    outcome_of,
    trainer,
)
from tests.pairs import covering
from tests.training.twins import assert_equal_models, assert_equal_values, config_of
from tierstore.errors import StoreClosed, UsageError
from tierstore.integrations.lightning import TierstoreStrategy
from tierstore.training import offload

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"
    ),  # its advice
    pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"),
]


def assert_equal_outcomes(expected: Outcome, found: Outcome) -> None:
    assert expected.model.losses == found.model.losses
    assert_equal_models(expected.model, found.model)
    assert expected.metrics == found.metrics
    assert expected.tested == found.tested
    assert_equal_values(expected.predictions, found.predictions, "predictions")
    assert_equal_values(flat(expected.states), flat(found.states), "states")


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [part for name, each in value.items() for part in (name, *flat(each))]
    return [part for each in value for part in flat(each)] if isinstance(value, list) else [value]


def is_possible(row: tuple[Any, ...]) -> bool:
    _, optimization, _, scheduler, accumulated, clipped, *_ = row
    is_plain = scheduler == "none" and accumulated == 1 and clipped == "none"
    return bool(optimization == "automatic" or is_plain)


CASES = covering(
    ["disk", "device", "three"],
    ["automatic", "manual", "several"],
    ["AdamW", "SGD", "Adagrad"],
    ["none", "cosine", "plateau"],
    [1, 3],
    ["none", "norm", "value"],
    ["32-true", "bf16-mixed", "bf16-true"],
    [True, False],
    is_there=is_possible,
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_that_a_trainer_does_has_the_same_bits(case: tuple[Any, ...], tmp_path: Path) -> None:
    layout, *chosen = case
    how = How(*chosen)
    strategy = ours(layout, tmp_path, precision=how.precision)
    assert_equal_outcomes(outcome_of(how, tmp_path), outcome_of(how, tmp_path, strategy))


def test_a_trainer_serves_one_call_after_another(tmp_path: Path) -> None:
    results = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model = Classifier()
        made = trainer(tmp_path, ours("three", tmp_path) if is_ours else None, max_epochs=1)
        made.validate(model, data(4), verbose=False)
        made.fit(model, data(), data(4))
        made.fit_loop.max_epochs = 2
        made.fit(model, data(), data(4))
        results.append((model, made.validate(model, data(4), verbose=False)))
        torch.manual_seed(1)
        trainer(tmp_path, ours("disk", tmp_path) if is_ours else None, max_epochs=1).fit(model, data())
    (plain, expected), (model, found) = results
    assert plain.losses == model.losses
    assert expected == found
    assert_equal_models(plain, model)


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_what_is_saved_after_another_call_has_the_state_of_the_fit_before(call: str, tmp_path: Path) -> None:
    states = []
    for is_ours in (False, True):
        torch.manual_seed(0)
        model, path = Classifier(), tmp_path / f"{is_ours}.ckpt"
        made = trainer(tmp_path, ours("three", tmp_path) if is_ours else None, max_epochs=1)
        made.fit(model, data())
        getattr(made, call)(model, data(4), **({} if call == "predict" else {"verbose": False}))
        made.save_checkpoint(path)
        states.append(torch.load(path, weights_only=False)["optimizer_states"])
    assert len(states[0]) == 1
    assert_equal_values(flat(states[0]), flat(states[1]), "states")


class Looks(Callback):
    """Looks at where parameters are while a step is made."""

    def __init__(self) -> None:
        self.types: set[str] = set()
        self.tiers: list[tuple[str, ...]] = []

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: object) -> None:
        self.types = {type(each).__name__ for each in pl_module.parameters()}
        store = trainer.strategy.run.store  # type: ignore[attr-defined]
        self.tiers = [store.where(key) for key in store]


def test_the_model_is_in_the_store_while_it_is_trained_and_ordinary_afterwards(tmp_path: Path) -> None:
    looks = Looks()
    strategy = ours("three", tmp_path)
    model = Classifier()
    trainer(tmp_path, strategy, callbacks=[looks], max_epochs=1).fit(model, data())
    assert looks.types != {"Parameter"}
    assert looks.tiers
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    with pytest.raises(UsageError, match="no run is open"):
        _ = strategy.run


def test_a_trainer_without_a_device_in_the_configuration_uses_its_own(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"offload_config:\n  offload_cpu_size: 64MB\n  offload_path: {tmp_path / 'files'}\n")
    looks = Looks()
    trainer(tmp_path, TierstoreStrategy(path), callbacks=[looks], max_epochs=1).fit(Classifier(), data())
    assert {tier for each in looks.tiers for tier in each} == {"host"}


def test_with_memory_offload_off_lightning_does_it_alone(tmp_path: Path) -> None:
    strategy = TierstoreStrategy({"memory_offload": "OFF"})
    assert_equal_outcomes(outcome_of(How(), tmp_path), outcome_of(How(), tmp_path, strategy))


# ---------------------------------------------------------------------- ends


@pytest.fixture
def signals_as_they_were() -> Iterator[None]:
    """Lightning ignores Ctrl-C for good when it has seen one."""
    former = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.parametrize("failure", [RuntimeError("it fails"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
@pytest.mark.usefixtures("signals_as_they_were")
@pytest.mark.parametrize("call", ["fit", "validate"])
def test_a_call_that_is_ended_closes_its_run_and_the_next_one_works(
    failure: BaseException, call: str, tmp_path: Path
) -> None:
    model = Classifier()
    model.fails_at, model.failure = 1, failure
    made = trainer(tmp_path, ours("three", tmp_path), max_epochs=1)
    if call == "validate":
        model.validation_step = model.training_step  # type: ignore[assignment, method-assign]
    with pytest.raises((RuntimeError, SystemExit)):
        made.fit(model, data()) if call == "fit" else made.validate(model, data(), verbose=False)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    model.fails_at = None
    model.losses.clear()
    trainer(tmp_path, ours("disk", tmp_path), max_epochs=1).fit(model, data())
    assert len(model.losses) == len(data())


class FailsInSetUp(Callback):
    """Fails when the run has just been opened."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        raise RuntimeError("before the first step")


def test_what_fails_before_the_first_step_closes_the_run(tmp_path: Path) -> None:
    model = Classifier()
    with pytest.raises(RuntimeError, match="before the first step"):
        trainer(tmp_path, ours("three", tmp_path), callbacks=[FailsInSetUp()]).fit(model, data())
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


def test_a_released_model_says_where_it_lies(tmp_path: Path) -> None:
    model = Classifier()
    trainer(tmp_path, ours("three", tmp_path, on_close="release"), max_epochs=1).fit(model, data())
    with pytest.raises(StoreClosed):
        model.body[0].up.weight.sum()  # type: ignore[union-attr, operator]
    with pytest.raises(UsageError, match="was released when a former run was closed"):
        trainer(tmp_path, ours("three", tmp_path), max_epochs=1).fit(model, data())


# ---------------------------------------------------------------------- what the user sees


def test_the_progress_bar_shows_how_full_the_tiers_are(tmp_path: Path) -> None:
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        made = trainer(
            tmp_path, ours("three", tmp_path), max_epochs=1, enable_progress_bar=True,
            callbacks=[TQDMProgressBar()],
        )  # fmt: skip
        made.fit(Classifier(), data())
    for tier in ("device", "host", "disk"):
        assert f"tiers/{tier}=" in shown.getvalue()
    assert all(0 <= float(made.callback_metrics[f"tiers/{tier}"]) <= 1 for tier in ("device", "host", "disk"))


@pytest.mark.parametrize("is_asked", [True, False])
def test_without_a_bar_or_a_wish_no_metric_is_made(is_asked: bool, tmp_path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        made = trainer(
            tmp_path, ours("three", tmp_path, shows_tiers=is_asked), max_epochs=1,
            enable_progress_bar=not is_asked, callbacks=[] if is_asked else [TQDMProgressBar()],
        )  # fmt: skip
        made.fit(Classifier(), data())
    assert not [name for name in made.callback_metrics if name.startswith("tiers/")]


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("options", "line"),
    [({"devices": 2}, r"Trainer\(devices=1"), ({"num_nodes": 2}, r"Trainer\(num_nodes=1")],
)
def test_several_devices_or_machines_are_refused(options: dict[str, Any], line: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=line):
        trainer(tmp_path, ours("three", tmp_path), **options)


def test_another_device_than_the_configuration_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"says device: cuda.*accelerator='cuda'"):
        trainer(tmp_path, TierstoreStrategy({"device": "cuda"}))


def test_a_durable_configuration_is_refused() -> None:
    with pytest.raises(UsageError, match="Leave durable out"):
        TierstoreStrategy({"durable": True, "device": "cpu"})


def test_one_of_several_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = trainer(tmp_path, ours("three", tmp_path))
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="Start it with python"):
        made.fit(Classifier(), data())


def test_a_model_that_a_run_of_the_program_has_is_refused(tmp_path: Path) -> None:
    model = Classifier()
    with (
        offload(model, None, config_of("host", tmp_path / "other")),
        pytest.raises(UsageError, match=r"offload\(\.\.\.\) in .*test_lightning\.py"),
    ):
        trainer(tmp_path, ours("host", tmp_path)).fit(model, data())


class FitsAgain(Callback):
    """Fits the model with another Trainer while this one is at work."""

    def __init__(self, other: pl.Trainer) -> None:
        self.other = other

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.other.fit(pl_module, data())


def test_a_model_that_another_trainer_has_is_refused_with_the_line_of_its_strategy(tmp_path: Path) -> None:
    other = trainer(tmp_path, ours("host", tmp_path / "other"))
    first = trainer(tmp_path, ours("host", tmp_path), callbacks=[FitsAgain(other)])
    with pytest.raises(UsageError, match=r"TierstoreStrategy\(\.\.\.\) in .*lightning_models\.py, line"):
        first.fit(Classifier(), data())


def test_a_wrong_configuration_is_refused_where_the_strategy_is_made() -> None:
    with pytest.raises(UsageError, match="max_device_memory"):
        TierstoreStrategy({"max_device_memori": "1GB"})
