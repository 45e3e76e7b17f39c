"""Configurations as DeepSpeed's and Accelerate's users have them, and what becomes of them in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STAGE_3_ON_DISK: Mapping[str, Any] = {
    "train_batch_size": 16,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {
            "device": "nvme",
            "nvme_path": "/local_nvme",
            "pin_memory": True,
            "pipeline_read": True,
            "pipeline_write": True,
        },
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "stage3_max_live_parameters": 1e9,
        "stage3_prefetch_bucket_size": 5e8,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False},
    "activation_checkpointing": {"cpu_checkpointing": True, "partition_activations": False},
}

CASES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "parameters and state in files": (
        STAGE_3_ON_DISK,
        {
            "offload_config": {
                "offload_param": "disk",
                "offload_optimizer": "disk",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_path": "/local_nvme",
                "enable_pinned_mem": True,
                "aio_block_size": 1048576,
                "aio_queue_depth": 8,
                "offload_checkpoint": "cpu",
            }
        },
    ),
    "state in host memory": (
        {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}}},
        {
            "offload_config": {
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "enable_pinned_mem": False,
                "offload_disk_size": 0,
            }
        },
    ),
    "flags from before there were sections": (
        {
            "zero_optimization": {
                "stage": 3,
                "cpu_offload": True,
                "cpu_offload_params": True,
                "cpu_offload_use_pin_memory": True,
            }
        },
        {
            "offload_config": {
                "offload_param": "cpu",
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "enable_pinned_mem": True,
                "offload_disk_size": 0,
            }
        },
    ),
    "two drives": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "NVMe", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            }
        },
        {
            "offload_config": {
                "offload_param": "disk",
                "offload_optimizer": "disk",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_path": ["/a", "/b"],
            }
        },
    ),
    "parameters below stage 3, where DeepSpeed leaves them": (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "state in stage 0, where there is no ZeRO": (
        {"zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "nothing offloaded": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}},
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "what the Trainer fills in": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "auto", "nvme_path": "auto"}}},
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "FSDP, offloaded and recomputed": (
        {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "FSDP",
            "fsdp_config": {
                "fsdp_version": 2,
                "fsdp_offload_params": True,
                "fsdp_activation_checkpointing": True,
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            },
            "mixed_precision": "bf16",
            "num_processes": 1,
        },
        {
            "offload_config": {
                "offload_param": "cpu",
                "offload_grad": "cpu",
                "offload_optimizer": "cpu",
                "optimizer_target": "cpu",
                "offload_disk_size": 0,
            },
            "recompute_config": {"recompute": True},
        },
    ),
    "DeepSpeed by Accelerate": (
        {
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {
                "zero_stage": 3,
                "offload_optimizer_device": "cpu",
                "offload_param_device": "nvme",
                "offload_param_nvme_path": "/local_nvme",
                "gradient_clipping": 1.0,
                "zero3_init_flag": True,
            },
            "use_cpu": False,
        },
        {
            "offload_config": {
                "offload_param": "disk",
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_path": "/local_nvme",
            }
        },
    ),
    "a flag beside the section that came after it": (
        {"zero_optimization": {"stage": 2, "cpu_offload": False, "offload_optimizer": {"device": "cpu"}}},
        {
            "offload_config": {
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_disk_size": 0,
            }
        },
    ),
    "one directory in two ways": (
        {
            "zero_optimization": {
                "stage": 3,
                "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme/"},
            }
        },
        {
            "offload_config": {
                "offload_param": "disk",
                "offload_optimizer": "disk",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_path": "/local_nvme",
            }
        },
    ),
    "parameters and state in files below stage 3, where DeepSpeed leaves them": (
        {
            "zero_optimization": {
                "stage": 2,
                "cpu_offload": None,
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
                "offload_optimizer": {"device": "nvme", "nvme_path": "/b"},
            }
        },
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "DeepSpeed by Accelerate, with no word on the stage": (
        {"distributed_type": "DEEPSPEED", "deepspeed_config": {"offload_optimizer_device": "cpu"}},
        {
            "offload_config": {
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_disk_size": 0,
            }
        },
    ),
    "FSDP left over by Accelerate": (
        {"distributed_type": "NO", "fsdp_config": {"fsdp_offload_params": True}},
        {"offload_config": {"memory_offload": "OFF"}},
    ),
    "one of both by Accelerate": (
        {
            "distributed_type": "DEEPSPEED",
            "fsdp_config": {"fsdp_offload_params": True, "fsdp_activation_checkpointing": True},
            "deepspeed_config": {"zero_stage": 2, "offload_optimizer_device": "cpu"},
        },
        {
            "offload_config": {
                "offload_optimizer": "cpu",
                "offload_grad": "cpu",
                "optimizer_target": "cpu",
                "offload_disk_size": 0,
            }
        },
    ),
    "without an accelerator": (
        {"compute_environment": "LOCAL_MACHINE", "distributed_type": "NO", "use_cpu": True},
        {"offload_config": {"device": "cpu", "memory_offload": "OFF"}},
    ),
}
"""What each is, what is given, and the document that it becomes."""

WRONG: Mapping[str, tuple[str, str]] = {
    "a device that there is not": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}',
        "zero_optimization.offload_param.device='gpu': accepted: none, cpu, nvme",
    ),
    "a stage that there is not": ('{"zero_optimization": {"stage": 4}}', "accepted: 0, 1, 2 or 3"),
    "a stage as text": ('{"zero_optimization": {"stage": "3"}}', "stage='3': accepted: 0, 1, 2 or 3"),
    "a stage that is a truth value": ('{"zero_optimization": {"stage": true}}', "stage=True: accepted: 0"),
    "a section that is a list": ('{"zero_optimization": [1]}', "accepted: a mapping of keys to values"),
    "a path that is a number": (
        '{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": 5}}}',
        "accepted: the path of a directory",
    ),
    "a path with a null byte": (
        '{"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": "a\\u0000b"}}}',
        "accepted: the path of a directory",
    ),
    "a block of nothing": ('{"aio": {"block_size": 0}}', "accepted: a whole number greater than 0"),
    "a block that is no number": ('{"aio": {"block_size": NaN}}', "accepted: a whole number greater than 0"),
    "a depth beyond all": ('{"aio": {"queue_depth": 1e300}}', "accepted: a whole number greater than 0"),
    "a depth that is half": ('{"aio": {"queue_depth": 1.5}}', "accepted: a whole number greater than 0"),
    "two faults": (
        '{"aio": {"queue_depth": -1}, "activation_checkpointing": {"cpu_checkpointing": "yes"}}',
        "2 faults",
    ),
    "no JSON": ('{"zero_optimization": {', "no JSON"),
    "a key twice": ('{"aio": {}, "aio": {}}', "the key 'aio' is given twice"),
    "many digits": (f'{{"aio": {{"block_size": {"9" * 5000}}}}}', "no JSON"),
    "deep": ('{"aio":' * 20_000, "nests too deep"),
    "of nobody": ('{"model": {"layers": 3}}', "no configuration that is known"),
    "a list": ("- 1", "accepted: a mapping of sections"),
    "a text": ("hello", "accepted: a mapping of sections"),
    "nothing": ("", "accepted: a mapping of sections"),
    "a YAML of hostile tags": ("fsdp_config: !!python/object/apply:os.system [x]", "is not read"),
    "too long": ("#" * 300_000, "at most 262144"),
    "a path that no file can have": (
        '{"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "\\ud800"}}}',
        "offload_param.nvme_path='\\ud800': accepted: the path of a directory",
    ),
    "what is in another file": (
        "deepspeed_config: {deepspeed_config_file: ds.json, zero3_init_flag: true}",
        "deepspeed_config.deepspeed_config_file='ds.json': accepted: none here; what it says is in that file",
    ),
    "an offload that is no truth value": ("fsdp_config: {fsdp_offload_params: 2}", "accepted: true or false"),
}
"""What each is, its text, and what is said of it."""
