"""Communication between processes in what is recomputed, and what each of them keeps of its inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import _functional_collectives as collectives

from tests.training.twins import assert_equal_lists
from tierstore.training import recompute

DIM = 8

_NAMES = ("all_gather_single_autograd", "all_gather_tensor_autograd")  # the second in older versions
_gather: Any = next(getattr(collectives, name) for name in _NAMES if hasattr(collectives, name))

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")


@pytest.fixture
def _group() -> Iterator[None]:
    store = distributed.HashStore()  # type: ignore[attr-defined]
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


class Gathered(nn.LayerNorm):
    """A norm whose output is gathered from all processes."""

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, DIM)``."""
        gathered: Tensor = _gather(super().forward(x), 0, distributed.group.WORLD)
        return gathered


class Layer(nn.Module):
    """A norm and a product, each gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn_norm = nn.ModuleDict({"norm": Gathered(DIM)})
        self.w = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, DIM)``."""
        product: Tensor = _gather(self.w(self.ffn_norm["norm"](x)), 0, distributed.group.WORLD)
        return torch.tanh(product)


class _Count(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gathers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN204
        self.gathers += "all_gather" in str(func)
        return func(*args, **(kwargs or {}))


def _step(config: dict[str, object]) -> tuple[int, list[Tensor | None]]:
    """Return how often two layers gathered, and the gradients."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Layer())
    with recompute(model, config), _Count() as count:
        model(torch.randn(4, DIM)).sum().backward()
    return count.gathers, [parameter.grad for parameter in model.parameters()]


@pytest.mark.usefixtures("_group")
@pytest.mark.parametrize(
    ("config", "gathers"),
    [
        ({"recompute": True}, 8),
        ({"recompute": True, "mp_comm_recompute": False}, 4),
        ({"recompute": True, "select_comm_recompute_exclude": [r".*\.norm"]}, 6),
        ({"select_comm_recompute": True}, 4),
    ],
    ids=str,
)
def test_communication_is_repeated_unless_it_is_kept(config: dict[str, object], gathers: int) -> None:
    expected_gathers, expected = _step({})
    found_gathers, found = _step(config)
    assert expected_gathers == 4
    assert found_gathers == gathers
    assert_equal_lists(expected, found)


INPUT_BYTES, COUNT = 67 * 32 * 4, 3  # of the layers in `tensor_parallel_worker`; a second input has 4 bytes


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.long)])
def test_each_process_keeps_a_slice_of_what_is_the_same_in_all(processes: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.training.tensor_parallel_worker"]
    workers = [
        subprocess.Popen(  # the command is ours
            [*command, str(rank), str(processes), str(tmp_path)], stderr=subprocess.PIPE, text=True
        )
        for rank in range(processes)
    ]
    errors = [worker.communicate(timeout=110)[1] for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * processes, errors
    whole_bytes = COUNT * (INPUT_BYTES + 4)
    slice_bytes = COUNT * (-(-INPUT_BYTES // processes) + 4)
    for rank in range(processes):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found.pop("counted") == whole_bytes  # as in the reference, it goes with `recompute: True` only
        for kind, step in found.items():
            is_sliced = kind != "different"
            assert step["is_same"], kind
            assert step["kept_bytes"] == [whole_bytes, slice_bytes if is_sliced else whole_bytes], kind
            assert step["alive"] == [COUNT, 0 if is_sliced else COUNT], kind
