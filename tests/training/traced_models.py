"""Models that are traced without memory and run with it: small ones of every sort that can be traced wrong.

Each is made by a function as `tierstore.training.tracing.trace_model` calls it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from tierstore.testing.memory import DeviceBudget

Parts = tuple[nn.Module, tuple[torch.Tensor, ...], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def mlp() -> Parts:
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(4))
    )
    return model, (torch.randn(32, 64),), adamw(model)


def deep() -> Parts:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(12)))
    return model, (torch.randn(64, 48),), momentum(model)


def convolutions() -> Parts:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2),
        nn.BatchNorm2d(32),
        nn.ReLU(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, (torch.randn(4, 3, 32, 32),), momentum(model)


def encoder() -> Parts:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return model, (torch.randn(4, 48, 64),), adamw(model)


class Attention(nn.Module):
    """Attention that is asked for in one of the ways that have kernels of their own."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.project = nn.Linear(64, 3 * 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        query, key, value = self.project(x).view(batch, length, 3, 4, 16).permute(2, 0, 3, 1, 4)
        if self.way == "grouped":
            key, value = key[:, :2], value[:, :2]
        found = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            self._mask(batch, length),
            dropout_p=0.1 if self.way == "dropout" else 0.0,
            is_causal=self.way == "causal",
            enable_gqa=self.way == "grouped",
        )
        return found.transpose(1, 2).reshape(batch, length, width)

    def _mask(self, batch: int, length: int) -> torch.Tensor | None:
        if self.way == "chosen":
            return torch.ones(length, length, dtype=torch.bool).tril()
        if self.way in ("added", "learned"):
            return torch.zeros(batch, 1, length, length, requires_grad=self.way == "learned")
        return None


WAYS = ("plain", "causal", "dropout", "grouped", "chosen", "added", "learned")


def attention(way: str) -> Callable[[], Parts]:
    def build() -> Parts:
        model = Attention(way)
        return model, (torch.randn(2, 96, 64),), momentum(model)

    return build


class Checkpointed(nn.Module):
    """Layers that are computed again in backward, attention among them."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.begin = nn.Linear(64, 64)
        self.layers = nn.ModuleList(nn.Sequential(Attention("causal"), nn.GELU()) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.begin(x)
        for layer in self.layers:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def checkpointed(*, reentrant: bool) -> Callable[[], Parts]:
    def build() -> Parts:
        model = Checkpointed(reentrant=reentrant)
        return model, (torch.randn(4, 96, 64),), momentum(model)

    return build


class Adapted(nn.Module):
    """Tied embeddings, and frozen matrices with narrow trained ones beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        self.frozen = nn.ModuleList(nn.Linear(64, 64).requires_grad_(requires_grad=False) for _ in range(4))
        self.down = nn.ModuleList(nn.Linear(64, 4, bias=False) for _ in range(4))
        self.up = nn.ModuleList(nn.Linear(4, 64, bias=False) for _ in range(4))
        self.head = nn.Linear(64, 300, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for frozen, down, up in zip(self.frozen, self.down, self.up, strict=True):
            x = torch.tanh(frozen(x) + up(down(x)))
        found: torch.Tensor = self.head(x)
        return found


def adapted() -> Parts:
    model = Adapted()
    return model, (torch.randint(0, 300, (4, 32)),), adamw(model)


class Skips(nn.Module):
    """What the way down made is kept for the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Conv2d(8 * 2**n, 16 * 2**n, 3, stride=2, padding=1) for n in range(2))
        self.up = nn.ModuleList(nn.Conv2d(24 * 2**n, 8 * 2**n, 3, padding=1) for n in (1, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            kept.append(x)
            x = torch.relu(layer(x))
        for layer in self.up:
            wide = functional.interpolate(x, scale_factor=2.0)
            x = torch.relu(layer(torch.cat([wide, kept.pop()], dim=1)))
        return x


def skips() -> Parts:
    model = Skips()
    return model, (torch.randn(2, 8, 32, 32),), adamw(model)


class Experts(nn.Module):
    """Experts that take turns by position, as a router that is fixed."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 128), nn.GELU(), nn.Linear(128, 32)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(4, dim=1)
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return x + torch.cat(made, dim=1)


class Shared(nn.Module):
    """A parameter that several operators in a row use, and one that two modules share."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.first = nn.Linear(64, 64)
        self.second = nn.Linear(64, 64)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) * self.scale * self.scale
        found: torch.Tensor = self.second(x)
        return found * self.scale


def shared() -> Parts:
    model = Shared()
    return model, (torch.randn(16, 64),), adamw(model)


def experts() -> Parts:
    model = nn.Sequential(*(Experts() for _ in range(3)))
    return model, (torch.randn(2, 16, 32),), torch.optim.NAdam(model.parameters())


BUILDS: Mapping[str, Callable[[], Parts]] = {
    "mlp": mlp,
    "deep": deep,
    "convolutions": convolutions,
    "encoder": encoder,
    "checkpointed": checkpointed(reentrant=False),
    "reentrant": checkpointed(reentrant=True),
    "adapted": adapted,
    "skips": skips,
    "shared": shared,
    "experts": experts,
    **{f"attention-{way}": attention(way) for way in WAYS},
}
"""By name."""


def loss_of(model: nn.Module, inputs: object) -> torch.Tensor:
    """Take the mean of squares of what a model makes of its inputs."""
    assert isinstance(inputs, tuple)
    loss: torch.Tensor = model(*inputs).square().mean()
    return loss


def measured_peak_bytes(build: Callable[[], Parts], steps: int = 2) -> tuple[int, int]:
    """Return what plain PyTorch holds at most, and the bytes of numbers that optimizers keep on the host.

    Optimizers keep how far they are as a tensor in host memory, also where a model is on a device.
    """
    with DeviceBudget("1TB") as meter:
        model, inputs, optimizer = build()
        for _ in range(steps):
            loss_of(model, inputs).backward()
            optimizer.step()
            optimizer.zero_grad()
        numbers = sum(each.nbytes for each in _numbers_in(optimizer))
    return meter.peak_bytes, numbers


def _numbers_in(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for entries in optimizer.state.values():
        yield from (each for each in entries.values() if isinstance(each, torch.Tensor) and not each.dim())
