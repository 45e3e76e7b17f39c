"""DeepSpeed's configuration (``ds_config.json``) as a document for `offload`.

What it says of offloading, of files and of activations has counterparts.  The rest is of two kinds: what
DeepSpeed's engine does in the place of a training loop, which stays the loop's, and how states are divided
over processes, which tierstore does not do.

1. As in DeepSpeed, ``offload_param`` and what goes to files count in stage 3 alone, and ``offload_optimizer``
   to the host from stage 1 on.
2. Optimizers whose state is offloaded there compute on the host, with their gradients: here, too.
3. Where nothing is offloaded to files there, there is no disk here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from tierstore.cli.conversion import AUTO, Conversion
from tierstore.config import OffloadConfig
from tierstore.quoting import quoted

_ZERO = "zero_optimization"
_AIO = "aio"
_ACTIVATIONS = "activation_checkpointing"
_PARAM = "offload_param"
_OPTIMIZER_STATE = "offload_optimizer"
_OLD_PINNING = "cpu_offload_use_pin_memory"
_READ_OF_ZERO: Final = frozenset(
    {"stage", _PARAM, _OPTIMIZER_STATE, "cpu_offload", "cpu_offload_params", _OLD_PINNING}
)
_DEVICES: Final = {"none": None, "cpu": "cpu", "nvme": "disk"}
_STAGES: Final = (0, 1, 2, 3)
_WHOLE_STAGE = 3

_UNKNOWN = "no offloading is in it that is known here"
_PLANNED = "what is needed next is known from the first step on, and fetched ahead of it by the plan"
_SHARDS = "tierstore divides no states over processes; offload() takes what FSDP2's fully_shard has divided"
_LOOP = "your loop's, as in plain PyTorch"
_OPTIMIZER = f"{_LOOP}: make one of torch.optim's, and give it to offload()"
_SCHEDULER = f"{_LOOP}: torch.optim.lr_scheduler works on the optimizer that offload() was given"
_CAST = f"{_LOOP}: torch.autocast, GradScaler, or model.to(torch.bfloat16)"
_BATCHES = f"{_LOOP}: the DataLoader has the batch size, and gradients are accumulated until optimizer.step()"
_BUFFERS = "the host's pool is bounded by offload_cpu_size, in bytes, and grows by host_mem_block_size"
_LOGS = "run.stats() has times and counts of every tier"
_SELF = "done where it helps, by itself"

_WHY: Final = {
    "optimizer": _OPTIMIZER,
    "zero_allow_untested_optimizer": "any optimizer of torch.optim works, and others by register_optimizer",
    "zero_force_ds_cpu_optimizer": "the program's own optimizer computes, with the same bits",
    "scheduler": _SCHEDULER,
    "fp16": _CAST,
    "bf16": _CAST,
    "amp": _CAST,
    "torch_autocast": _CAST,
    "data_types": _CAST,
    "gradient_clipping": f"{_LOOP}: run.clip_grad_norm_(max_norm) before optimizer.step()",
    "train_batch_size": _BATCHES,
    "train_micro_batch_size_per_gpu": _BATCHES,
    "gradient_accumulation_steps": _BATCHES,
    "prescale_gradients": _LOOP,
    "gradient_predivide_factor": _LOOP,
    "communication_data_type": _SHARDS,
    "seq_parallel_communication_data_type": _SHARDS,
    "sparse_gradients": "tierstore.nn.EmbeddingTable brings the rows of a batch, and has sparse gradients",
    "steps_per_print": _LOGS,
    "wall_clock_breakdown": _LOGS,
    "dump_state": _LOGS,
    "flops_profiler": _LOGS,
    "comms_logger": _LOGS,
    "tensorboard": _LOGS,
    "wandb": _LOGS,
    "csv_monitor": _LOGS,
    "checkpoint": "run.save(path) and run.checkpoint()",
}

SECTIONS: Final = (_ZERO, _AIO, _ACTIVATIONS, "train_batch_size", "train_micro_batch_size_per_gpu")
"""Each of them is in configurations of DeepSpeed's."""

_OF_ZERO: Final = {
    "allgather_partitions": _SHARDS,
    "allgather_bucket_size": _SHARDS,
    "reduce_scatter": _SHARDS,
    "reduce_bucket_size": _SHARDS,
    "overlap_comm": _SHARDS,
    "contiguous_gradients": _SELF,
    "round_robin_gradients": _SHARDS,
    "ignore_unused_parameters": "parameters without gradients are stepped as in plain PyTorch: not at all",
    "sub_group_size": "the optimizer steps the parameters of a module together",
    "stage3_max_live_parameters": "max_device_memory bounds all that is on the device, in bytes",
    "stage3_max_reuse_distance": _PLANNED,
    "stage3_prefetch_bucket_size": _PLANNED,
    "stage3_param_persistence_threshold": "small modules travel together; `pinned` keeps more there, by name",
    "stage3_model_persistence_threshold": "`pinned` keeps parameters on the device, by name",
    "stage3_gather_16bit_weights_on_model_save": "model.state_dict() and run.save(path) have whole weights",
    "stage3_gather_fp16_weights_on_model_save": "model.state_dict() and run.save(path) have whole weights",
    "stage3_module_granularity_threshold": "small modules travel together, by themselves",
    "zero_hpz_partition_size": _SHARDS,
    "zero_quantized_weights": "numbers are never changed",
    "zero_quantized_gradients": "numbers are never changed",
    "zero_quantized_nontrainable_weights": "numbers are never changed",
    "memory_efficient_linear": _SELF,
    "elastic_checkpoint": "run.save(path) and run.checkpoint()",
    "load_from_fp32_weights": "offload(..., weights=PATH) reads safetensors straight into the tiers",
}

_OF_PARAM: Final = {
    "buffer_count": _BUFFERS,
    "buffer_size": _BUFFERS,
    "max_in_cpu": "offload_cpu_size is what host memory holds of everything, in bytes",
}
_OF_OPTIMIZER: Final = {
    "buffer_count": _BUFFERS,
    "pipeline": _PLANNED,
    "pipeline_read": _PLANNED,
    "pipeline_write": "bytes are written while others are computed with, by the plan",
    "fast_init": "state is made where it is to lie",
    "ratio": "`target` in a parameter group says where it is stepped: 'cpu' or 'device'",
    "super_offload": _PLANNED,
    "cpuadam_cores_perc": "torch.set_num_threads(n)",
}
_OF_AIO: Final = {
    "thread_count": "engines have as many threads as measured best; aio_engine chooses one",
    "intra_op_parallelism": "engines have as many threads as measured best; aio_engine chooses one",
    "single_submit": _SELF,
    "overlap_events": _SELF,
    "use_gds": "used where a probe finds that a GPU reaches files",
}
_OF_ACTIVATIONS: Final = {
    "partition_activations": _SHARDS,
    "contiguous_memory_optimization": _SELF,
    "number_checkpoints": "recompute_config says which layers",
    "synchronize_checkpoint_boundary": "nothing has to wait there",
    "profile": _LOGS,
}


def converted(given: Mapping[str, object], source: str) -> Conversion:
    """Return what becomes of a configuration.

    Args:
        given: its sections, by name.
        source: what messages call it.

    Raises:
        ConfigError: lists every fault.
    """
    conversion = Conversion(source)
    take_tiers(conversion, convert_into(conversion, given))
    return conversion.finished()


def convert_into(conversion: Conversion, given: Mapping[str, object], prefix: str = "") -> set[str]:
    """Take in a configuration; return where it offloads to: ``"cpu"``, ``"disk"``, both or nowhere.

    Args:
        conversion: into which.
        given: its sections, by name.
        prefix: what stands before the names of keys in remarks.
    """
    to = _take_zero(conversion, conversion.section(given, _ZERO, f"{prefix}{_ZERO}"), f"{prefix}{_ZERO}.")
    _take_files(conversion, conversion.section(given, _AIO, f"{prefix}{_AIO}"), f"{prefix}{_AIO}.")
    activations = conversion.section(given, _ACTIVATIONS, f"{prefix}{_ACTIVATIONS}")
    _take_activations(conversion, activations, f"{prefix}{_ACTIVATIONS}.")
    others = {key: value for key, value in given.items() if key not in (_ZERO, _AIO, _ACTIVATIONS)}
    _take_nothing(conversion, others, _WHY, prefix)
    return to


def take_tiers(conversion: Conversion, to: set[str]) -> None:
    """Say which tiers there are: only those that something is offloaded to."""
    if not to and "offload_checkpoint" not in conversion.document["offload_config"]:
        conversion.becomes("as nothing is offloaded", None, memory_offload="OFF")
    elif "disk" not in to:
        conversion.becomes("as nothing is offloaded to files", None, offload_disk_size=0)


def _take_nothing(
    conversion: Conversion, given: Mapping[str, object], known: Mapping[str, str], prefix: str
) -> None:
    """Say of keys why they have no counterpart."""
    for key, value in given.items():
        conversion.becomes_nothing(prefix + key, value, known.get(key, _UNKNOWN))


# ---------------------------------------------------------------------- zero_optimization


def _take_zero(conversion: Conversion, zero: Mapping[str, object], prefix: str) -> set[str]:
    stage = _stage(conversion, zero, prefix)
    param = _old_or_new(conversion, zero, _PARAM, "cpu_offload_params", prefix)
    optimizer = _old_or_new(conversion, zero, _OPTIMIZER_STATE, "cpu_offload", prefix)
    sections = {_PARAM: param, _OPTIMIZER_STATE: optimizer}
    to = {
        _PARAM: _take_param(conversion, param, f"{prefix}{_PARAM}.", stage),
        _OPTIMIZER_STATE: _take_optimizer(conversion, optimizer, f"{prefix}{_OPTIMIZER_STATE}.", stage),
    }
    _take_paths(conversion, sections, to, prefix)
    _take_pinning(conversion, zero, sections, prefix)
    rest = {key: value for key, value in zero.items() if key not in _READ_OF_ZERO}
    _take_nothing(conversion, rest, _OF_ZERO, prefix)
    return {each for each in to.values() if each is not None}


def _stage(conversion: Conversion, zero: Mapping[str, object], prefix: str) -> int:
    if "stage" not in zero:
        return 0
    given = zero["stage"]
    if isinstance(given, bool) or not isinstance(given, int) or given not in _STAGES:
        conversion.is_wrong(f"{prefix}stage", given, "0, 1, 2 or 3")
        return _WHOLE_STAGE
    conversion.becomes_nothing(f"{prefix}stage", given, _SHARDS)
    return given


def _old_or_new(
    conversion: Conversion, zero: Mapping[str, object], name: str, old: str, prefix: str
) -> dict[str, object]:
    """Return a section, or what the flag says that was there before it."""
    found = conversion.section(zero, name, f"{prefix}{name}")
    if old not in zero or conversion.is_left_out(f"{prefix}{old}", zero[old]):
        return found
    device = "cpu" if conversion.flag(f"{prefix}{old}", zero[old]) else "none"
    if found:
        conversion.becomes_nothing(f"{prefix}{old}", zero[old], f"{name}, which came after it, says it")
        return found
    conversion.is_read_as(f"{prefix}{old}", zero[old], f"{name}.device: {device}")
    return {"device": device}


def _take_param(conversion: Conversion, param: Mapping[str, object], prefix: str, stage: int) -> str | None:
    where = _device(conversion, param, prefix, least_stage=_WHOLE_STAGE, stage=stage)
    if where is not None:
        conversion.becomes(f"{prefix}device", param["device"], offload_param=where)
    _take_nothing(conversion, _unread(param), _OF_PARAM, prefix)
    return where


def _take_optimizer(
    conversion: Conversion, optimizer: Mapping[str, object], prefix: str, stage: int
) -> str | None:
    where = _device(conversion, optimizer, prefix, least_stage=1, stage=stage)
    if where is not None:
        ours = {"offload_optimizer": where, "offload_grad": "cpu", "optimizer_target": "cpu"}
        conversion.becomes(f"{prefix}device", optimizer["device"], **ours)
    _take_nothing(conversion, _unread(optimizer), _OF_OPTIMIZER, prefix)
    return where


def _device(
    conversion: Conversion, section: Mapping[str, object], prefix: str, *, least_stage: int, stage: int
) -> str | None:
    """Return where a section offloads to; ``None``: nowhere, and why is said."""
    if "device" not in section:
        return None
    given, key = section["device"], f"{prefix}device"
    where = conversion.one_of(key, given, _DEVICES)
    if where is not None and stage < (_WHOLE_STAGE if where == "disk" else least_stage):
        what = "to files" if where == "disk" and stage >= least_stage else "of it"
        conversion.becomes_nothing(key, given, f"DeepSpeed offloads nothing {what} in stage {stage}")
        return None
    if where is None and given not in (None, AUTO):
        conversion.becomes_nothing(key, given, "it stays on the device")
    return where


def _unread(section: Mapping[str, object]) -> dict[str, object]:
    return {key: value for key, value in section.items() if key not in ("device", "nvme_path", "pin_memory")}


def _take_paths(
    conversion: Conversion,
    sections: Mapping[str, Mapping[str, object]],
    to: Mapping[str, str | None],
    prefix: str,
) -> None:
    """Take in directories: over several, files are spread here, whatever is in them."""
    paths: dict[str, None] = {}
    for name, section in sections.items():
        key = f"{prefix}{name}.nvme_path"
        path = conversion.path(key, section["nvme_path"]) if "nvme_path" in section else None
        if path is not None and to[name] == "disk":
            paths[os.path.normpath(path)] = None
            conversion.becomes(key, path, offload_path=[*paths] if len(paths) > 1 else next(iter(paths)))
        elif path is not None:
            conversion.becomes_nothing(key, path, "nothing of it is in files")
    if "disk" in to.values() and not paths:
        where = quoted(OffloadConfig().offload_path)
        conversion.becomes_nothing("as no nvme_path is given", None, f"files go to offload_path, {where}")


def _take_pinning(
    conversion: Conversion,
    zero: Mapping[str, object],
    sections: Mapping[str, Mapping[str, object]],
    prefix: str,
) -> None:
    """Take in whether host memory is registered with the device: here all of it is, or none."""
    given = {
        f"{prefix}{name}.pin_memory": section["pin_memory"]
        for name, section in sections.items()
        if "pin_memory" in section
    }
    if _OLD_PINNING in zero:
        given[f"{prefix}{_OLD_PINNING}"] = zero[_OLD_PINNING]
    flags = [conversion.flag(key, value) for key, value in given.items()]
    for key, value in given.items():
        conversion.becomes(key, value, enable_pinned_mem=any(flags))


# ---------------------------------------------------------------------- files, activations


def _take_files(conversion: Conversion, aio: Mapping[str, object], prefix: str) -> None:
    for key, ours in (("block_size", "aio_block_size"), ("queue_depth", "aio_queue_depth")):
        count = conversion.count(f"{prefix}{key}", aio[key]) if key in aio else None
        if count is not None:
            conversion.becomes(f"{prefix}{key}", aio[key], **{ours: count})
    rest = {key: value for key, value in aio.items() if key not in ("block_size", "queue_depth")}
    _take_nothing(conversion, rest, _OF_AIO, prefix)


def _take_activations(conversion: Conversion, section: Mapping[str, object], prefix: str) -> None:
    if "cpu_checkpointing" in section:
        given, key = section["cpu_checkpointing"], f"{prefix}cpu_checkpointing"
        if not conversion.is_left_out(key, given) and conversion.flag(key, given):
            conversion.becomes(key, given, offload_checkpoint="cpu")
        elif given is False:
            conversion.becomes_nothing(key, given, "what recomputed layers are given stays on the device")
    rest = {name: value for name, value in section.items() if name != "cpu_checkpointing"}
    _take_nothing(conversion, rest, _OF_ACTIVATIONS, prefix)
