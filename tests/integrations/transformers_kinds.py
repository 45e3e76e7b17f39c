"""Models of transformers, small enough for tests: one of each way to be built, named and tied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.training.twins import config_of, with_device

VOCABULARY = 61


def llama(**changes: Any) -> LlamaConfig:
    """Return the sizes of a Llama with rotary tables and fewer heads for keys."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return LlamaConfig(**{**sizes, **changes})


def gpt2() -> GPT2Config:
    """Return the sizes of a GPT-2, whose head is its embedding."""
    return GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, n_positions=64,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip


def t5() -> T5Config:
    """Return the sizes of a T5, with one embedding for encoder, decoder and head."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
        "decoder_start_token_id": 0, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    return T5Config(**sizes)  # fmt: skip


BUILDS: Mapping[str, Callable[[], tuple[type[PreTrainedModel], PretrainedConfig]]] = {
    "llama": lambda: (LlamaForCausalLM, llama()),
    "tied llama": lambda: (LlamaForCausalLM, llama(tie_word_embeddings=True)),
    "llama with scaled positions": lambda: (
        LlamaForCausalLM,
        llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}),
    ),
    "gpt2": lambda: (GPT2LMHeadModel, gpt2()),
    "t5": lambda: (T5ForConditionalGeneration, t5()),
}
"""By name: the class of a model, and its sizes."""


def built(kind: str) -> PreTrainedModel:
    """Return a model with random values, the same ones each time."""
    model_class, config = BUILDS[kind]()
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config)
    model.train(mode=False)
    return model


def tokens(seed: int = 7, count: int = 2) -> Tensor:
    """Return random tokens ``(count, 6)``."""
    return torch.randint(3, VOCABULARY, (count, 6), generator=torch.Generator().manual_seed(seed))


def loss_of(model: PreTrainedModel, seed: int) -> Tensor:
    """Return the loss of one batch."""
    loss: Tensor = model(input_ids=tokens(seed), labels=tokens(seed)).loss
    return loss


def tiers(layout: str, path: Path) -> dict[str, object]:
    """Return a layout whose device has room for what these models compute with."""
    return config_of(layout, path, with_device(layout, "512KB"))
