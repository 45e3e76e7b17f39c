"""Which part of a whole a process has: as FSDP2 and tensor parallel cut it, over meshes of any shape."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import distributed

from tests.forked import run_python
from tests.sampling import IS_CI

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

PARTS = """
import itertools, json, os, sys, traceback
from pathlib import Path
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from tierstore.training.bundles.tensor_slots import memory_of, part_here

SIZES = list(map(int, sys.argv[2].split()))
SHAPES = {"data": (8,), "replica data": (2, 4), "data tensor": (4, 2), "replica data tensor": (2, 2, 2)}
PLANS = {"none": None, "rows": ColwiseParallel, "columns": RowwiseParallel}
CASES = [
    each
    for each in itertools.product(SHAPES, PLANS, (False, True))
    if ("tensor" in each[0]) == (each[1] != "none")
]

def cells_of(rank, names, plan, is_by_column):
    dims = names.split()
    mesh = init_device_mesh("cpu", SHAPES[names], mesh_dim_names=tuple(dims))
    spread = tuple(each for each in dims if each != "tensor")
    processes = SHAPES[names][dims.index("data")]
    found = {}
    for rows, columns in itertools.product(SIZES, SIZES):
        if is_by_column and columns % (processes * (2 if plan == "columns" else 1)):
            continue  # FSDP2 cuts columns evenly
        layer = nn.Linear(columns, rows)
        whole = torch.arange(rows * columns, dtype=torch.float32).reshape(rows, columns)
        with torch.no_grad():
            layer.weight.copy_(whole)
        if PLANS[plan] is not None:
            parallelize_module(layer, mesh["tensor"], PLANS[plan](), src_data_rank=None)
        place = (lambda p: Shard(1) if p.dim() == 2 else None) if is_by_column else None
        fully_shard(layer, mesh=mesh[spread], shard_placement_fn=place)
        for name, parameter in layer.named_parameters():
            part, local = part_here(parameter), memory_of(parameter)
            told = (names, plan, is_by_column, rank, name, rows, columns, part, local.shape)
            assert tuple(end - begin for begin, end in part) == tuple(local.shape), told
        (top, bottom), (left, right) = part_here(layer.weight)
        assert torch.equal(whole[top:bottom, left:right], memory_of(layer.weight)), told
        found[f"{rows} {columns}"] = memory_of(layer.weight).reshape(-1).int().tolist()
    return found

def lead(rank, file):
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    file.write_text(json.dumps([cells_of(rank, *case) for case in CASES]))

folder = Path(sys.argv[1])
for rank in range(8):
    child = os.fork()
    if child == 0:
        try:
            lead(rank, folder / str(rank))
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit((folder / str(rank)).exists() - 1)
    assert os.waitpid(child, 0)[1] == 0
lives = [json.loads((folder / str(rank)).read_text()) for rank in range(8)]
parts = 0
for number, (names, plan, is_by_column) in enumerate(CASES):
    replicas = SHAPES[names][0] if "replica" in names else 1
    for size in lives[0][number]:
        rows, columns = map(int, size.split())
        cells = sorted(cell for life in lives for cell in life[number][size])
        assert cells == sorted(replicas * list(range(rows * columns))), (names, plan, size)
        parts += sum(bool(life[number][size]) for life in lives)
print(parts)
"""


def test_parts_are_those_that_are_there_and_together_they_are_the_whole(tmp_path: Path) -> None:
    sizes = "1 5 8" if IS_CI else "1 3 5 8"
    assert int(run_python(PARTS, str(tmp_path), sizes).splitlines()[-1]) > (200 if IS_CI else 400)
