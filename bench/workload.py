"""The model of `step-in-memory` and its kin: 100.7 million parameters, Adam, and a loop around them.

12 blocks of 1024 -> 4096 -> 1024 in float32, batch 16: the sizes that were measured with other
libraries, too, so that figures can be held against theirs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

import tierstore as ts
from tierstore.planning import Placement
from tierstore.training import Offload, offload

BLOCKS, DIM, BATCH = 12, 1024, 16
STATES_WRITTEN = 3
"""Of each parameter: itself and two moments."""

_DIM_STEP = 64
_QUIET_WITHIN_S = 60.0


class Block(nn.Module):
    """A residual block of two linear layers."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform ``(batch, dim)``."""
        output: torch.Tensor = x + self.down(nn.functional.gelu(self.up(x)))
        return output


@dataclass(frozen=True)
class Workload:
    """How wide the model is; narrower ones keep every proportion, for a look."""

    dim: int = DIM

    @classmethod
    def scaled(cls, scale: float) -> Workload:
        """Return one with about ``scale`` of the parameters."""
        return cls(max(1, round(DIM * scale**0.5 / _DIM_STEP)) * _DIM_STEP)

    @property
    def share(self) -> float:
        """The weights' bytes over those of the full model."""
        return (self.dim / DIM) ** 2

    @property
    def parameter_bytes(self) -> int:
        """What the parameters take; gradients and each of Adam's two moments take the same."""
        return 4 * BLOCKS * (8 * self.dim**2 + 5 * self.dim)

    @property
    def trained_bytes(self) -> int:
        """What the largest layer takes while it is stepped: itself and both its moments."""
        return STATES_WRITTEN * 4 * (4 * self.dim**2 + 4 * self.dim)

    def new_model(self) -> nn.Module:
        """Build the model: the same parameters every time."""
        torch.manual_seed(0)
        return nn.Sequential(*(Block(self.dim) for _ in range(BLOCKS)))

    def __str__(self) -> str:
        """Name it by its size."""
        return f"the model of {self.parameter_bytes / 4e6:.1f} M parameters"


def least_written_bytes(parameter_bytes: int, quota_bytes: int) -> int:
    """Return the fewest bytes that a step can write, whatever its order.

    When backward has ended and ``step`` has not begun, every parameter and both its moments have to
    exist, and every gradient, as ``p.grad`` can be read until it is zeroed.  What host memory does not
    hold then is on disk, and was written since the step before: Adam gives parameters and moments new
    values in every step, and backward gives gradients.
    """
    return max(0, (STATES_WRITTEN + 1) * parameter_bytes - quota_bytes)


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dim: int,
    chance: torch.Generator,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Train a model that keeps its input's width on one batch, as any loop does; return the loss."""
    x = torch.randn(BATCH, dim, generator=chance).to(device)
    y = torch.randn(BATCH, dim, generator=chance).to(device)
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def wait_for_copies(store: ts.Store) -> None:
    """Return when no copy is under way.

    Raises:
        TimeoutError: there are some for ever.
    """
    deadline = time.monotonic() + _QUIET_WITHIN_S
    while any(tier.in_flight_bytes for tier in store.stats().tiers.values()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"copies are still under way after {_QUIET_WITHIN_S} s")
        time.sleep(0.001)


def _adam(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4)


def _step_in_backward(model: nn.Module) -> None:
    """Step each parameter, and free its gradient, as soon as it has one; the model's optimizer finds none."""
    optimizers: dict[torch.Tensor, torch.optim.Optimizer] = {
        parameter: _adam([parameter]) for parameter in model.parameters()
    }

    def hook(parameter: torch.Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(hook)


class Trainee:
    """A model in training, plain or offloaded; use as a context manager.

    Args:
        workload: which model.
        config: how it is offloaded; ``None``: not at all.
        device: where the loop puts model and batches.
        in_backward: whether a plain model is stepped in backward, each parameter by an optimizer of its own;
            an offloaded one's config says so (``optimizer_in_backward``).
    """

    def __init__(
        self,
        workload: Workload,
        config: ts.OffloadConfig | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
        *,
        in_backward: bool = False,
    ) -> None:
        self._dim = workload.dim
        self._device = device
        self._model = workload.new_model().to(device)
        self._optimizer = _adam(self._model.parameters())
        if in_backward:
            _step_in_backward(self._model)
        self._chance = torch.Generator().manual_seed(1)
        self._losses: list[torch.Tensor] = []
        self._run: Offload | None = None
        if config is not None:
            self._run = offload(self._model, self._optimizer, config)

    @property
    def losses(self) -> torch.Tensor:
        """The losses of all steps so far."""
        return torch.stack(self._losses)

    def step(self) -> None:
        """Train on the next batch, as any loop does."""
        loss = train_step(self._model, self._optimizer, self._dim, self._chance, self._device)
        self._losses.append(loss.detach().clone())

    def seconds_a_step(self, steps: int) -> float:
        """Train ``steps`` steps and wait until no copy is under way; return the seconds of one.

        The wait counts: what a step leaves to be done behind the next one must not be done behind
        the peer's.
        """
        begun = time.perf_counter()
        for _ in range(steps):
            self.step()
        self._settle()
        return (time.perf_counter() - begun) / steps

    def _settle(self) -> None:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if self._run is not None:
            wait_for_copies(self._run.store)

    @property
    def store(self) -> ts.Store:
        """The store that an offloaded model's state is in."""
        assert self._run is not None
        return self._run.store

    @property
    def placement(self) -> Placement:
        """Where an offloaded model's bytes live."""
        assert self._run is not None
        return self._run.placement

    def __enter__(self) -> Trainee:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None:
            self._run.close()
