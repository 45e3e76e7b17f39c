"""What ``accelerate config`` writes (YAML) as a document for `offload`: its FSDP and DeepSpeed sections.

1. ``fsdp_offload_params`` keeps parameters and gradients in host memory, where the optimizer steps them and
   its state is: here, too.
2. What processes there are and how they find each other is the launcher's, which stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from tierstore.cli.conversion import Conversion
from tierstore.cli.deepspeed_config import convert_into, take_tiers

_FSDP = "fsdp_config"
_DEEPSPEED = "deepspeed_config"
_KIND = "distributed_type"
SECTIONS: Final = (_FSDP, _DEEPSPEED, "compute_environment", _KIND)
"""Each of them is in configurations of Accelerate's alone."""

_OFFLOAD = "offload_params"
_AGAIN = "activation_checkpointing"

_UNKNOWN = "no offloading is in it that is known here"
_SHARDS = "how states are divided over processes is fully_shard's"
_LAUNCH = "the launcher's: accelerate launch and torchrun start programs with tierstore, too"
_LOOP = "your loop's, as in plain PyTorch"
_MODULES = "modules travel as they are; `placement` names those that are to lie or compute elsewhere"
_PLANNED = "what is needed next is known from the first step on, and fetched ahead of it by the plan"
_SAVED = "run.save(path) and model.state_dict() have whole weights, and stream"
_WEIGHTS = "a model made under torch.device('meta') and offload(..., weights=PATH) go straight into the tiers"

_OF_FSDP: Final = {
    "version": _SHARDS,
    "sharding_strategy": _SHARDS,
    "reshard_after_forward": _SHARDS,
    "auto_wrap_policy": _MODULES,
    "transformer_layer_cls_to_wrap": _MODULES,
    "min_num_params": "small modules travel together, by themselves",
    "backward_prefetch": _PLANNED,
    "backward_prefetch_policy": _PLANNED,
    "forward_prefetch": _PLANNED,
    "limit_all_gathers": _PLANNED,
    "state_dict_type": _SAVED,
    "use_orig_params": "parameters stay the model's own objects",
    "sync_module_states": _SHARDS,
    "cpu_ram_efficient_loading": _WEIGHTS,
    "ignored_modules": "`ignored` names parameters and buffers that stay what they are",
}
_DEEPSPEED_NAMES: Final = {
    "zero_stage": "stage",
    "offload_param_device": "offload_param.device",
    "offload_param_nvme_path": "offload_param.nvme_path",
    "offload_optimizer_device": "offload_optimizer.device",
    "offload_optimizer_nvme_path": "offload_optimizer.nvme_path",
    "zero3_save_16bit_model": "stage3_gather_16bit_weights_on_model_save",
}
"""Where Accelerate's keys are in DeepSpeed's ``zero_optimization``."""
_FILE: Final = "deepspeed_config_file"
_IN_FILE: Final = "none here; what it says is in that file alone: tierstore convert FILE"
_USUAL_STAGE: Final = 2
_OF_DEEPSPEED: Final = {
    _FILE: "it is empty",
    "zero3_init_flag": _WEIGHTS,
    "gradient_clipping": f"{_LOOP}: run.clip_grad_norm_(max_norm) before optimizer.step()",
    "gradient_accumulation_steps": f"{_LOOP}: gradients are accumulated until optimizer.step()",
    "deepspeed_multinode_launcher": _LAUNCH,
    "deepspeed_hostfile": _LAUNCH,
    "deepspeed_exclusion_filter": _LAUNCH,
    "deepspeed_inclusion_filter": _LAUNCH,
    "deepspeed_moe_layer_cls_names": _MODULES,
}
_OTHERS: Final = {
    "mixed_precision": f"{_LOOP}: torch.autocast, GradScaler, or model.to(torch.bfloat16)",
    "downcast_bf16": f"{_LOOP}: torch.autocast, GradScaler, or model.to(torch.bfloat16)",
    "dynamo_config": "torch.compile of modules works as without tierstore",
    "megatron_lm_config": "how a model is divided over processes stays as it is",
    "parallelism_config": "how a model is divided over processes stays as it is",
    "fp8_config": "numbers are never changed",
}


def converted(given: Mapping[str, object], source: str) -> Conversion:
    """Return what becomes of a configuration.

    Args:
        given: its keys at the top.
        source: what messages call it.

    Raises:
        ConfigError: lists every fault.
    """
    conversion = Conversion(source)
    if "use_cpu" in given and conversion.flag("use_cpu", given["use_cpu"]):
        conversion.becomes("use_cpu", given["use_cpu"], device="cpu")
    elif "use_cpu" in given:
        conversion.becomes_nothing("use_cpu", given["use_cpu"], "the accelerator is found by itself")
    to: set[str] = set()
    for name, take in ((_FSDP, _take_fsdp), (_DEEPSPEED, _take_deepspeed)):
        section = conversion.section(given, name, name)
        if _is_used(name, given):
            to |= take(conversion, section)
        else:
            why = f"distributed_type is {given[_KIND]}: accelerate launch does not look at it"
            for key, value in section.items():
                conversion.becomes_nothing(f"{name}.{key}", value, why)
    for key, value in given.items():
        if key not in (_FSDP, _DEEPSPEED, "use_cpu"):
            conversion.becomes_nothing(key, value, _OTHERS.get(key, _LAUNCH))
    take_tiers(conversion, to)
    return conversion.finished()


def _is_used(section: str, given: Mapping[str, object]) -> bool:
    """Whether ``accelerate launch`` reads a section: where it is told what to use, only that one's."""
    kind = given.get(_KIND)
    return kind is None or str(kind).upper() == section.removesuffix("_config").upper()


def _take_fsdp(conversion: Conversion, fsdp: Mapping[str, object]) -> set[str]:
    """Take in a section; return where it offloads to."""
    to: set[str] = set()
    for given, value in fsdp.items():
        key, name = f"{_FSDP}.{given}", given.removeprefix("fsdp_")
        if name not in (_OFFLOAD, _AGAIN):
            conversion.becomes_nothing(key, value, _OF_FSDP.get(name, _UNKNOWN))
        elif not conversion.flag(key, value):
            conversion.becomes_nothing(key, value, "it is off")
        elif name == _AGAIN:
            conversion.becomes_section(key, value, "recompute_config", {"recompute": True})
        else:
            where = dict.fromkeys(("offload_param", "offload_grad", "offload_optimizer"), "cpu")
            conversion.becomes(key, value, **where, optimizer_target="cpu")
            to.add("cpu")
    return to


def _take_deepspeed(conversion: Conversion, section: Mapping[str, object]) -> set[str]:
    """Take in a section; return where it offloads to."""
    zero: dict[str, object] = {}
    inner: dict[str, dict[str, object]] = {}
    for key, value in section.items():
        name, _, part = _DEEPSPEED_NAMES.get(key, "").partition(".")
        if key == _FILE and value is not None:
            conversion.is_wrong(f"{_DEEPSPEED}.{key}", value, _IN_FILE)
        elif part:
            inner.setdefault(name, {})[part] = value
        elif name:
            zero[name] = value
        else:
            why = _OF_DEEPSPEED.get(key, _UNKNOWN)
            conversion.becomes_nothing(f"{_DEEPSPEED}.{key}", value, why)
    if not zero and not inner:
        return set()
    if "stage" not in zero:
        key = f"{_DEEPSPEED}.zero_stage"
        conversion.becomes_nothing(key, None, f"it is not there: {_USUAL_STAGE}, as for Accelerate")
        zero["stage"] = _USUAL_STAGE
    return convert_into(conversion, {"zero_optimization": zero | inner}, f"{_DEEPSPEED}.")
