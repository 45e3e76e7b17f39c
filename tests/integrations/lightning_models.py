"""What the tests of Lightning train: a small module with everything that a Trainer asks of one, and how."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.training.twins import WIDTH, blocks, config_of
from tierstore.integrations.lightning import TierstoreStrategy

Batch = list[Tensor]
BATCHES = 4


@dataclass(frozen=True)
class How:
    """How a module is trained."""

    optimization: str = "automatic"
    optimizer: str = "AdamW"
    scheduler: str = "none"
    accumulated: int = 1
    clipped: str = "none"
    precision: str = "32-true"
    is_inference_mode: bool = True


class Classifier(pl.LightningModule):
    """Blocks with dropout and a batch norm; keeps what each step computed."""

    def __init__(self, how: How | None = None) -> None:
        super().__init__()
        self.how = how or How()
        self.automatic_optimization = self.how.optimization == "automatic"
        self.body = blocks(2)
        self.head = nn.Sequential(nn.BatchNorm1d(5), nn.Dropout(0.2), nn.Linear(5, 5))
        self.losses: list[float] = []
        self.fails_at: int | None = None
        self.failure: BaseException = RuntimeError("a step that fails")

    def forward(self, inputs: Tensor) -> Tensor:
        """Classify ``(batch, WIDTH)``."""
        found: Tensor = self.head(self.body(inputs))
        return found

    def _loss(self, batch: Batch) -> Tensor:
        inputs, classes = batch
        return nn.functional.cross_entropy(self(inputs), classes)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        """Make a step, in the way that was asked for."""
        if batch_idx == self.fails_at:
            raise self.failure
        loss = self._loss(batch)
        self.losses.append(loss.item())
        self.log("loss", loss, prog_bar=True)
        if self.automatic_optimization:
            return loss
        optimizers = self.optimizers()
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.zero_grad()
        self.manual_backward(loss)
        for each in optimizers if isinstance(optimizers, list) else [optimizers]:
            each.step()
        return None

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("val_loss", self._loss(batch))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Log the loss."""
        self.log("test_loss", self._loss(batch))

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """Return what is computed."""
        found: Tensor = self(batch[0])
        return found

    def _optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        kinds: Mapping[str, Any] = {
            "AdamW": lambda given: torch.optim.AdamW(given, lr=1e-2),
            "SGD": lambda given: torch.optim.SGD(given, lr=1e-2, momentum=0.9),
            "Adagrad": lambda given: torch.optim.Adagrad(given, lr=1e-2),
        }
        made: torch.optim.Optimizer = kinds[self.how.optimizer](module.parameters())
        return made

    def configure_optimizers(self) -> Any:
        """Return the optimizers and schedulers that were asked for."""
        if self.how.optimization == "several":
            return [self._optimizer(self.body), self._optimizer(self.head)]
        optimizer = self._optimizer(self)
        if self.how.scheduler == "none":
            return optimizer
        if self.how.scheduler == "plateau":
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def data(seed: int = 3) -> DataLoader[Any]:
    """Return some batches, the same ones each time."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(6 * BATCHES, WIDTH, generator=generator)
    classes = torch.randint(0, 5, (6 * BATCHES,), generator=generator)
    return DataLoader(TensorDataset(inputs, classes), batch_size=6)


def trainer(path: Path, strategy: pl.strategies.Strategy | None = None, **options: Any) -> pl.Trainer:
    """Return a Trainer on the CPU that says nothing.

    Args:
        path: of its files.
        strategy: ours; ``None``: Lightning's own.
        **options: more of the Trainer's.
    """
    usual: dict[str, Any] = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 1,
        "default_root_dir": path,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the machine, such as that there are GPUs
        return pl.Trainer(strategy=strategy or "auto", **{**usual, **options})


def options_of(how: How) -> dict[str, Any]:
    """Return the options of a Trainer that trains so."""
    clipped: dict[str, dict[str, Any]] = {
        "none": {},
        "norm": {"gradient_clip_val": 0.1},
        "value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    }
    return {
        "accumulate_grad_batches": how.accumulated,
        "precision": how.precision,
        "inference_mode": how.is_inference_mode,
        **clipped[how.clipped],
    }


def ours(layout: str, path: Path, **options: Any) -> TierstoreStrategy:
    """Return our strategy in a layout of tiers, of which each but the last is too small for everything.

    Args:
        layout: which.
        path: of its files.
        **options: more of the strategy's; ``precision``: what is trained, of which 64 bits take twice as
        much.
    """
    is_double = options.pop("precision", "32-true") == "64-true"
    wider: dict[str, object] = {"max_device_memory": "640KB" if is_double else "320KB"}
    if layout in ("disk", "three") and is_double:
        wider["offload_cpu_size"] = "288KB"
    if layout not in ("device", "three"):
        del wider["max_device_memory"]
    return TierstoreStrategy(config_of(layout, path, wider), **options)


@dataclass
class Outcome:
    """What came of training.

    Attributes:
        model: afterwards.
        metrics: that the Trainer has.
        states: of the optimizers.
        predictions: of the model afterwards.
        tested: what ``test`` returned.
    """

    model: Classifier
    metrics: dict[str, float]
    states: list[dict[str, Any]] = field(default_factory=list)
    predictions: list[Tensor] = field(default_factory=list)
    tested: list[Mapping[str, float]] = field(default_factory=list)


def outcome_of(
    how: How,
    path: Path,
    strategy: pl.strategies.Strategy | None = None,
    **options: Any,
) -> Outcome:
    """Train, test and predict; return what came of it."""
    torch.manual_seed(0)
    model = Classifier(how)
    torch.manual_seed(1)
    made = trainer(path, strategy, **options_of(how), **options)
    keeper = StateKeeper()
    made.callbacks.append(keeper)  # type: ignore[attr-defined]
    made.fit(model, data(), data(4))
    found = Outcome(model, metrics_of(made), keeper.states)
    found.tested = list(made.test(model, data(5), verbose=False))
    found.predictions = list(made.predict(model, data(6)))  # type: ignore[arg-type]
    return found


def metrics_of(made: pl.Trainer) -> dict[str, float]:
    """Return the metrics of a Trainer, without those of the tiers."""
    return {
        name: float(value) for name, value in made.callback_metrics.items() if not name.startswith("tiers/")
    }


class StateKeeper(Callback):
    """Keeps copies of the optimizers' state as it is when training ends."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any]] = []

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copy them."""
        self.states = [copied(each.state_dict()) for each in trainer.optimizers]


def copied(value: Any) -> Any:
    """Return a state dict with copies of its tensors."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {name: copied(each) for name, each in value.items()}
    return [copied(each) for each in value] if isinstance(value, list) else value


def with_(how: How, **changes: Any) -> How:
    """Return another way of training."""
    return replace(how, **changes)
