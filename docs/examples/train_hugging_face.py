"""Train a Llama of ``transformers`` with its Trainer on a device that cannot hold it, and go on after a stop.

What happens, in this order:

1. The Trainer as it is, under a device budget far below what the model needs, runs out of device memory.
2. ``offloading(Trainer, config)`` trains with tiers of that size, and is stopped half-way.
3. Another one goes on from the checkpoint that the Trainer wrote, to the end.
4. The Trainer as it is, without a budget.  Every loss and every parameter of the others must equal its.

The text is the documentation inside Python, so that nothing has to be downloaded.  Run it with::

    python docs/examples/train_hugging_face.py
    python docs/examples/train_hugging_face.py --layers 12 --max-device-memory 24MB

Exit code 0: trained and equal; 1: not so; 2: the command line was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
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
from arguments import OneLineParser, check_counts, device_of
from device_budget import AllocatorBudget, device_budget, make_deterministic, moved_to_device
from llama_job import documentation_text
from llama_report import mebibytes
from tierstore.integrations.transformers import offloading

_VOCABULARY = 256  # a byte is a token


@dataclass(frozen=True)
class Trained:
    """What a training leaves.

    Attributes:
        losses: of its steps, by their numbers.
        parameters: in the end, by name, in host memory.
    """

    losses: dict[int, float]
    parameters: dict[str, Tensor]


def command_line() -> OneLineParser:
    """Return the parser; its defaults take half a minute on two cores."""
    parser = OneLineParser(
        prog="train_hugging_face.py",
        description="Train with Hugging Face's Trainer what its device cannot hold, bit for bit as without.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=8, metavar="N", help="training steps, from 2 on (%(default)s)")
    add("--layers", type=int, default=6, metavar="N", help="transformer layers (%(default)s)")
    add("--dim", type=int, default=256, metavar="N", help="the model's width (%(default)s)")
    add("--heads", type=int, default=4, metavar="N", help="attention heads (%(default)s)")
    add("--batch-size", type=int, default=4, metavar="N", help="sequences in a batch (%(default)s)")
    add("--sequence-length", type=int, default=64, metavar="N", help="bytes in a sequence (%(default)s)")
    add("--max-device-memory", default="20MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--offload-cpu-size", default="32MB", metavar="SIZE", help="the host tier's quota (%(default)s)")
    add("--offload-disk-size", default="1GB", metavar="SIZE", help="the disk tier's quota (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and batches (%(default)s)")
    parser.add_device()
    return parser


# ---------------------------------------------------------------------- what is trained on what


def new_model(arguments: argparse.Namespace) -> nn.Module:
    """Build the model in host memory: the same parameters every time."""
    torch.manual_seed(arguments.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=_VOCABULARY,
            hidden_size=arguments.dim,
            intermediate_size=3 * arguments.dim,
            num_hidden_layers=arguments.layers,
            num_attention_heads=arguments.heads,
            use_cache=False,
        )
    )


def sequences(arguments: argparse.Namespace) -> list[dict[str, Tensor]]:
    """Return the text in pieces: tokens, which are the labels, too."""
    text = torch.frombuffer(bytearray(documentation_text()), dtype=torch.uint8).long()
    pieces = text.split(arguments.sequence_length)[: arguments.steps * arguments.batch_size]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def training_arguments(arguments: argparse.Namespace, folder: Path) -> TrainingArguments:
    """Return what any Trainer would be told: nothing in it is about offloading."""
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=arguments.steps,
        per_device_train_batch_size=arguments.batch_size,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        activation_checkpointing=True,
        logging_steps=1,
        save_steps=max(1, arguments.steps // 2),
        save_total_limit=1,
        seed=arguments.seed,
        use_cpu=device_of(arguments.device).type == "cpu",
        disable_tqdm=True,
        report_to="none",
    )


# ---------------------------------------------------------------------- the trainings


class StopsAt(TrainerCallback):
    """Ends a training after some steps, as whoever needs the machine for something else.

    Args:
        step: after which.
    """

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **others: object
    ) -> None:
        """Tell the Trainer."""
        del args, others
        control.should_training_stop = control.should_training_stop or state.global_step == self._step


def losses_of(trainer: Trainer) -> dict[int, float]:
    """Return the losses that a Trainer has logged, by step."""
    return {int(each["step"]): each["loss"] for each in trainer.state.log_history if "loss" in each}


def parameters_of(model: nn.Module) -> dict[str, Tensor]:
    """Return every parameter by name, in host memory."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def train_under_the_budget(arguments: argparse.Namespace, folder: Path) -> str | None:
    """Train as usual; return the error that ended it, or ``None`` if it all fitted."""
    device = device_of(arguments.device)
    model = new_model(arguments)
    try:
        with device_budget(device, arguments.max_device_memory) as budget:
            if isinstance(budget, AllocatorBudget):
                budget.enforce()
            model = moved_to_device(model, device)
            told = training_arguments(arguments, folder)
            Trainer(model, told, train_dataset=sequences(arguments)).train()
    except torch.OutOfMemoryError as error:
        return f"{type(error).__name__}: {error}"
    return None


def train_offloaded(arguments: argparse.Namespace, config: ts.OffloadConfig, folder: Path) -> Trained:
    """Train to the half; with other objects, as another process would, go on from there to the end."""
    model, losses = new_model(arguments), dict[int, float]()
    offloading_trainer = offloading(Trainer, config)
    for goes_on in (False, True):
        told = training_arguments(arguments, folder)
        model = new_model(arguments)
        trainer = offloading_trainer(model, told, train_dataset=sequences(arguments))
        if not goes_on:
            trainer.add_callback(StopsAt(int(told.save_steps)))
        trainer.train(resume_from_checkpoint=goes_on)
        losses |= losses_of(trainer)
    return Trained(losses, parameters_of(model))


def train_unlimited(arguments: argparse.Namespace, folder: Path) -> Trained:
    """Train with all the memory that it likes: what the offloaded one has to equal."""
    model = new_model(arguments)
    trainer = Trainer(model, training_arguments(arguments, folder), train_dataset=sequences(arguments))
    trainer.train()
    return Trained(losses_of(trainer), parameters_of(model))


# ---------------------------------------------------------------------- all of it


def tell(arguments: argparse.Namespace, config: ts.OffloadConfig, folder: Path) -> bool:
    """Train all three times and print what came of it; return whether all is as promised."""
    count = sum(each.numel() for each in new_model(arguments).parameters())
    print(f"{count:,} parameters, which take {mebibytes(16 * count)} with gradients and AdamW's moments")
    print(f"1. Trainer, under {arguments.max_device_memory}")
    error = train_under_the_budget(arguments, folder / "plain")
    print(f"  {error or 'It fits: nothing to offload. Try a smaller --max-device-memory.'}")
    print(
        f"2. offloading(Trainer, config), under {arguments.max_device_memory}, stopped and resumed",
        flush=True,
    )
    ours = train_offloaded(arguments, config, folder / "offloaded")
    print("3. Trainer, without a budget", flush=True)
    theirs = train_unlimited(arguments, folder / "unlimited")
    for step, loss in theirs.losses.items():
        print(f"  step {step}: loss {ours.losses.get(step, float('nan')):.6f}, without {loss:.6f}")
    are_equal = ours.losses == theirs.losses and all(
        torch.equal(values, theirs.parameters[name]) for name, values in ours.parameters.items()
    )
    print("every loss and every parameter is equal, bit for bit" if are_equal else "they DIFFER")
    return error is not None and are_equal


def read_config(arguments: argparse.Namespace, path: Path) -> ts.OffloadConfig:
    """Return the configuration that the command line means, with files at ``path``."""
    return ts.OffloadConfig(
        device=arguments.device,
        max_device_memory=arguments.max_device_memory,
        offload_cpu_size=arguments.offload_cpu_size,
        offload_disk_size=arguments.offload_disk_size,
        offload_path=str(path),
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tierstore-") as scratch:
        try:
            check_counts(arguments, "steps", "layers", "dim", "heads", "batch_size", "sequence_length")
            config = read_config(arguments, Path(scratch, "tiers"))
            make_deterministic(device_of(arguments.device))
            return 0 if tell(arguments, config, Path(scratch)) else 1
        except (OSError, ValueError) as wrong:
            parser.error(str(wrong))
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
