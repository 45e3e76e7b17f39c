"""Whether collectives of ranks are predicted: bytes and order against eight processes that train (gloo).

``python -m bench.planned_ranks`` starts the processes and asks the question; each of them is
``python bench/planned_ranks.py FOLDER RANK PROCESSES``.  Seconds are not compared: processes of one machine
say nothing of networks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import distributed, nn

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.command import Question, Settings, main
from bench.ranks import found_by_ranks, join_group, leave_group
from bench.record import Better, Figure
from tierstore.planning import Machine, NetworkFigures, TierFigures, TierMedium
from tierstore.planning.machine import ComputeFigures
from tierstore.planning.ranks import RankGroup, Sharding, one_rank
from tierstore.training.tracing import Grouping, trace_model

PROCESSES = 8
WIDTH, LAYERS = 250, 4  # eight does not divide it: shards are padded
_KINDS = {
    "all_gather_single": "all-gather",
    "all_gather_into_tensor": "all-gather",
    "reduce_scatter_single": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
}


class Stack(nn.Module):
    """Transformer layers between a projection and another one."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(30, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 5, 3 * WIDTH + 1, dropout=0.0, batch_first=True)
            for _ in range(LAYERS)
        )
        self.out = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ten values for each element of a sequence."""
        x = self.into(x)
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.out(x)
        return y


def work(folder: Path, rank: int, processes: int) -> None:
    """Be one of the processes: train a step with FSDP2, and write what was sent to a file of its own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    join_group(folder, rank, processes)
    sent: list[tuple[str, int]] = []
    model = Stack()
    mesh = init_device_mesh("cpu", (processes,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for name in [each for each in _KINDS if each in vars(distributed)]:
        setattr(distributed, name, _noting(name, vars(distributed)[name], sent))
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        sent.clear()
        model(torch.randn(2, 8, 30)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    leave_group(folder, rank, sent)


def _noting(name: str, call: Callable[..., object], sent: list[tuple[str, int]]) -> Callable[..., object]:
    def noting(*given: object, **named: object) -> object:
        tensors = [each for each in (*given, *named.values()) if isinstance(each, torch.Tensor)]
        sent.append((_KINDS[name], max(each.nbytes for each in tensors)))
        return call(*given, **named)

    return noting


def predicted() -> list[list[object]]:
    """Return the collectives of one step, without any process."""
    program = trace_model(
        lambda: (Stack(), torch.zeros(2, 8, 30)), optimizer=torch.optim.Adam, grouping=Grouping(0, None)
    )
    compute = ComputeFigures({"float32": 1e11}, 1e10)
    machine = Machine(
        "processes",
        (TierFigures("device", 2**33, TierMedium.DEVICE),),
        (),
        compute,
        compute,
        network=(NetworkFigures("peer", 1e9),),
        ranks_per_host=PROCESSES,
    )
    rows = {f"grad/{name}": each.shape[0] for name, each in Stack().named_parameters()}
    rank = one_rank(program, machine, RankGroup(PROCESSES, Sharding.FULL, rows))
    return [[each.kind.value, each.nbytes] for each in rank.collectives]


def planned_ranks(settings: Settings) -> Figure:
    """Train fully sharded in eight processes, and compare what each sent with what was predicted."""
    found = found_by_ranks(__file__, settings.scratch / "ranks", PROCESSES, [])
    expected = predicted()
    differ = sum(
        max(len(each), len(expected)) - sum(a == b for a, b in zip(each, expected, strict=False))
        for each in found
    )
    kinds = [kind for kind, _ in expected]
    details = {
        "collectives of a step": ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)),
        "bytes of a step": str(sum(int(str(nbytes)) for _, nbytes in expected)),
        "not validated": "seconds of networks; several hosts; NVLink, InfiniBand; ranks that are late",
    }
    what = (
        f"collectives that differ from the prediction in kind, bytes or place, of all that {PROCESSES} gloo "
        f"processes make in a step with FSDP2: {LAYERS} transformer layers, width {WIDTH}"
    )
    return Figure("planned-ranks", what, differ, "collectives", 0, 0, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {"planned-ranks": planned_ranks}

if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):
        work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main("bench.planned_ranks", QUESTIONS))
