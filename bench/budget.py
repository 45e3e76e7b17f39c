"""How far the state may exceed the device: trained under a meter, with the losses of plain PyTorch."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import torch
from torch import nn

import tierstore as ts
from bench.command import Question, Settings, main
from bench.record import Better, Figure
from tierstore.testing.memory import DeviceBudget, OutOfDeviceMemory
from tierstore.training import offload

MIB = 1024**2
DIM = 512  # a layer's weight is 1 MiB, its weight, gradient and moments are 4 MiB
LAYERS_IN_BUDGET = 3  # one layer's, the next one's on its way, Adam's temporaries and activations
RATIOS = (10, 30, 100)
STEPS = 3


class Layer(nn.Module):
    """A residual layer; the linear one is its only child, so that it travels alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Transform ``(batch, dim)``."""
        output: torch.Tensor = x + 0.1 * torch.relu(self.linear(x))
        return output


@dataclass(frozen=True)
class Case:
    """A model and the device that it is too large for."""

    dim: int
    layers: int

    @property
    def state_bytes(self) -> int:
        """Parameters, gradients and Adam's two moments, in float32."""
        return self.layers * 4 * 4 * self.dim**2

    @property
    def budget_bytes(self) -> int:
        """What the program may have on the device."""
        return LAYERS_IN_BUDGET * 4 * 4 * self.dim**2

    def new(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Build model and optimizer: the same parameters every time."""
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(self.dim) for _ in range(self.layers)))
        return model, torch.optim.Adam(model.parameters(), lr=1e-4)

    def losses(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """Train a few steps; return their losses."""
        chance = torch.Generator().manual_seed(1)
        losses = []
        for _ in range(STEPS):
            x, y = torch.randn(2, 4, self.dim, generator=chance).unbind()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach().clone())
        return torch.stack(losses)


@dataclass(frozen=True)
class Outcome:
    """What a run at one ratio came to."""

    ratio: float
    is_trained: bool
    text: str


def _attempt(case: Case) -> Outcome:
    """Train under the budget and compare with the same without one."""
    ratio = case.state_bytes / case.budget_bytes
    config = ts.OffloadConfig(
        device="emulated",
        max_device_memory=case.budget_bytes,
        offload_cpu_size=2 * case.state_bytes,
        offload_disk_size=0,
    )
    plain = case.losses(*case.new())
    model, optimizer = case.new()
    begun = time.perf_counter()
    try:
        with DeviceBudget(case.budget_bytes) as budget, offload(model, optimizer, config):
            losses = case.losses(model, optimizer)
    except (OutOfDeviceMemory, ts.CapacityError) as error:
        return Outcome(ratio, is_trained=False, text=f"{type(error).__name__}: {error}")
    is_equal = torch.equal(losses, plain)
    seconds = (time.perf_counter() - begun) / STEPS
    text = (
        f"{'equal losses' if is_equal else 'DIFFERENT losses'}, peak {budget.peak_bytes / MIB:.1f} MiB "
        f"of {case.budget_bytes / MIB:.1f} MiB, {seconds:.2f} s a step with everything around it"
    )
    return Outcome(ratio, is_equal and budget.peak_bytes <= case.budget_bytes, text)


def device_budget(settings: Settings) -> Figure:
    """Train deeper and deeper models under one budget."""
    dim = max(64, round(DIM * settings.scale**0.5))
    details = {}
    reached = 0.0
    for ratio in RATIOS if settings.scale >= 1 else RATIOS[:1]:
        outcome = _attempt(Case(dim, ratio * LAYERS_IN_BUDGET))
        details[f"{outcome.ratio:.0f} times: {ratio * LAYERS_IN_BUDGET} layers"] = outcome.text
        if not outcome.is_trained:
            break
        reached = outcome.ratio
    what = "parameters, gradients and Adam's state over the device budget, trained with equal losses under it"
    return Figure("device-budget", what, reached, "x the budget", 10, 100, Better.HIGHER, details)


QUESTIONS: dict[str, Question] = {"device-budget": device_budget}

if __name__ == "__main__":
    sys.exit(main("bench.budget", QUESTIONS))
