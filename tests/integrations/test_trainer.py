"""A Trainer whose model is offloaded does what the Trainer does without: the same bits, files and logs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.integrations import tiny
from tests.pairs import covering

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

_SCHEDULED: Mapping[str, Mapping[str, object]] = {
    "linear": {"lr_scheduler_type": "linear", "warmup_steps": 2},
    "cosine": {"lr_scheduler_type": "cosine"},
    "sgd": {"optim": "sgd", "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 1},
    "adafactor": {"optim": "adafactor", "weight_decay": 0.1},
}
_PRECISE: Mapping[str, Mapping[str, object]] = {"float32": {}, "bf16": {"bf16": True}}
_RECOMPUTED: Mapping[str, Mapping[str, object]] = {
    "kept": {},
    "reentrant": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": True},
    },
    "recomputed": {
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    },
}
_SAVED: Mapping[str, Mapping[str, object]] = {
    "nothing": {},
    "evaluated": {"eval_strategy": "steps", "eval_steps": 2, "eval_on_start": True},
    "saved": {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1},
    "best": {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "save_strategy": "steps",
        "save_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
    },
}
_GATHERED: Mapping[str, Mapping[str, object]] = {
    "each": {"max_grad_norm": 0.0},
    "clipped": {"max_grad_norm": 0.05},
    "three": {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05, "max_steps": 3},
    "noisy": {"gradient_accumulation_steps": 2, "neftune_noise_alpha": 5.0},
}


@dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    layout: str
    how: str
    scheduled: str
    precise: str
    recomputed: str
    saved: str
    gathered: str

    def __str__(self) -> str:
        return "-".join(vars(self).values())

    @property
    def arguments(self) -> dict[str, Any]:
        """What the Trainer is told."""
        return {
            **_SCHEDULED[self.scheduled],
            **_PRECISE[self.precise],
            **_RECOMPUTED[self.recomputed],
            **_SAVED[self.saved],
            **_GATHERED[self.gathered],
        }


CASES = [
    Case(*each)
    for each in covering(
        ["llama", "tied", "gpt2"],
        tiny.LAYOUTS,
        ["callback", "class"],
        _SCHEDULED,
        _PRECISE,
        _RECOMPUTED,
        _SAVED,
        _GATHERED,
    )
]


def trained(case: Case, config: Mapping[str, object] | None, path: Path) -> tiny.Trained:
    """Train as a case says, and predict when it is done."""
    make = tiny.makers(config, case.how)
    trainer = make(
        model=tiny.model_of(case.model),
        args=tiny.arguments(path, **case.arguments),
        train_dataset=tiny.rows(20, 1),
        eval_dataset=tiny.rows(4, 2),
    )
    trainer.train()
    predicted = trainer.predict(tiny.rows(3, 3))
    found = tiny.outcome_of(trainer, path)
    return tiny.Trained(
        [*found.logged, {"predicted": predicted.predictions.tolist()}], found.tensors, found.files
    )


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_training_is_that_of_the_trainer_alone(case: Case, tmp_path: Path) -> None:
    plain = trained(case, None, tmp_path / "plain")
    ours = trained(case, tiny.config_of(case.layout, tmp_path), tmp_path / "ours")
    assert tiny.differences(plain, ours) == []
