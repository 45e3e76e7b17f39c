"""What becomes of a table's gradient that programs and wrappers treat in their own ways; scenarios."""

from __future__ import annotations

import contextlib
from pathlib import Path

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from tests.training.rank_table_rules import failing, small
from tests.training.rank_tables import said, settings
from tests.training.twins import same
from tierstore.nn import EmbeddingTable
from tierstore.optim import SGD
from tierstore.training import offload

IDS = torch.arange(400)


def averaged_again(rank: int, processes: int, folder: Path) -> object:
    """A program that averages gradients itself averages those of tables, too: they are averages already."""
    found: dict[str, object] = {}
    with small(folder, processes) as (table, optimizer, _):
        before = table.rows(IDS)
        table(IDS[:300]).sum().backward()
        assert table.weight.grad is not None
        distributed.all_reduce(table.weight.grad)
        table.weight.grad /= processes
        found["step"] = said(optimizer.step)
        found["rows"] = same(table.rows(IDS), before)
        optimizer.zero_grad()
        table(IDS[:300]).sum().backward()
        optimizer.step()
        before[:300] -= 0.5
        found["stepped"] = same(table.rows(IDS), before)
    return found


def over_some(rank: int, processes: int, folder: Path) -> object:
    """What would average over other processes than tables do, or step before they do, is refused."""
    groups = [distributed.new_group([0]), distributed.new_group([1, 2])]
    group = groups[rank > 0]
    found: dict[str, object] = {}
    table = EmbeddingTable(400, 4, seed=3)
    before = table.rows(IDS)
    model = nn.Sequential(table, nn.Linear(4, 4))
    with offload(model, None, settings("host", folder, processes)):
        found["after"] = said(lambda: DistributedDataParallel(model, process_group=group))
        found["over all"] = said(lambda: DistributedDataParallel(model)(IDS).sum().backward())
    kept = EmbeddingTable(400, 4, seed=3)
    model = nn.Sequential(kept, nn.Linear(4, 4))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["0.weight"])
    wrapper = DistributedDataParallel(model, process_group=group)
    found["before"] = said(lambda: offload(wrapper, None, settings("host", folder, processes)))
    early = {**settings("host", folder, processes), "optimizer_in_backward": True}
    table = EmbeddingTable(400, 4, seed=3)
    found["early"] = said(lambda: offload(table, SGD(table.parameters(), lr=0.5), early))
    found["rows"] = [same(each.rows(IDS), before) for each in (kept, table)]
    return found


def put_aside(rank: int, processes: int, folder: Path) -> object:
    """A pass that fails before it has a gradient leaves the one that was there, for whoever looks at it."""
    found: dict[str, object] = {}
    whole = EmbeddingTable(400, 4, seed=3).rows(IDS)
    with small(folder, processes) as (table, optimizer, _):
        for what in ("stepped", "cleared by the module", "seen"):
            table.load_state_dict({"weight": whole})
            table(IDS[:20]).sum().backward()
            # Called before anything is accumulated.
            handle = table.weight.register_hook(failing)  # type: ignore[no-untyped-call]
            found[f"{what}, said"] = said(table(IDS[:300]).sum().backward)
            handle.remove()
            if what == "seen":
                assert table.weight.grad is not None
                found["rows there"] = len(table.weight.grad.values())
            if what == "cleared by the module":
                table.zero_grad()
                table(IDS[:20]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = whole.clone()
            expected[:20] -= 0.5
            found[what] = same(table.rows(IDS), expected)
    return found


def paused_halves(rank: int, processes: int, folder: Path) -> object:
    """The run's ``no_sync`` counts when backward runs, for tables, too, wherever the lookup was."""
    from tierstore.training.ranks.acts import Act  # one process imports nothing of it

    found: dict[str, object] = {}
    kept: list[list[Tensor]] = []
    for where in ("both", "backward", "forward"):
        torch.manual_seed(0)
        table, head = EmbeddingTable(400, 4, seed=3), nn.Linear(4, 4)
        model = nn.Sequential(table, head)
        optimizers = [SGD(table.parameters(), lr=0.5), torch.optim.SGD(head.parameters(), lr=0.5)]
        with offload(model, optimizers, settings("host", folder, processes)) as run:
            run.average_gradients()
            for number in range(3):
                ids = IDS[rank * number : 90 * (number + 1) : 3]
                is_paused = number < 2 and where != "forward"
                with run.no_sync() if where == "both" and is_paused else contextlib.nullcontext():
                    with run.no_sync() if where == "forward" else contextlib.nullcontext():
                        loss = model(ids).square().sum() / 64
                    with run.no_sync() if is_paused else contextlib.nullcontext():
                        loss.backward()
            found[f"averages, {where}"] = run._ranks._tables._exchange._done[Act.GRADIENTS, 0]  # type: ignore[union-attr]
            for each in optimizers:
                each.step()
            kept.append([table.rows(IDS), *(each.detach().clone() for each in head.parameters())])
    found["backward"] = all(map(same, kept[0], kept[1]))
    found["forward"] = all(one.allclose(other) for one, other in zip(kept[0], kept[2], strict=True))
    return found


def at_the_end(rank: int, processes: int, folder: Path) -> object:
    """A gradient that nobody has stepped is there when a run has ended: the whole of an average."""
    found: dict[str, object] = {}
    whole = EmbeddingTable(400, 4, seed=3).rows(IDS)
    names = IDS[rank * 100 : 200 + 100 * rank]  # also such that is not the other's
    with small(folder, processes) as (table, optimizer, _):
        (table(names) * (1 + rank)).sum().backward()
    optimizer.step()
    times = torch.zeros(400)
    for each in range(processes):
        times[each * 100 : 200 + 100 * each] += (1 + each) / processes
    found["averaged"] = same(table.rows(IDS), whole - 0.5 * times[:, None])
    with small(folder, processes) as (table, optimizer, run), run.no_sync():
        table(names).sum().backward()
    assert table.weight.grad is not None
    found["own"] = table.weight.grad.coalesce().indices()[0].tolist() == names.tolist()
    with small(folder, processes) as (table, _, _):
        pass
    found["none"] = table.weight.grad is None
    return found
