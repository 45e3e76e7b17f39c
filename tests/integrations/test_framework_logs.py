"""Trainers report a run's metrics by themselves, and log otherwise what they log without tierstore."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
    EventAccumulator,
)

from tests.integrations import tiny
from tierstore.integrations.logged import FEW

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_TOLD = {"logging_steps": 2, "max_steps": 5, "eval_strategy": "steps", "eval_steps": 3}


def _scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Return what TensorBoard shows: of each tag its steps and values."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        read = EventAccumulator(str(file)).Reload()
        for tag in read.Tags()["scalars"]:
            found.setdefault(tag, []).extend((each.step, each.value) for each in read.Scalars(tag))
    return found


def _trained(how: str, config: Mapping[str, object] | None, path: Path) -> tuple[tiny.Trained, Any, Any]:
    trainer = tiny.makers(config, how)(
        model=tiny.model_of("llama"),
        args=tiny.arguments(path, report_to="tensorboard", save_strategy="steps", save_steps=5, **_TOLD),
        train_dataset=tiny.rows(12, 1),
        eval_dataset=tiny.rows(4, 2),
    )
    trainer.train()
    evaluated = trainer.evaluate()
    return tiny.outcome_of(trainer, path), evaluated, _scalars(path)


@pytest.mark.parametrize("how", ["callback", "class"])
def test_what_the_trainer_reports_to_is_told_the_metrics_and_its_own_logs_have_none(
    how: str, tmp_path: Path
) -> None:
    plain, plain_evaluated, plain_shown = _trained(how, None, tmp_path / "plain")
    config = tiny.config_of("three", tmp_path)
    ours, evaluated, shown = _trained(how, config, tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
    assert evaluated.keys() == plain_evaluated.keys()
    told = {tag: each for tag, each in shown.items() if "tierstore" in tag}
    assert shown.keys() - told.keys() == plain_shown.keys()
    assert all(plain_shown[tag] == shown[tag] for tag in ("train/loss", "eval/loss"))
    assert {tag.split("/")[2] for tag in told} <= {name.removeprefix("tierstore_") for name in FEW}
    # The loss at 2 and 4, the evaluation at 3, and the end at 5: at each of them once.
    steps = told["train/tierstore/run_steps_total"]
    assert steps == [(2, 2.0), (3, 3.0), (4, 4.0), (5, 5.0)]
    assert [step for step, _ in told["train/tierstore/tier_charged_bytes/disk"]] == [2, 3, 4, 5]


def test_metrics_are_computed_only_where_somebody_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tierstore.integrations.transformers import callback

    monkeypatch.setattr(callback, "scalars", lambda _: pytest.fail("nobody is told"))
    trainer = tiny.makers(tiny.config_of("host", tmp_path), "class")(
        model=tiny.model_of("llama"),
        args=tiny.arguments(tmp_path, max_steps=2),
        train_dataset=tiny.rows(4, 1),
    )
    trainer.train()
    assert any("loss" in each for each in trainer.state.log_history)


def test_a_second_training_is_reported_as_well(tmp_path: Path) -> None:
    trainer = tiny.makers(tiny.config_of("host", tmp_path), "class")(
        model=tiny.model_of("llama"),
        args=tiny.arguments(tmp_path, report_to="tensorboard", max_steps=1),
        train_dataset=tiny.rows(4, 1),
    )
    for _ in range(2):
        trainer.train()
    assert len(_scalars(tmp_path)["train/tierstore/run_steps_total"]) == 2


# ---------------------------------------------------------------------- Lightning


@pytest.mark.filterwarnings("ignore:.*`isinstance.treespec, LeafSpec.` is deprecated")
@pytest.mark.filterwarnings("ignore:.*does not have many workers", "ignore:.*number of training batches")
@pytest.mark.parametrize("optimization", ["automatic", "several"])
def test_loggers_of_lightning_are_told_the_metrics_as_often_as_the_losses(
    optimization: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger

    from tests.integrations.lightning_models import Classifier, How, data, metrics_of, ours, trainer

    rows: list[list[dict[str, str]]] = []
    metrics = []
    for strategy in (None, ours("three", tmp_path)):
        torch.manual_seed(0)
        logger = CSVLogger(tmp_path / ("plain" if strategy is None else "ours"))
        how = How(optimization=optimization)
        made = trainer(tmp_path, strategy, logger=[logger], max_epochs=2, log_every_n_steps=2)
        made.fit(Classifier(how), data(), data(4))
        metrics.append(metrics_of(made))
        with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
            rows.append(
                [{name: value for name, value in each.items() if value} for each in csv.DictReader(file)]
            )
    plain, found = rows
    told = [each for each in found if any(name.startswith("tierstore/") for name in each)]
    assert [each for each in found if each not in told] == plain
    assert [each["step"] for each in told] == [each["step"] for each in plain if "loss" in each]
    assert all("tierstore/tier_charged_bytes/disk" in each for each in told)
    assert metrics[0] == metrics[1]
