"""Saves and loads a checkpoint with less memory than it takes.

``python -m tests.integrations.lightning_victim FOLDER``.
"""

from __future__ import annotations

import re
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tierstore.integrations.lightning import TierstoreStrategy

LIMIT_BYTES = 40 * 1024**2  # above what the process has when it has trained
WIDTH = 1000
LAYERS = 12  # of 4 MB; with Adam's state 144 MB


class Layers(pl.LightningModule):
    """Many linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        """Make a step."""
        loss: torch.Tensor = self.layers(batch[0]).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class SavesInALimit(Callback):
    """Saves when the process may have little more than it has; then forgets the limit."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save."""
        former = resource.getrlimit(resource.RLIMIT_DATA)
        limit()
        trainer.save_checkpoint(self._path)
        resource.setrlimit(resource.RLIMIT_DATA, former)


class LoadsInALimit(Callback):
    """Limits the process as soon as the run is open, before the checkpoint is read."""

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Limit it."""
        limit()


def limit() -> None:
    """Let the process have at most so much more memory of its own than it has."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    mapped = re.search(r"VmData:\s+(\d+) kB", status)
    assert mapped is not None
    bound_bytes = int(mapped[1]) * 1024 + LIMIT_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (bound_bytes, resource.RLIM_INFINITY))


def strategy(folder: Path, **options: Any) -> TierstoreStrategy:
    """Return ours, with a small part of the model in memory."""
    config = {
        "device": "cpu",
        "offload_cpu_size": "24MB",
        "offload_disk_size": "512MB",
        "offload_path": str(folder / "files"),
        "host_mem_block_size": "8MB",
    }
    return TierstoreStrategy(config, on_close="release", **options)


def main(folder: Path) -> None:
    """Train, save and go on."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "default_root_dir": folder,
    }  # fmt: skip
    loader = DataLoader(TensorDataset(torch.linspace(-1, 1, WIDTH).view(1, WIDTH)), batch_size=1)
    saves = SavesInALimit(folder / "model.ckpt")
    pl.Trainer(strategy=strategy(folder), max_epochs=2, callbacks=[saves], **options).fit(Layers(), loader)
    loads = LoadsInALimit()
    pl.Trainer(strategy=strategy(folder), max_epochs=3, callbacks=[loads], **options).fit(
        Layers(), loader, ckpt_path=folder / "model.ckpt"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
