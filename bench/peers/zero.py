"""The model of `bench.workload` trained by DeepSpeed: ZeRO-3 with parameters and optimizer on disk, no GPU.

What had to be learned for it to run, and to compute what plain PyTorch computes:

- ``gradient_clipping`` is 1.0 unless it is set to 0; with Adam that shows only in the third loss.
- ``zero.Init`` given a dtype takes bfloat16 on the CPU, whatever the dtype; given none, float32.
- Only partitions of 1 MiB or more go to disk; smaller ones stay in memory, as do biases.
- ``buffer_size`` counts elements, and has to hold the largest parameter.
- ``buffer_count`` of the optimizer: four buffers (parameter, gradient, two moments) for what is stepped; with
  ``pipeline_read`` and ``pipeline_write`` four more for what is being read and four for what is being
  written.  With fewer an assertion fails in the middle of a step.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from bench.peers import ops
from bench.peers.workers import Absent, required
from bench.workload import BATCH, Workload

BLOCK_BYTES = 1024**2
QUEUE_DEPTH = 8
_LEAST_SWAPPED_BYTES = 1024**2
_STATES = 4  # of Adam: parameter, gradient, two moments


def configuration(workload: Workload, path: Path, *, is_pipelined: bool, ranks: int = 1) -> dict[str, object]:
    """Return DeepSpeed's configuration: as little memory as it can do with, plus pipelining if asked."""
    largest = 4 * workload.dim**2  # elements of one weight
    return {
        "train_batch_size": BATCH * ranks,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": 0.0,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {
            "stage": 3,
            "overlap_comm": False,
            "contiguous_gradients": True,
            "reduce_bucket_size": largest,
            "sub_group_size": largest,
            "stage3_prefetch_bucket_size": largest,
            "stage3_max_live_parameters": 2 * largest,
            "stage3_max_reuse_distance": 2 * largest,
            "offload_param": {
                "device": "nvme",
                "nvme_path": str(path),
                "buffer_count": 6,
                "buffer_size": largest,
                "max_in_cpu": 0,
                "pin_memory": False,
            },
            "offload_optimizer": {
                "device": "nvme",
                "nvme_path": str(path),
                "buffer_count": _STATES * (3 if is_pipelined else 1),
                "pin_memory": False,
                "pipeline_read": is_pipelined,
                "pipeline_write": is_pipelined,
            },
        },
        "aio": {
            "block_size": BLOCK_BYTES,
            "queue_depth": QUEUE_DEPTH,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


class ZeroTrainee:
    """The same parameters and batches as `bench.workload.Trainee`, in DeepSpeed's own loop.

    Args:
        workload: which model.
        path: a directory for parameters and state.
        is_pipelined: whether the optimizer reads and writes while it steps.
        ranks: how many processes train; if there are several, the environment says where they meet.

    Raises:
        Absent: DeepSpeed is not installed or cannot build its operators, or the model is too small for it.
    """

    def __init__(self, workload: Workload, path: Path, *, is_pipelined: bool, ranks: int = 1) -> None:
        if 4 * 4 * workload.dim**2 // ranks < _LEAST_SWAPPED_BYTES:
            raise Absent(f"DeepSpeed keeps partitions under 1 MiB in memory: {workload} would not be on disk")
        deepspeed = required("deepspeed")
        for name in ops.NEEDED:
            ops.load(name)
        path.mkdir(parents=True, exist_ok=ranks > 1)
        if ranks == 1:
            _join_alone()
        settings = configuration(workload, path, is_pipelined=is_pipelined, ranks=ranks)
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False)
        with deepspeed.zero.Init(config_dict_or_path=settings):
            model = workload.new_model()
        adam = importlib.import_module("deepspeed.ops.adam").DeepSpeedCPUAdam
        optimizer = adam(model.parameters(), lr=1e-4, adamw_mode=False)
        self._engine = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)[0]
        self._dim = workload.dim
        self._chance = torch.Generator().manual_seed(1 + int(os.environ["RANK"]))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """Train on the next batch."""
        x = torch.randn(BATCH, self._dim, generator=self._chance)
        y = torch.randn(BATCH, self._dim, generator=self._chance)
        loss = nn.functional.mse_loss(self._engine(x), y)
        self._engine.backward(loss)
        self._engine.step()
        self.losses.append(loss.detach().clone())


def _join_alone() -> None:
    """Say where the only process of the group is; no other needs to find it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone: Mapping[str, str] = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
    }
    os.environ.update(alone)
