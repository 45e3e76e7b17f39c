"""What tables begin with whose rows are spread: what the first process has; scenarios of `rank_lives`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from tests.training.rank_table_rules import failing
from tests.training.rank_tables import cells, gathered, said, settings
from tests.training.twins import same
from tierstore.nn import EmbeddingTable, Normal, Uniform
from tierstore.optim import SGD, LazyAdam
from tierstore.training import offload
from tierstore.training.session import Session

COUNT, WIDTH = 900, 16
EVERY = torch.arange(COUNT)


class Tables(nn.Module):
    """Tables without a seed, some of which are trained or written before they are offloaded."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = EmbeddingTable(COUNT, WIDTH)
        self.small = EmbeddingTable(COUNT, 1, init=Uniform(-2, 2), dtype=torch.bfloat16)
        self.trained = EmbeddingTable(COUNT, WIDTH, init=Normal(0.1))
        self.written = EmbeddingTable(COUNT, WIDTH, init="zeros")
        self.elsewhere = EmbeddingTable(COUNT, WIDTH)

    @property
    def tables(self) -> list[EmbeddingTable]:
        """All of them, in the order of their names."""
        return [self.plain, self.small, self.trained, self.written, self.elsewhere]


def made(rank: int) -> tuple[Tables, torch.optim.Optimizer]:
    """Return tables that are others in each process."""
    torch.manual_seed(rank)
    model = Tables()
    optimizer = LazyAdam([model.trained.weight], lr=0.5)
    # Of pages that lie apart, and of other ones in each process.
    model.trained(EVERY[rank * 100 :: 7]).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    written = EVERY[: 500 // (1 + 4 * rank)]
    model.written.set_rows(written, torch.randn(len(written), WIDTH))
    if rank:
        model.elsewhere.set_rows(EVERY[5:9], torch.zeros(4, WIDTH))
    return model, optimizer


def everything(model: Tables) -> list[Tensor]:
    """Return all rows of all tables, and the states beside those that were trained."""
    return [*(each.rows(EVERY) for each in model.tables), *cells(model.trained.weight.row_store, EVERY)[1:]]


def tables_begin(rank: int, processes: int, folder: Path) -> object:
    """Seeds that were drawn, and what was written before, are the first process's; as parameters are."""
    found: dict[str, object] = {}
    model, optimizer = made(rank)
    before = everything(model)
    first = gathered(before)[0]
    found["others"] = [not same(one, two) for one, two in zip(before, first, strict=True)]
    take_in = Session.adopt
    Session.adopt = failing  # type: ignore[method-assign]
    whole = nn.ModuleDict({"tables": model, "dense": nn.Linear(4, 4)})
    found["undone"] = said(lambda: offload(whole, optimizer, settings("host", folder, processes)))
    Session.adopt = take_in  # type: ignore[method-assign]
    found["as before"] = all(map(same, everything(model), before))
    with offload(model, optimizer, settings("disk", folder, processes)):
        rows = [each.rows(EVERY) for each in model.tables]
        found["rows"] = [same(one, two) for one, two in zip(rows, first, strict=False)]
        store = model.trained.weight.row_store
        assert store.own_rows is not None
        own = EVERY[store.own_rows.own(EVERY)]
        states = cells(store, own)[1:]
        found["states"] = [same(one, two[own]) for one, two in zip(states, first[len(rows) :], strict=True)]
        found["seeds"] = [each.seed for each in model.tables]
    found["one seed"] = said(
        lambda: offload(EmbeddingTable(40, 4, seed=0 if rank else None), None, settings("host", folder, 2))
    )
    found["one state"] = said(lambda: offload(stepped(rank), None, settings("host", folder, 2)))
    found["gone on with"] = gone_on_with(rank, processes, folder)
    return found


def tables_differ(rank: int, processes: int, folder: Path) -> object:
    """What is not the same everywhere is refused by all of them, with what each has."""

    def opened(table: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> str:
        return said(lambda: offload(table, optimizer, settings("host", folder, processes)).close())

    def table(**more: object) -> EmbeddingTable:
        return EmbeddingTable(400, 4, **{"seed": 3, **more})  # type: ignore[arg-type]

    found: dict[str, str] = {}
    found["functions"] = opened(table(init=lambda ids: torch.full((len(ids), 4), float(rank))))
    made = table()
    found["optimizers"] = opened(made, (SGD, LazyAdam)[rank](made.parameters(), lr=0.5))
    made = table()
    found["one optimizer"] = opened(made, SGD(made.parameters(), lr=0.5) if rank else None)
    made = table()
    found["rates"] = opened(made, SGD(made.parameters(), lr=0.5 + rank))
    made = table()
    made.weight.requires_grad_(rank == 0)
    found["frozen"] = opened(made)
    found["dense"] = opened(table(target="device", sparse=rank == 0))
    found["order"] = opened(nn.ModuleDict({name: table() for name in ("ab" if rank else "ba")}))
    made = table()
    if rank:  # in a circle that the collector has not come to
        former = SGD(made.parameters(), lr=0.5)
        former.itself = former  # type: ignore[attr-defined]
        del former
    found["nothing"] = opened(made)
    return found


def stepped(rank: int) -> EmbeddingTable:
    """Return a table that keeps states in the second process alone."""
    table = EmbeddingTable(40, 4, seed=0)
    if rank:
        table(EVERY[:4]).sum().backward()
        LazyAdam(table.parameters(), lr=0.5).step()
    return table


def gone_on_with(rank: int, processes: int, folder: Path) -> list[bool]:
    """A checkpoint has the rows that it was made with, whatever seeds are drawn afterwards."""
    config = {**settings("disk", folder, processes), "durable": True, "offload_path": str(folder / "kept")}
    torch.manual_seed(5 + rank)
    table = EmbeddingTable(COUNT, WIDTH)
    whole = table.rows(EVERY)
    distributed.broadcast(whole, 0)
    with offload(table, None, config) as run:
        table.set_rows(EVERY[:3], torch.ones(3, WIDTH))
        run.checkpoint()
        run.close(restore=False)
    whole[:3] = 1
    torch.manual_seed(7 + rank)
    table = EmbeddingTable(COUNT, WIDTH)
    with offload(table, None, config) as run:
        return [run.resumed is not None, same(table.rows(EVERY), whole)]
