"""Documents that say everything at once: offload, swap and recompute in one store, for small models."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.training.swap_models import DIM, LENGTH, Llama, operators, whole_layers
from tests.training.twins import LATE_AND_OVERWRITTEN, Trial, adam
from tierstore.training import register_optimizer

LAYERS = 3
BATCH = 4

SWAPS: dict[str, dict[str, object]] = {
    "no swap": {},
    "layers swapped": whole_layers(),
    "operators swapped": operators("attention", r"feed_forward\.mul", "aten.silu"),
}
# While swap is on, numbers of layers are their indexes; else they count the first ones.
RECOMPUTES: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "no recompute": ({}, {}),
    "a layer recomputed": ({"recompute": [1]}, {"recompute": [0]}),
    "operators recomputed": (
        {"select_recompute": {"feed_forward": True}},
        {"select_recompute": {"feed_forward": [0]}},
    ),
}
TIERS: dict[str, dict[str, object]] = {
    "all fits": {"max_device_memory": "8MB", "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "device and host": {"max_device_memory": "400KB", "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "device, host, disk": {
        "max_device_memory": "400KB",
        "offload_cpu_size": "160KB",
        "offload_disk_size": "64MB",
    },
    "host and disk": {"device": "cpu", "offload_cpu_size": "400KB", "offload_disk_size": "64MB"},
}


def document(
    path: Path,
    *,
    swap: str = "layers swapped",
    recompute: str = "no recompute",
    tiers: str = "device and host",
    marks: Mapping[str, object] | None = None,
    **more: object,
) -> dict[str, object]:
    """Return a document with all sections.

    Args:
        path: where files go.
        swap: one of `SWAPS`.
        recompute: one of `RECOMPUTES`.
        tiers: one of `TIERS`.
        marks: instead of those of ``swap``.
        more: goes into its ``offload_config``.
    """
    marks = SWAPS[swap] if marks is None else marks
    offload_config: dict[str, object] = {
        "device": "emulated",
        "device_options": LATE_AND_OVERWRITTEN,
        "offload_path": str(path / "files"),
        **TIERS[tiers],
        **more,
    }
    if offload_config["device"] == "cpu":
        del offload_config["device_options"]
    return {
        "context": {"memory_offload": "ON"},
        "offload_config": offload_config,
        "recompute_config": RECOMPUTES[recompute][bool(marks)],
        "swap_config": {"swap": bool(marks), **marks},
    }


def build(layers: int = LAYERS) -> Trial:
    """Return a model with Adam, the same at every call."""
    torch.manual_seed(0)
    model = Llama(layers)
    return Trial(model, adam(model))


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is made.

    Attributes:
        batches: that gradients are added up of.
        dtype: that autocast computes in; ``None``: there is none.
        is_logging: whether gradients are logged, beside losses: their copies are on the device, too.
    """

    batches: int = 1
    dtype: torch.dtype | None = None
    is_logging: bool = True


AT_ONCE = Way()


def train(trial: Trial, way: Way = AT_ONCE, sizes: Sequence[int] = (BATCH,) * 3) -> None:
    """Make a step with each batch size; log losses and gradients."""
    torch.manual_seed(1)
    for number, size in enumerate(sizes):
        for part in range(way.batches):
            x = torch.randn(size, LENGTH, DIM, generator=torch.Generator().manual_seed(100 * number + part))
            loss = _loss(trial, x, way)
            loss.backward()
            trial.log(loss)
        if way.is_logging:
            trial.log_gradients()
        trial.optimizer.step()
        trial.optimizer.zero_grad()


def _loss(trial: Trial, x: Tensor, way: Way) -> Tensor:
    autocast = contextlib.nullcontext() if way.dtype is None else torch.autocast("cpu", way.dtype)
    with autocast:
        scores: Tensor = trial.model(x)
    return scores.float().square().mean()


# ---------------------------------------------------------------------- nets of any shape

OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "tanh * sin": lambda x: torch.tanh(x) * torch.sin(x),
    "softmax": lambda x: x.softmax(-1),
    "square root": lambda x: (x * x + 1).sqrt(),
    "two halves": lambda x: torch.cat([x.exp().sigmoid(), x.cos()], -1)[:, : x.shape[1]],
    "normal": lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1),
    "sorted": lambda x: x.sort(-1).values + 0.01 * x.cumsum(-1),
}


class OwnSGD(torch.optim.SGD):
    """None of PyTorch's own: no step of it is made during backward."""


class OwnAdamW(torch.optim.AdamW):
    """Likewise."""


for own in (OwnSGD, OwnAdamW):
    register_optimizer(own)

OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "momentum in the end": lambda model: OwnSGD(model.parameters(), lr=1e-2, momentum=0.9),
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False),
    "AdamW at once": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True),
}


class Layer(nn.Module):
    """A linear layer and what comes after it, with or without a way around both."""

    def __init__(self, width: int, operations: Sequence[str], *, is_residual: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self._operations = tuple(operations)
        self._is_residual = is_residual

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        y: Tensor = self.linear(x)
        for name in self._operations:
            y = OPERATIONS[name](y)
        return x + 0.1 * y if self._is_residual else y


class Layers(nn.Module):
    """Layers one after another."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, width)``."""
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class Net:
    """A net, and how it is trained.

    Attributes:
        width, batch: of what it is given.
        layers: the operations of each.
        is_residual: whether there is a way around each layer.
        optimizer: one of `OPTIMIZERS`.
        batches: that gradients are added up of.
        has_targets: whether there are targets of the size of the inputs.
        keeps_output: whether it is kept until there is another one.
        is_evaluated: whether it is, between backward and step.
    """

    width: int
    batch: int
    layers: tuple[tuple[str, ...], ...]
    is_residual: bool
    optimizer: str
    batches: int = 1
    has_targets: bool = False
    keeps_output: bool = False
    is_evaluated: bool = False

    def build(self) -> Trial:
        """Return it, the same at every call."""
        torch.manual_seed(0)
        model = Layers([Layer(self.width, each, is_residual=self.is_residual) for each in self.layers])
        return Trial(model, [OPTIMIZERS[self.optimizer](model)])

    def train(self, trial: Trial, steps: int = 4) -> None:
        """Make some steps; log losses, and gradients."""
        generator = torch.Generator().manual_seed(1)
        kept: Tensor | None = None
        for _ in range(steps):
            for _ in range(self.batches):
                x = torch.randn(self.batch, self.width, generator=generator)
                y = torch.randn(self.batch, self.width, generator=generator) if self.has_targets else 0.0
                output = trial.model(x)
                loss = (output - y).square().mean()
                kept = output if self.keeps_output else None
                del output
                loss.backward()
                trial.log(loss)
            if self.is_evaluated:
                with torch.no_grad():
                    trial.log(trial.model(x).mean())
            trial.log_gradients()
            trial.optimizer.step()
            trial.optimizer.zero_grad()
        del kept
