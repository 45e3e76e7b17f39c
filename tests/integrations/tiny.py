"""Tiny models of `transformers` from a configuration, data for them, and what a Trainer leaves of a training.

What belongs to the libraries is imported where it is used: it takes seconds, and every process that collects
tests would pay for it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from tests.training.twins import LATE_AND_OVERWRITTEN, same

if TYPE_CHECKING:
    from transformers import Trainer

VOCABULARY = 64
LENGTH = 8

FRAMEWORKS_WARN = (
    "ignore:.*:FutureWarning",
    "ignore:.*:DeprecationWarning",
)

LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": "64MB", "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": "192KB", "offload_disk_size": "64MB"},
    "device": {
        "device": "emulated",
        "max_device_memory": "256KB",
        "offload_cpu_size": "64MB",
        "offload_disk_size": 0,
        "device_options": LATE_AND_OVERWRITTEN,
    },
    "three": {
        "device": "emulated",
        "max_device_memory": "256KB",
        "offload_cpu_size": "192KB",
        "offload_disk_size": "64MB",
        "device_options": LATE_AND_OVERWRITTEN,
    },
}
"""With gradients and Adam's state the models need 400 KB and more."""


def config_of(layout: str, path: Path, **more: object) -> dict[str, object]:
    """Return the configuration of a layout, with its files at ``path``."""
    return {**LAYOUTS[layout], "offload_path": str(path / "tiers"), **more}


def model_of(kind: str) -> nn.Module:
    """Return a model with the same parameters at every call."""
    import transformers

    torch.manual_seed(0)
    if kind == "gpt2":
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=VOCABULARY, n_positions=2 * LENGTH, n_embd=32, n_layer=2, n_head=2, use_cache=False
            )
        )
    settings = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=2 * LENGTH,
        use_cache=False,
        tie_word_embeddings=kind == "tied",
    )
    return transformers.LlamaForCausalLM(settings)


def without_values() -> nn.Module:
    """Return a model on the meta device, but for what no file has: the tables of its rotary embedding."""
    with torch.device("meta"):
        model: Any = model_of("llama")
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    made: nn.Module = model
    return made


def rows(count: int, seed: int) -> list[dict[str, Tensor]]:
    """Return tokens, each the next one's label."""
    chance = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCABULARY, (LENGTH,), generator=chance) for _ in range(count)]
    return [{"input_ids": each, "labels": each} for each in tokens]


def arguments(path: Path, **more: Any) -> Any:
    """Return arguments of a training of a few steps that says nothing."""
    from transformers import TrainingArguments

    usual = {
        "output_dir": str(path / "output"),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 2,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "save_strategy": "no",
        "use_cpu": True,
        "seed": 3,
    }
    return TrainingArguments(**{**usual, **more})


@dataclass(frozen=True)
class Trained:
    """What a training leaves.

    Attributes:
        logged: what the Trainer logged, without times.
        tensors: parameters, buffers and the optimizer's state, by name.
        files: what it wrote, by path.
    """

    logged: Sequence[Mapping[str, object]]
    tensors: Mapping[str, Tensor]
    files: Mapping[str, object]


_TIMES = ("_runtime", "_per_second", "_time")


def outcome_of(trainer: Trainer, path: Path) -> Trained:
    """Return what a Trainer has left."""
    logged = [
        {key: value for key, value in each.items() if not key.endswith(_TIMES)}
        for each in trainer.state.log_history
    ]
    assert trainer.model is not None
    tensors = {name: each.detach().clone() for name, each in trainer.model.state_dict().items()}
    state = {} if trainer.optimizer is None else trainer.optimizer.state_dict()["state"]
    for number, entry in state.items():
        tensors |= {f"{number}.{key}": each for key, each in entry.items() if isinstance(each, Tensor)}
    return Trained(logged, tensors, _files(path / "output"))


def _files(folder: Path) -> dict[str, object]:
    """Return what files hold that a Trainer wrote: tensors, or text."""
    import safetensors.torch

    found: dict[str, object] = {}
    for file in sorted(folder.rglob("*")):
        name = str(file.relative_to(folder))
        if file.suffix == ".safetensors":
            found |= {f"{name}/{key}": each for key, each in safetensors.torch.load_file(file).items()}
        elif file.name in ("optimizer.pt", "scheduler.pt"):
            found |= _flat(torch.load(file, weights_only=True), name)
        elif file.name == "trainer_state.json":
            found[name] = [
                {key: value for key, value in each.items() if not key.endswith(_TIMES)}
                for each in json.loads(file.read_text())["log_history"]
            ]
        elif file.suffix == ".json":
            found[name] = file.read_text()
    return found


def _flat(value: object, name: str) -> dict[str, object]:
    if isinstance(value, Mapping):
        return {k: v for key, each in value.items() for k, v in _flat(each, f"{name}/{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for n, each in enumerate(value) for k, v in _flat(each, f"{name}/{n}").items()}
    return {name: value}


def differences(one: Trained, other: Trained) -> list[str]:
    """Return by name what is not the same bits."""
    found = [f"logged: {a} {b}" for a, b in zip(one.logged, other.logged, strict=False) if a != b]
    if len(one.logged) != len(other.logged):
        found.append(f"logged: {len(one.logged)} and {len(other.logged)}")
    for what, left, right in (
        ("tensors", one.tensors, other.tensors),
        ("files", one.files, other.files),
    ):
        found += [f"{what}: {name}" for name in sorted(left.keys() ^ right.keys())]
        found += [
            f"{what}: {name}" for name in left.keys() & right.keys() if not _are_same(left[name], right[name])
        ]
    return found


def _are_same(one: object, other: object) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same(one, other)
    return one == other


Make = Callable[..., Any]
"""Makes a Trainer of what ``Trainer`` takes."""


def makers(config: Mapping[str, object] | None, how: str, **options: Any) -> Make:
    """Return what makes a Trainer: a plain one, or an offloading one.

    Args:
        config: of the run; ``None``: there is none.
        how: ``"callback"`` or ``"class"``.
        options: what `offload` takes beside.
    """
    from transformers import Trainer

    if config is None:
        return Trainer
    from tierstore.integrations.transformers import TierstoreCallback, offloading

    if how == "class":
        return offloading(Trainer, config, **options)

    def make(*args: Any, callbacks: Sequence[Any] = (), **kwargs: Any) -> Trainer:
        kwargs["callbacks"] = [*callbacks, TierstoreCallback(config, **options)]
        return Trainer(*args, **kwargs)

    return make
