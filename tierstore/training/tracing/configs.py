"""Models from a ``config.json`` of Hugging Face's: their sizes, made by ``transformers``, without values.

Nothing is downloaded, and no code but that of ``transformers`` runs: what a configuration says of code of its
own (``auto_map``) is not looked at.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.formats.bounded_json import read_json
from tierstore.quoting import quoted
from tierstore.training.tracing.built import Built, MakeOptimizer
from tierstore.training.tracing.example_inputs import example_inputs

_NAMES = "MAPPING_NAMES"
_MOST_LAYERS = 10_000
_MOST = 2**40  # of any size in a configuration
_NEAR = 3

DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float64": torch.float64,
}
"""By the names that are accepted."""

_RATE = 1e-4

OPTIMIZERS: Mapping[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=_RATE),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=_RATE),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=_RATE),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=_RATE, momentum=0.9),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=_RATE),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=_RATE),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=_RATE),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=_RATE),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=_RATE),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=_RATE),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, lr=_RATE),
}
"""By the names that are accepted; ``momentum`` is SGD with 0.9."""


def optimizer_named(name: str) -> MakeOptimizer | None:
    """Return what makes an optimizer of some parameters; ``None`` for ``"none"``.

    Raises:
        UsageError: none is called so.
    """
    if name.lower() == "none":
        return None
    found = OPTIMIZERS.get(name.lower())
    if found is None:
        raise UsageError(f"optimizer={quoted(name)}: accepted: {', '.join(OPTIMIZERS)}, none.")
    return found


def dtype_named(name: str) -> torch.dtype:
    """Return a type of numbers by its name.

    Raises:
        UsageError: none is called so.
    """
    found = DTYPES.get(name.lower().removeprefix("torch."))
    if found is None:
        raise UsageError(f"dtype={quoted(name)}: accepted: {', '.join(DTYPES)}.")
    return found


def build_from_config(
    path: Path, *, batch: int = 1, sequence: int | None = None, dtype: str | None = None
) -> Callable[[], Built]:
    """Return what builds the model that a ``config.json`` describes, with inputs: what `trace_model` calls.

    Args:
        path: of the file.
        batch: how many inputs.
        sequence: how long each is; ``None``: as long as the model was made for, at most 2048.
        dtype: of its parameters; ``None``: as the file says, or float32.

    Raises:
        UsageError: the file cannot be read or is no such configuration, the architecture is not known, or
            ``transformers`` is not installed.
    """
    fields = _read(path)
    kept_as = dtype_named(dtype) if dtype is not None else _dtype_in(fields)
    transformers = _transformers()
    model_class = _class_of(transformers, fields, path)
    config = _config_of(transformers, fields, path)

    def build() -> Built:
        with _default_dtype(kept_as):
            model: nn.Module = model_class(config)
        length = sequence or min(int(getattr(config, "max_position_embeddings", 0) or _LONGEST), _LONGEST)
        return model, example_inputs(model, batch, length)

    return build


_LONGEST = 2048


def _read(path: Path) -> dict[str, object]:
    """Return what the file says, if that can be a configuration."""
    try:
        found = read_json(path)
    except OSError as cause:
        raise UsageError(f"{path} cannot be read: {cause}") from cause
    except ValueError as cause:
        raise UsageError(f"{path} is no config.json: {cause}") from cause
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise UsageError(f"{path} is no config.json of a model: it has no model_type.")
    for name, value in _numbers_in(found):
        most = _MOST_LAYERS if "layer" in name and "drop" not in name else _MOST
        if not -1 <= value <= most:
            raise UsageError(f"{path}: {quoted(name)} is {quoted(value)}; accepted: at most {most}.")
    return found


def _numbers_in(fields: Mapping[str, object]) -> Iterator[tuple[str, int]]:
    for name, value in fields.items():
        if isinstance(value, dict):
            yield from _numbers_in(value)
        elif isinstance(value, int) and name.startswith(_SIZES):
            yield name, value


_SIZES = ("num_", "n_", "hidden_", "intermediate_", "vocab_", "max_position", "d_", "encoder_", "decoder_")


def _dtype_in(fields: Mapping[str, object]) -> torch.dtype:
    said = fields.get("dtype") or fields.get("torch_dtype")
    return dtype_named(said) if isinstance(said, str) else torch.float32


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as cause:
        raise UsageError(
            "a model from a config.json needs transformers, which is not installed: "
            "pip install 'tierstore[examples]'"
        ) from cause


def _class_of(transformers: ModuleType, fields: Mapping[str, object], path: Path) -> Callable[..., nn.Module]:
    """Return the class of the first architecture that the file names; without one, that of its kind."""
    known = set(_known_architectures())
    named = fields.get("architectures")
    names = [each for each in named if isinstance(each, str)] if isinstance(named, list) else []
    if not names:
        names = [*_usual_architecture(str(fields["model_type"]))]
    found = next((each for each in names if each in known), None)
    if found is None:
        asked = names[0] if names else str(fields["model_type"])
        near = difflib.get_close_matches(asked, sorted(known), n=_NEAR)
        hint = f" Near it: {', '.join(near)}." if near else ""
        raise UsageError(
            f"{path}: transformers {transformers.__version__} knows no architecture {quoted(asked)}.{hint}"
        )
    model_class: Callable[..., nn.Module] = getattr(transformers, found)
    return model_class


def _known_architectures() -> Iterator[str]:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for name, table in vars(auto).items():
        if name.endswith(_NAMES) and name.startswith("MODEL_"):
            for each in table.values():
                yield from (each,) if isinstance(each, str) else each


def _usual_architecture(model_type: str) -> Iterable[str]:
    """Return the class that predicts the next token, or the plain model, of a kind."""
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    for table in (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_MAPPING_NAMES):
        found = table.get(model_type)
        if found is not None:
            return (found,) if isinstance(found, str) else found
    return ()


def _config_of(transformers: ModuleType, fields: Mapping[str, object], path: Path) -> Any:  # noqa: ANN401
    kinds = importlib.import_module("transformers.models.auto.configuration_auto").CONFIG_MAPPING_NAMES
    model_type = str(fields["model_type"])
    if model_type not in kinds:
        near = difflib.get_close_matches(model_type, sorted(kinds), n=_NEAR)
        hint = f" Near it: {', '.join(near)}." if near else ""
        raise UsageError(
            f"{path}: transformers {transformers.__version__} knows no model_type {quoted(model_type)}.{hint}"
        )
    given = {name: value for name, value in fields.items() if name not in _NOT_GIVEN}
    try:
        config = transformers.AutoConfig.for_model(model_type, **given)
    except Exception as cause:  # whatever a broken file makes transformers raise
        raise UsageError(
            f"{path} is no configuration of {model_type}: {type(cause).__name__}: {quoted(str(cause))}"
        ) from cause
    config.use_cache = False
    return config


_NOT_GIVEN = ("model_type", "auto_map", "quantization_config", "torch_dtype", "dtype")


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(former)
