"""Trainings of a Llama by Hugging Face's Trainer, with tierstore and without: for `bench.trainer`.

A module of its own, as it needs transformers to be imported.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

import tierstore as ts
from tierstore.integrations.transformers import offloading

LAYERS, DIM, HEADS, VOCABULARY = 8, 512, 8, 4096
BATCH, LENGTH = 4, 128
SETTLING_STEPS, COUNTED_STEPS = 6, 6
_DIM_STEP = 64


@dataclass(frozen=True)
class LlamaSize:
    """How wide the model is; narrower ones are for a look."""

    dim: int = DIM

    @classmethod
    def scaled(cls, scale: float) -> LlamaSize:
        """Return one with about ``scale`` of the layers' parameters."""
        return cls(max(1, round(DIM * scale**0.5 / _DIM_STEP)) * _DIM_STEP)

    def new_model(self) -> nn.Module:
        """Build the model: the same parameters every time."""
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY,
                hidden_size=self.dim,
                intermediate_size=3 * self.dim,
                num_hidden_layers=LAYERS,
                num_attention_heads=HEADS,
                use_cache=False,
            )
        )


@dataclass(frozen=True)
class TrainerTurn:
    """What one training came to.

    Attributes:
        step_s: seconds of a step, of those that count.
        loss: the mean of all steps.
        digest: of all parameters in the end.
        parameter_bytes: of the model.
    """

    step_s: float
    loss: float
    digest: str
    parameter_bytes: int


class Clock(TrainerCallback):
    """Notes when each step ends."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        """Note it."""
        del args, state, control, others
        self.ends.append(time.perf_counter())


def config_for(size: LlamaSize) -> ts.OffloadConfig:
    """Return tiers in which everything fits in host memory, which is where computing happens."""
    nbytes = sum(each.nbytes for each in size.new_model().parameters())
    return ts.OffloadConfig(device="cpu", offload_cpu_size=6 * nbytes, offload_disk_size=0)


def train(size: LlamaSize, folder: Path, config: ts.OffloadConfig | None) -> TrainerTurn:
    """Train from the beginning; the first steps, in which a plan is made and memory is taken, do not count.

    Args:
        size: of the model.
        folder: for what the Trainer writes.
        config: how it is offloaded; ``None``: not at all.
    """
    model, clock = size.new_model(), Clock()
    told = TrainingArguments(
        output_dir=str(folder),
        max_steps=SETTLING_STEPS + COUNTED_STEPS,
        per_device_train_batch_size=BATCH,
        logging_strategy="no",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    chance = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (BATCH * told.max_steps, LENGTH), generator=chance)
    rows = [{"input_ids": each, "labels": each} for each in tokens]
    kind = Trainer if config is None else offloading(Trainer, config)
    trained = kind(model, told, train_dataset=rows, callbacks=[clock]).train()
    step_s = (clock.ends[-1] - clock.ends[SETTLING_STEPS - 1]) / COUNTED_STEPS
    nbytes = sum(each.nbytes for each in model.parameters())
    return TrainerTurn(step_s, trained.training_loss, _digest(model), nbytes)


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for each in model.parameters():
        digest.update(each.detach().numpy().tobytes())
    return digest.hexdigest()
