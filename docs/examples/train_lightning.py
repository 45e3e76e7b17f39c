"""Train a classifier of handwritten digits with Lightning, offloaded by one argument of its Trainer.

The device may hold a fraction of what parameters, gradients and Adam's state take.  Lightning's own callback
makes the checkpoints; with ``--resume`` training goes on from the last one, bit for bit as if it had not
ended.

    python docs/examples/train_lightning.py --epochs 3 --checkpoints digits
    python docs/examples/train_lightning.py --epochs 6 --checkpoints digits --resume
    python docs/examples/train_lightning.py --compare

Exit code 0: trained (and equal); 1: not equal, or out of memory; 2: the command line was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tierstore as ts
from arguments import OneLineParser, check_counts, device_of
from digits import handwritten_digits
from tierstore.integrations.lightning import TierstoreStrategy

TRAINED = 1500  # of 1,797 digits; the others are for validation
Batch = list[Tensor]


class DigitClassifier(pl.LightningModule):
    """A multi-layer perceptron: an ordinary module of Lightning's.

    Args:
        width: of its hidden layers.
        depth: how many there are.
    """

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        hidden = (
            layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU(), nn.Dropout(0.1))
        )
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(64, width), nn.GELU(), *hidden, nn.Linear(width, 10)
        )
        self.told: list[str] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return the loss of a batch."""
        del batch_idx
        images, digits = batch
        loss = nn.functional.cross_entropy(self.layers(images), digits)
        self.told.append(f"epoch: {self.current_epoch} step: {self.global_step}, loss is {loss.item()!r}")
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log how many digits are recognised."""
        del batch_idx
        images, digits = batch
        self.log("accuracy", (self.layers(images).argmax(1) == digits).float().mean(), prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam, whose state is twice the parameters."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class DrawnByStep(Callback):
    """Draws the random numbers of each step anew, so that who resumes draws the same ones."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int
    ) -> None:
        """Seed PyTorch with the step's number."""
        del pl_module, batch, batch_idx
        torch.manual_seed(trainer.global_step)


class TellsTiers(Callback):
    """Prints at the end what went through the tiers."""

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print a line for each."""
        del pl_module
        if isinstance(trainer.strategy, TierstoreStrategy):
            for name, tier in trainer.strategy.run.stats().tiers.items():
                print(f"{name}: at most {tier.peak_charged_bytes:,} of {tier.capacity_bytes:,} bytes")


def loaders(batch_size: int) -> tuple[DataLoader[tuple[Tensor, ...]], DataLoader[tuple[Tensor, ...]]]:
    """Return what is trained with, and what is not."""
    pixels, digits = handwritten_digits()
    images = pixels.to(torch.float32) / 255
    trained = TensorDataset(images[:TRAINED], digits[:TRAINED])
    others = TensorDataset(images[TRAINED:], digits[TRAINED:])
    return DataLoader(trained, batch_size=batch_size), DataLoader(others, batch_size=batch_size)


def command_line() -> argparse.ArgumentParser:
    """Return the parser."""
    parser = OneLineParser(prog="train_lightning.py", description="Train with Lightning, offloaded.")
    add = parser.add_argument
    parser.add_device()
    add("--epochs", type=int, default=2, metavar="N", help="in all, also when resumed (%(default)s)")
    add("--width", type=int, default=512, metavar="N", help="of hidden layers (%(default)s)")
    add("--depth", type=int, default=6, metavar="N", help="how many hidden layers (%(default)s)")
    add("--batch-size", type=int, default=100, metavar="N", help="digits in a batch (%(default)s)")
    add("--max-device-memory", default="8MB", metavar="SIZE", help="of the device (%(default)s)")
    add("--offload-cpu-size", default="16MB", metavar="SIZE", help="of host memory (%(default)s)")
    add("--offload-disk-size", default="1GB", metavar="SIZE", help="of disk (%(default)s)")
    add("--checkpoints", type=Path, metavar="FOLDER", help="where Lightning keeps them; by default nowhere")
    add("--resume", action="store_true", help="go on from the last checkpoint in that folder")
    add(
        "--compare",
        action="store_true",
        help="train once more with plain Lightning: every loss must be equal",
    )
    return parser


def configuration(arguments: argparse.Namespace, path: Path) -> dict[str, object]:
    """Return the run's configuration; a YAML file of it would do as well.

    Raises:
        ValueError: a number or a size is wrong, or there is no such device.
    """
    check_counts(arguments, "epochs", "width", "depth", "batch_size")
    device_of(arguments.device)
    if arguments.resume and not (arguments.checkpoints and (arguments.checkpoints / "last.ckpt").exists()):
        raise ValueError("--resume needs --checkpoints with a folder that has last.ckpt")
    config = {
        "device": arguments.device,
        "max_device_memory": arguments.max_device_memory,
        "offload_cpu_size": arguments.offload_cpu_size,
        "offload_disk_size": arguments.offload_disk_size,
        "offload_path": str(path),
    }
    ts.OffloadConfig.from_mapping(config)
    return config


def train(arguments: argparse.Namespace, config: Mapping[str, object] | None) -> list[str]:
    """Train; return what was told of each step.

    Args:
        arguments: of the command line.
        config: of the run; ``None``: Lightning alone, and no checkpoints.
    """
    torch.manual_seed(0)
    model = DigitClassifier(arguments.width, arguments.depth)
    callbacks: list[Callback] = [DrawnByStep(), TellsTiers()]
    folder = None if config is None else arguments.checkpoints
    if folder is not None:
        callbacks.append(ModelCheckpoint(folder, save_last=True, monitor="accuracy", mode="max"))
    trainer = pl.Trainer(
        strategy="auto" if config is None else TierstoreStrategy(config),  # all that tierstore needs
        accelerator="gpu" if arguments.device.startswith("cuda") else "cpu",
        devices=1,
        max_epochs=arguments.epochs,
        callbacks=callbacks,
        enable_checkpointing=folder is not None,
        enable_progress_bar=sys.stdout.isatty(),
        enable_model_summary=False,
        logger=False,
    )
    last = folder / "last.ckpt" if folder is not None and arguments.resume else None
    trainer.fit(model, *loaders(arguments.batch_size), ckpt_path=last)
    print(*model.told[-3:], sep="\n")
    print(f"accuracy on digits that were not trained with: {float(trainer.callback_metrics['accuracy']):.4f}")
    return model.told


def tell(arguments: argparse.Namespace, config: Mapping[str, object]) -> bool:
    """Train and print what came of it; return whether all is as promised."""
    ours = train(arguments, config)
    if not arguments.compare:
        return True
    print("the same with plain Lightning:")
    arguments.resume = False
    plain = train(arguments, None)[-len(ours) :]
    same = sum(one == other for one, other in zip(ours, plain, strict=True))
    print(f"{same} of {len(ours)} losses are equal, bit for bit")
    return same == len(ours)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*does not have many workers")
        warnings.filterwarnings("ignore", message=".*exists and is not empty")
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-")))
        try:
            config = configuration(arguments, path)
        except ValueError as wrong:
            parser.error(str(wrong))
        try:
            return 0 if tell(arguments, config) else 1
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
