"""Small models for recomputing: with dropout, norms that count, buffers that change, and odd signatures."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.training.twins import same
from tierstore.training import Recompute, recompute

DIM, LENGTH = 16, 6


class Kernel(nn.Module):
    """Scaled dot product attention, as a submodule."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix values."""
        mixed: Tensor = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return mixed


class Attention(nn.Module):
    """Attention with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.flash_attention = Kernel()

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, DIM)``."""
        query, key, value = (
            each(x).unflatten(-1, (2, -1)).transpose(1, 2) for each in (self.wq, self.wk, self.wv)
        )
        mixed: Tensor = self.flash_attention(query, key, value)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output


class FeedForward(nn.Module):
    """SwiGLU with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(DIM, 2 * DIM, bias=False), nn.Linear(DIM, 2 * DIM, bias=False)
        self.w2 = nn.Linear(2 * DIM, DIM, bias=False)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, DIM)``."""
        output: Tensor = self.dropout(self.w2(functional.silu(self.w1(x)) * self.w3(x)))
        return output


class LlamaLayer(nn.Module):
    """Attention and feed-forward with norms."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.feed_forward = FeedForward()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.LayerNorm(DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, DIM)``."""
        x = x + self.attention(self.attention_norm(x))
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class ConvLayer(nn.Module):
    """Convolution, batch norm, and what changes things in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.relu = nn.ReLU(inplace=True)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, DIM), nn.BatchNorm1d(LENGTH), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, LENGTH, DIM)``."""
        y = x - self.relu(self.norm(self.conv(x)))
        y += x
        y[:, 0] *= 2
        output: Tensor = self.feed_forward(y)
        output += torch.sin(y)
        return output


class Counting(nn.Module):
    """Reads buffers and changes them: in place, by another object, and where there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor
        self.steps: Tensor
        self.seen: Tensor | None
        self.register_buffer("scale", torch.ones(DIM))
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("seen", None)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, DIM)``."""
        self.steps = self.steps + 1
        with torch.no_grad():
            self.scale.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
            self.seen = torch.zeros(DIM) if self.seen is None else self.seen + 1
        return x * self.scale.clone() / self.steps + self.seen


class CountingLayer(nn.Module):
    """Operators around a module whose buffers change."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(DIM, DIM)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, DIM), Counting())

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, DIM)``."""
        output: Tensor = self.feed_forward(torch.tanh(self.attention(x)))
        return output


class Cubed(torch.autograd.Function):
    """A function with its own backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor) -> Tensor:
        """Cube."""
        y = x * x
        ctx.save_for_backward(x, y)
        return y * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> Tensor:
        """Return three times the square."""
        x, y = ctx.saved_tensors  # type: ignore[attr-defined]
        scaled: Tensor = grad * (3 * y + 0 * x)
        return scaled


def cubed(x: Tensor) -> Tensor:
    """Return the cube."""
    found: Tensor = Cubed.apply(x)  # type: ignore[no-untyped-call]
    return found


@functools.cache
def recurrent() -> type[nn.LSTM | nn.GRU]:
    """Return LSTM, or GRU where the processor is one for which PyTorch has no LSTM in bfloat16."""
    try:
        with torch.random.fork_rng(), torch.autocast("cpu", dtype=torch.bfloat16):
            nn.LSTM(DIM, DIM)(torch.zeros(1, 1, DIM))
    except RuntimeError:
        return nn.GRU
    return nn.LSTM


class OddLayer(nn.Module):
    """Tuples, named and absent arguments, absent outputs, a function of its own, and parts that run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Linear(DIM, DIM)
        self.feed_forward = nn.ModuleDict(
            {"one": nn.Linear(DIM, DIM), "two": recurrent()(DIM, DIM, batch_first=True)}
        )

    def forward(
        self, x: Tensor, *, bias: Tensor | None, pair: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, None, Tensor]:
        """Transform ``(batch, length, DIM)``."""
        y = self.attention(self.attention(x)) + pair[0]
        z = self.feed_forward["one"](cubed(torch.tanh(y))) * pair[1]
        out, _ = self.feed_forward["two"](z if bias is None else z + bias)
        return out + x, None, y.square().mean()


class Model(nn.Module):
    """Layers with a head."""

    def __init__(self, layer: Callable[[], nn.Module], count: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(count))
        self.output = nn.Linear(DIM, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``(batch, LENGTH, DIM)`` to scores; the first layer runs twice."""
        for layer in (*self.layers, self.layers[0]):
            if isinstance(layer, OddLayer):
                bias = x.mean((0, 1)) if layer is self.layers[1] else None
                x, _, extra = layer(x, bias=bias, pair=(x.roll(1), x.cos()))
                x = x + extra
            else:
                x = layer(x)
        scores: Tensor = self.output(x)
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: Model(LlamaLayer),
    "conv": lambda: Model(ConvLayer),
    "counting": lambda: Model(CountingLayer),
    "odd": lambda: Model(OddLayer),
}

CONFIGS: dict[str, dict[str, object]] = {
    "whole": {"recompute": True},
    "some": {"recompute": [2]},
    "submodules": {"select_recompute": ["attention", "feed_forward"]},
    "leaves": {"select_recompute": [r".*\..*", "relu", "norm", "conv", ".*_norm"]},
    "named": {
        "select_recompute": [r"feed_forward\.mul", r"feed_forward\.silu", "tanh", "add", r"feed_forward\.0"]
    },
    "aten": {"select_recompute": [r"aten\..*"]},
    "products": {"select_recompute": ["aten.mm", "aten.addmm", "aten.convolution", "aten.native_batch_norm"]},
    "whole but": {
        "recompute": True,
        "select_recompute_exclude": ["aten.mm", "aten.addmm", r"feed_forward\.mul"],
    },
    "both": {"recompute": [1], "select_recompute": ["feed_forward", r"attention\..*", "aten.tanh"]},
}


def inputs(number: int = 0, batch: int = 3) -> Tensor:
    """Return some inputs."""
    return torch.randn(batch, LENGTH, DIM, generator=torch.Generator().manual_seed(number))


@contextlib.contextmanager
def recomputing(model: nn.Module, config: Mapping[str, object]) -> Iterator[Recompute]:
    """Recompute inside the context; afterwards nothing may be left on the model."""
    with recompute(model, config, layers="layers") as run:
        yield run
    assert hooks_of(model) == 0


def hooks_of(model: nn.Module) -> int:
    """Return how many forward hooks a model's modules have."""
    return sum(len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules())


Steps = Callable[[nn.Module], list[Tensor | None]]
"""What is done with a model; returns what has to be the same."""


def train(model: nn.Module) -> list[Tensor | None]:
    """Run forward and backward twice, gradients added up."""
    losses: list[Tensor | None] = []
    for number in range(2):
        loss = model(inputs(number)).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


def outcome(model: nn.Module, logged: list[Tensor | None]) -> list[Tensor | None]:
    """Return what was logged, gradients, buffers with their versions, and what is drawn next."""
    versions = [torch.tensor(buffer._version) for buffer in model.buffers()]
    gradients = [parameter.grad for parameter in model.parameters()]
    return [*logged, *gradients, *model.buffers(), *versions, torch.rand(2)]


def assert_same_bits(build: Callable[[], nn.Module], steps: Steps, config: Mapping[str, object]) -> Recompute:
    """Do the same with and without recomputing, and compare all that is left; return what was recomputed."""
    torch.manual_seed(0)
    plain = build()
    torch.manual_seed(1)
    expected = outcome(plain, steps(plain))
    torch.manual_seed(0)
    model = build()
    with recomputing(model, config) as run:
        torch.manual_seed(1)
        found = outcome(model, steps(model))
    assert len(expected) == len(found)
    for number, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert (a is None) == (b is None), f"tensor {number}: one of the two is None"
        assert a is None or b is None or same(a, b), f"tensor {number} differs: {a} and {b}"
    return run
