"""The ten models of the planner's grid: one of each sort that a planner can be wrong about.

Each is small enough for two cores and large enough that what moves takes time: 5 to 30 MiB of parameters.
They are made under whatever device and dtype is in force, so that they can be made of nothing (``meta``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

Loss = Callable[[nn.Module, tuple[torch.Tensor, ...]], torch.Tensor]


def _mean(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    loss: torch.Tensor = model(*inputs).float().square().mean()
    return loss


def _logits_mean(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Take a loss of a model of transformers."""
    loss: torch.Tensor = model(*inputs, use_cache=False).logits.float().square().mean()
    return loss


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-4)


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-4)


@dataclass(frozen=True)
class PlannedModel:
    """One model, what it is given, and how it is trained.

    Attributes:
        make: the model.
        inputs: one batch.
        loss: of a batch.
        optimizer: of the model.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[torch.Tensor, ...]]
    loss: Loss = _mean
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = _adamw

    def build(self) -> tuple[nn.Module, tuple[torch.Tensor, ...], torch.optim.Optimizer]:
        """Return all of it, made."""
        model = self.make()
        return model, self.inputs(), self.optimizer(model)


def _chain(width: int, depth: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.GELU()]
    return nn.Sequential(*layers)


class _Residual(nn.Module):
    """Two convolutions with batch statistics, and what they are given beside them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.body(x))


def _convolutions() -> nn.Module:
    sides = [3, 64, 128, 192, 256, 256, 256, 256, 256, 256]
    layers: list[nn.Module] = []
    for number, (given, made) in enumerate(itertools.pairwise(sides)):
        layers += [nn.Conv2d(given, made, 3, padding=1), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if number in (0, 1, 2) else []
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(sides[-1], 100))


def _residual() -> nn.Module:
    blocks = [_Residual(192) for _ in range(6)]
    return nn.Sequential(nn.Conv2d(3, 192, 7, stride=4), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2000,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=4,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=2000,
        n_positions=256,
        n_embd=256,
        n_layer=8,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    model: nn.Module = GPT2LMHeadModel(config)
    return model


class _Adapted(nn.Module):
    """A frozen matrix with a narrow trained one beside it (LoRA)."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.base.requires_grad_(requires_grad=False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class _TiedAdapted(nn.Module):
    """An embedding that is the head, too, with adapted layers between."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(640, 512)
        self.layers = nn.ModuleList(_Adapted(512, 16) for _ in range(16))
        self.head = nn.Linear(512, 640, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        found: torch.Tensor = self.head(x)
        return found


class _Experts(nn.Module):
    """Experts that take turns by position: as a router that is fixed."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(count)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = x.chunk(len(self.experts), dim=1)
        made = [expert(part) for expert, part in zip(self.experts, parts, strict=True)]
        return x + torch.cat(made, dim=1)


class _Skips(nn.Module):
    """Down and up again, with what each level made kept for the way up (U-Net)."""

    def __init__(self) -> None:
        super().__init__()
        sides = [48, 96, 160, 256]
        self.begin = nn.Conv2d(3, sides[0], 3, padding=1)
        self.down = nn.ModuleList(
            nn.Conv2d(given, made, 3, stride=2, padding=1) for given, made in itertools.pairwise(sides)
        )
        self.middle = nn.ModuleList(nn.Conv2d(sides[-1], sides[-1], 3, padding=1) for _ in range(4))
        self.up = nn.ModuleList(
            nn.Conv2d(made + given, given, 3, padding=1)
            for given, made in reversed(list(itertools.pairwise(sides)))
        )
        self.end = nn.Conv2d(sides[0], 3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.begin(x))
        kept = []
        for layer in self.down:
            kept.append(x)
            x = torch.relu(layer(x))
        for layer in self.middle:
            x = torch.relu(layer(x))
        for layer in self.up:
            wide = nn.functional.interpolate(x, scale_factor=2.0)
            x = torch.relu(layer(torch.cat([wide, kept.pop()], dim=1)))
        found: torch.Tensor = self.end(x)
        return found


def _tokens(batch: int, length: int, words: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randint(0, words, (batch, length)),)


def _values(*shape: int) -> Callable[[], tuple[torch.Tensor, ...]]:
    return lambda: (torch.randn(shape),)


def _small_convolutions() -> nn.Module:
    layers: list[nn.Module] = []
    for number in range(6):
        layers += [nn.Conv2d(128 if number else 3, 128, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


def _small_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


SMALL_MODELS: Mapping[str, PlannedModel] = {
    "small-mlp": PlannedModel(lambda: _chain(384, 6), _values(64, 384)),
    "small-convolutions": PlannedModel(_small_convolutions, _values(1, 3, 16, 16)),
    "small-encoder": PlannedModel(_small_encoder, _values(1, 64, 128)),
}
"""Of six layers each, by name: those that every placement is tried with."""

MODELS: Mapping[str, PlannedModel] = {
    "mlp": PlannedModel(lambda: _chain(768, 8), _values(256, 768)),
    "deep": PlannedModel(lambda: _chain(256, 48), _values(32, 256), optimizer=_momentum),
    "convolutions": PlannedModel(_convolutions, _values(2, 3, 64, 64)),
    "residual": PlannedModel(_residual, _values(4, 3, 32, 32), optimizer=_momentum),
    "encoder": PlannedModel(_encoder, _values(1, 128, 256)),
    "llama": PlannedModel(_llama, _tokens(1, 64, 2000), _logits_mean),
    "gpt2": PlannedModel(_gpt2, _tokens(1, 16, 2000), _logits_mean, _adafactor),
    "tied-adapted": PlannedModel(_TiedAdapted, _tokens(1, 64, 640)),
    "experts": PlannedModel(
        lambda: nn.Sequential(*(_Experts(192, 4) for _ in range(6))), _values(4, 64, 192)
    ),
    "skips": PlannedModel(_Skips, _values(1, 3, 32, 32)),
}
"""By name."""
