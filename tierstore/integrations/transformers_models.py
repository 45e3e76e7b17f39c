"""Models of ``transformers`` that are never whole in memory: of safetensors files, or a configuration.

These lines open one::

    model, weights = from_pretrained("path/to/model")
    with offload(model, optimizer, "run.yaml", weights=weights):
        ...

The model is built by ``transformers``, with its tables computed and its tied weights tied, and without memory
for its parameters.  ``weights`` says where `tierstore.training.offload` finds their values, which it reads
one bundle at a time.  Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import importlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import transformers
from transformers import AutoConfig, GenerationConfig, PretrainedConfig, PreTrainedModel

from tierstore.errors import UsageError
from tierstore.formats.renamed_tensors import RenamedTensors
from tierstore.formats.safetensors_files import TensorSource
from tierstore.formats.sharded_weights import open_source
from tierstore.training import InitialValues, without_values


class Transform(Protocol):
    """How `transformers` renames a tensor of files; one with `operations` computes another."""

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        """Return the name that a tensor gets, and the pattern that it has matched, if one."""
        ...


class EmptyModel(NamedTuple):
    """A model without values, and where they are.

    Attributes:
        model: its parameters are on the meta device; its buffers have values.
        weights: what ``weights`` of `tierstore.training.offload` is to be.
    """

    model: PreTrainedModel
    weights: TensorSource


def from_pretrained(
    directory: str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | None = None,
    config: PretrainedConfig | None = None,
) -> EmptyModel:
    """Return the model that a directory holds, in evaluation mode as ``transformers`` has it, without values.

    Args:
        directory: with a ``config.json`` and safetensors files: one, or several with an index.
        model_class: of the model; ``None``: the architecture that the configuration names.
        dtype: of its parameters; ``None``: the configuration's, or else that of the files.
        config: instead of the directory's.

    Raises:
        UsageError: there is no such directory, its files have no safetensors, or ``transformers`` would have
            to convert what they hold; the message says what to do.
    """
    path = Path(directory)
    if config is None:
        config = _read_config(path)
    with open_source(path) as source:
        model = _build(
            config, model_class or _class_of(config), dtype or _dtype_of(config) or _dtype_in(source)
        )
        names = _names_in(source, model)
    _keep_in_float32(model)
    if (path / "generation_config.json").exists() and model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path)
    model.train(mode=False)
    return EmptyModel(model, RenamedTensors(path, names))


def from_config(
    config: PretrainedConfig | str | Path,
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype | None = None,
) -> EmptyModel:
    """Return a model of a configuration, in training mode; its ``weights`` are random initial values.

    They are drawn as ``transformers`` draws them for each module, when the module goes into the store: the
    same seed gives the same model, though not the one that is built whole.

    Args:
        config: a configuration, or the path of a ``config.json`` or of its directory.
        model_class: of the model; ``None``: the architecture that the configuration names.
        dtype: of its parameters; ``None``: the configuration's, or else PyTorch's default.

    Raises:
        UsageError: there is no such file, or it names no architecture.
    """
    found = _read_config(Path(config)) if isinstance(config, str | Path) else config
    model = _build(found, model_class or _class_of(found), dtype or _dtype_of(found))
    return EmptyModel(model, InitialValues(model, model._init_weights))  # noqa: SLF001 - what models override


def _read_config(path: Path) -> PretrainedConfig:
    """Return a configuration; a name on a server is refused."""
    if not (path.is_file() or (path / "config.json").is_file()):
        raise UsageError(
            f"{str(path)!r} is no directory with a config.json: nothing is downloaded. Name a directory that "
            "model.save_pretrained(...) has written, or that was downloaded."
        )
    found: PretrainedConfig = AutoConfig.from_pretrained(path)
    return found


def _dtype_of(config: PretrainedConfig) -> torch.dtype | None:
    """Return the type of a configuration's parameters, if it says one."""
    said = config.dtype
    found: object = getattr(torch, said, None) if isinstance(said, str) else said
    return found if isinstance(found, torch.dtype) else None


def _class_of(config: PretrainedConfig) -> type[PreTrainedModel]:
    named = config.architectures or ()
    found = next((getattr(transformers, each) for each in named if hasattr(transformers, each)), None)
    if found is not None:
        chosen: type[PreTrainedModel] = found
        return chosen
    raise UsageError(
        f"the configuration of {config.model_type!r} names "
        f"{', '.join(named) + ', which this transformers does not have' if named else 'no architecture'}: "
        "pass model_class=, such as transformers.LlamaForCausalLM."
    )


def _dtype_in(source: TensorSource) -> torch.dtype | None:
    """Return the type of the first tensor of floating-point numbers."""
    dtypes = (source.dtype(name) for name in source.names)
    return next((each for each in dtypes if each is not None and each.is_floating_point), None)


def _build(
    config: PretrainedConfig, model_class: type[PreTrainedModel], dtype: torch.dtype | None
) -> PreTrainedModel:
    """Build a model; only its buffers have values."""
    if getattr(config, "quantization_config", None) is not None:
        raise UsageError(
            "the configuration has a quantization_config: quantised weights are wrappers without plain "
            "bytes, "
            "which the store does not take. Use the model that was not quantised."
        )
    with without_values(), _default_dtype(dtype):
        model = model_class(config)
    if dtype is not None:
        model.config.dtype = dtype
    return model


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Give those parameters the type that ``transformers`` gives them in a model of half precision."""
    kept: Mapping[str, torch.dtype] = model._get_dtype_plan(model.dtype)  # noqa: SLF001 - what classes say
    for name, parameter in model.named_parameters():
        for pattern, dtype in kept.items():
            if re.search(pattern.replace("*", ".*"), name) is not None:
                parameter.data = parameter.data.to(dtype)


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    former = torch.get_default_dtype()
    torch.set_default_dtype(dtype or former)
    try:
        yield
    finally:
        torch.set_default_dtype(former)


# ---------------------------------------------------------------------- names in files


def _names_in(source: TensorSource, model: PreTrainedModel) -> dict[str, str]:
    """Return what each tensor of the model is called in the files; what models leave out is left out.

    Names that fit nothing stay as they are, for `tierstore.training.offload` to list them.
    """
    own = {name for name, _ in model.named_parameters(remove_duplicate=False)} | set(
        model.state_dict(keep_vars=True)
    )
    passing = {name for name, _ in model.named_buffers(remove_duplicate=False)} - own
    ignored = [re.compile(each) for each in model._keys_to_ignore_on_load_unexpected or ()]  # noqa: SLF001
    transforms = _transforms(model)
    found: dict[str, str] = {}
    for name in sorted(source.names):  # some renamings have to see them in this order
        renamed = _renamed(name, model, own, transforms)
        is_left_out = renamed not in own and (
            renamed in passing or any(each.search(renamed) for each in ignored) or _is_table(renamed)
        )
        if not is_left_out:
            found[renamed] = name
    return found


def _is_table(name: str) -> bool:
    """Whether files of older versions hold a table under a name that models compute by now."""
    return name.endswith("rotary_emb.inv_freq")


def _renamed(name: str, model: PreTrainedModel, own: set[str], transforms: Sequence[Transform]) -> str:
    """Return the model's name of a tensor, or the files' own where it has none."""
    if name in own:
        return name
    converted = _converted(name, model, transforms)
    prefix = f"{model.base_model_prefix}."
    candidates = [each for one in (converted, name) for each in (one, prefix + one, one.removeprefix(prefix))]
    return next((each for each in candidates if each in own), converted)


def _converted(name: str, model: PreTrainedModel, transforms: Sequence[Transform]) -> str:
    """Return what this version of ``transformers`` calls a tensor of older files.

    Raises:
        UsageError: it makes another tensor of it.
    """
    for transform in transforms:
        renamed, pattern = transform.rename_source_key(name)
        if pattern is None:
            continue
        if hasattr(transform, "operations"):
            raise UsageError(
                f"transformers computes tensors of {type(model).__name__} from those in its files ({name}, "
                "for example), with several of them in memory at once; they cannot be read one bundle at a "
                "time. Load the model with transformers' own from_pretrained, and offload it then."
            )
        name = renamed
    return name


def _transforms(model: PreTrainedModel) -> Sequence[Transform]:
    """Return what ``transformers`` renames and converts in files; versions before 5 have no list of it."""
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
    except ImportError:
        return ()
    found: Sequence[Transform] = mapping.get_model_conversion_mapping(model)
    return found
