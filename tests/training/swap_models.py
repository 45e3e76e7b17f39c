"""Small models with the reference's names, and stores for their activations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.twins import LATE_AND_OVERWRITTEN, same
from tierstore.training import Swap, swap

DIM, HEADS, LENGTH = 32, 2, 16


class FlashAttention(nn.Module):
    """Scaled dot product attention, as a submodule."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix values."""
        mixed: Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed


class Attention(nn.Module):
    """Multi-head attention."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.flash_attention = FlashAttention()

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, dim)``."""
        heads = (self._split(each(x)) for each in (self.wq, self.wk, self.wv))
        mixed: Tensor = self.flash_attention(*heads)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        return heads


class FeedForward(nn.Module):
    """SwiGLU with dropout."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.w2 = nn.Linear(2 * dim, dim, bias=False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, dim)``."""
        output: Tensor = self.dropout(self.w2(functional.silu(self.w1(x)) * self.w3(x)))
        return output


class Layer(nn.Module):
    """One block."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__()
        self.attention = Attention(dim)
        self.feed_forward = FeedForward(dim)
        self.attention_norm, self.ffn_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, dim)``."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class Llama(nn.Module):
    """Blocks with a head."""

    def __init__(self, layers: int = 4, dim: int = DIM) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.output = nn.Linear(dim, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, length, dim)`` to scores."""
        for layer in self.layers:
            x = layer(x)
        scores: Tensor = self.output(x)
        return scores


def inputs(number: int = 0, batch: int = 2) -> Tensor:
    """Return some inputs."""
    return torch.randn(batch, LENGTH, DIM, generator=torch.Generator().manual_seed(number))


# ---------------------------------------------------------------------- stores

STORES: dict[str, dict[str, object]] = {
    "roomy": {"max_device_memory": "8MB", "offload_cpu_size": "8MB"},
    "short of device memory": {"max_device_memory": "48KB", "offload_cpu_size": "8MB"},
    "short of host memory": {"max_device_memory": "8MB", "offload_cpu_size": "40KB"},
    "short of both": {"max_device_memory": "48KB", "offload_cpu_size": "40KB"},
}
EVERYWHERE: dict[str, dict[str, object]] = {
    **STORES,
    "no device": {"device": "cpu", "offload_cpu_size": "100KB"},
}

every_store = pytest.mark.parametrize("store", EVERYWHERE)


def config(
    path: Path, swap_config: Mapping[str, object], store: str = "roomy", **more: object
) -> dict[str, object]:
    """Return a configuration with sections, with the store's files at ``path``."""
    offload_config: dict[str, object] = {
        "device": "emulated",
        "device_options": LATE_AND_OVERWRITTEN,
        "offload_disk_size": "64MB",
        "offload_path": str(path / "files"),
        **EVERYWHERE[store],
        **more,
    }
    if offload_config["device"] == "cpu":
        del offload_config["device_options"]
    return {"swap_config": {"swap": True, **swap_config}, "offload_config": offload_config}


def whole_layers(prefetch: int = 2) -> dict[str, object]:
    """Return marks on every layer."""
    return {"layer_swap": [{"backward_prefetch": prefetch, "layers": True}]}


def operators(*names: str, prefetch: int = 2) -> dict[str, object]:
    """Return marks on operators of every layer."""
    return {"op_swap": [{"op_name": list(names), "backward_prefetch": prefetch, "layers": True}]}


@contextlib.contextmanager
def swapping(model: nn.Module, settings: Mapping[str, object]) -> Iterator[Swap]:
    """Swap inside the context; at its end the books have to be right."""
    with swap(model, settings) as active:
        yield active
        active.store.check()


# ---------------------------------------------------------------------- the same with and without

Steps = Callable[[nn.Module], list[Tensor]]
"""What is done with a model; returns what has to be the same."""


def assert_same_bits(
    build: Callable[[], nn.Module], steps: Steps, settings: Mapping[str, object], *, least: int = 1
) -> None:
    """Do the same with and without swap; compare what it returns and every gradient.

    Args:
        build: makes the model.
        steps: what is done with it.
        settings: of the swap.
        least: how many storages have to be swapped at least, so that something is tested.
    """
    expected = _result(build, steps, None)
    found = _result(build, steps, settings, least)
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert same(a, b), f"tensor {number} differs"


def _result(
    build: Callable[[], nn.Module], steps: Steps, settings: Mapping[str, object] | None, least: int = 0
) -> list[Tensor]:
    torch.manual_seed(0)
    model = build()
    torch.manual_seed(1)
    if settings is None:
        logged = steps(model)
    else:
        with swapping(model, settings) as active:
            logged = steps(model)
            assert active.stats().activations.kept >= least
    absent = torch.empty(0)
    return [*logged, *(absent if p.grad is None else p.grad for p in model.parameters())]


def train(model: nn.Module, batches: int = 2) -> list[Tensor]:
    """Run forward and backward, gradients added up."""
    losses = []
    for number in range(batches):
        loss = model(inputs(number)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses
