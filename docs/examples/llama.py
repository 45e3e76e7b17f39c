"""A Llama-style language model in plain PyTorch, small enough to read in one sitting.

RMSNorm, rotary positions, causal attention and a SwiGLU feed-forward, with the module names of the
published checkpoints (``layers.0.attention.wq``, ``layers.0.feed_forward.w1``, ...).  Nothing in
here knows of tierstore: that is the point of the example that trains it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

ROTARY_BASE = 10_000.0  # the wavelength base of RoFormer (arXiv:2104.09864, section 3.2.2)
HIDDEN_MULTIPLE = 32  # the feed-forward's width is rounded up to it


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a model; the defaults make one of 25.6 million parameters.

    Attributes:
        vocabulary: how many tokens there are; 256 for bytes.
        is_recomputed: whether backward computes each layer's activations again instead of keeping them.
    """

    vocabulary: int = 256
    dim: int = 512
    layers: int = 8
    heads: int = 8
    is_recomputed: bool = True

    def __post_init__(self) -> None:
        """Refuse sizes that make no model.

        Raises:
            ValueError: a size below one, or heads that do not share ``dim`` in even parts.
        """
        if min(self.vocabulary, self.dim, self.layers, self.heads) < 1:
            raise ValueError("vocabulary, dim, layers and heads must all be at least 1")
        if self.dim % (2 * self.heads):
            raise ValueError(
                f"dim must be a multiple of twice the heads: {self.dim} is none of {2 * self.heads}"
            )

    @property
    def hidden(self) -> int:
        """The feed-forward's width: two thirds of ``4 * dim``, since SwiGLU has three matrices, not two."""
        return -(-(8 * self.dim // 3) // HIDDEN_MULTIPLE) * HIDDEN_MULTIPLE

    @property
    def parameters(self) -> int:
        """How many numbers the model learns."""
        layer = 4 * self.dim**2 + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * layer + 2 * self.vocabulary * self.dim + self.dim


def rotary_tables(length: int, head_dim: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each ``(length, head_dim / 2)``, by which pairs are turned."""
    exponents = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = torch.outer(positions, ROTARY_BASE**-exponents)
    return angles.cos(), angles.sin()


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of ``(batch, heads, length, head_dim)`` by its position."""
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class FlashAttention(nn.Module):
    """Causal attention in one operator, a module of its own so that a pattern can name it."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Mix ``(batch, heads, length, head_dim)`` along its length."""
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True)


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, config.dim, bias=False)
        self.wv = nn.Linear(config.dim, config.dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.flash_attention = FlashAttention()

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Mix ``(batch, length, dim)`` along its length."""
        query = rotate(self._split(self.wq(x)), cosines, sines)
        key = rotate(self._split(self.wk(x)), cosines, sines)
        value = self._split(self.wv(x))
        mixed: Tensor = self.flash_attention(query, key, value)
        output: Tensor = self.wo(mixed.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        return x.view(batch, length, self.heads, dim // self.heads).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): ``w2(silu(w1 x) * w3 x)``."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden, bias=False)
        self.w2 = nn.Linear(config.hidden, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position of ``(batch, length, dim)`` by itself."""
        output: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return output


class Layer(nn.Module):
    """One block: attention, then feed-forward, each with a norm before it and a residual around it."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.attention_norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=1e-5)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        """Transform ``(batch, length, dim)``."""
        x = x + self.attention(self.attention_norm(x), cosines, sines)
        output: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return output


class Llama(nn.Module):
    """Tokens in, the logits of each next token out."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocabulary, config.dim)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.dim, eps=1e-5)
        self.output = nn.Linear(config.dim, config.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Draw every matrix from a normal distribution; those that write to the residual are narrower."""
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            is_residual = name.endswith(("wo.weight", "w2.weight"))
            deviation = 0.02 / (2 * self.config.layers) ** 0.5 if is_residual else 0.02
            nn.init.normal_(parameter, std=deviation)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, length)`` token numbers to ``(batch, length, vocabulary)`` logits."""
        x = self.tok_embeddings(tokens)
        head_dim = self.config.dim // self.config.heads
        cosines, sines = rotary_tables(tokens.shape[1], head_dim, tokens.device)
        for layer in self.layers:
            if self.config.is_recomputed and torch.is_grad_enabled():
                x = checkpoint(layer, x, cosines, sines, use_reentrant=False)
            else:
                x = layer(x, cosines, sines)
        logits: Tensor = self.output(self.norm(x))
        return logits
