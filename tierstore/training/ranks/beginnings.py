"""What tables whose rows are about to be spread begin with: what the first process has.

1. A seed that nobody has given is the first process's: rows that nobody has written are made of it.
2. Rows that were written before are the first process's, with their state, whatever the others have written:
   as ``DistributedDataParallel`` lets the first process's parameters win.
3. All else has to be the same everywhere: shapes, types, columns, seeds that were given, what functions make;
   and the optimizer with its options, as who has a row follows from the states beside it, and a row is
   stepped by the optimizer of the process that has it.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.modes import Unseen
from tierstore.nn import EmbeddingTable
from tierstore.nn.initializers import CheckedRows
from tierstore.nn.table_weight import TableWeight
from tierstore.tables import InitialRows, RowStore, has_drawn_seed, seed_of, with_seed
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.meeting import Meeting
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice
from tierstore.training.ranks.where import RankPlace
from tierstore.training.tables.found_tables import Tables
from tierstore.training.tables.kept_tables import TableLook


@dataclass(frozen=True)
class TableBeginning:
    """What a table begins with, in every process.

    Attributes:
        rows: that nobody has written.
        are_written: whether the first process has written some.
    """

    rows: InitialRows
    are_written: bool


def agree_on_beginnings(
    where: RankPlace, meeting: Meeting, model: nn.Module, tables: Tables
) -> Mapping[TableWeight, TableBeginning]:
    """Return what each table begins with.  Blocks until all have come.

    Args:
        where: which process this is.
        meeting: of all of them.
        model: that is offloaded.
        tables: of the model.

    Raises:
        UsageError: the processes have other tables; all raise, and the message names the first that differs.
        TierStoreError: another process has ended.
    """
    modules = {each.weight: each for each in model.modules() if isinstance(each, EmbeddingTable)}

    def looks_of_all() -> list[tuple[str, dict[str, object]]]:
        return [(name, _look(weight, modules.get(weight))) for weight, name in tables.items()]

    looks = looks_of_all()
    seeds = [seed_of(weight.row_store.initial_rows) for weight in tables]
    written = [_has_written(weight.row_store) for weight in tables]
    told = meeting.exchange((looks, seeds, written), "offload(...), to spread tables")
    if any(theirs != told[0][0] for theirs, _, _ in told):
        gc.collect()  # an optimizer that nobody has any more may be left in some of them
        looks = looks_of_all()
        told = meeting.exchange((looks, seeds, written), "offload(...), to spread tables")
    for rank, (theirs, _, _) in enumerate(told):
        if theirs != looks:
            one, other = next(
                ((a, b) for a, b in zip(looks, theirs, strict=False) if a != b), (len(looks), len(theirs))
            )
            raise UsageError(
                f"the processes have different tables: {one} on {where.name}, and {other} on rank {rank}. "
                "Build the same model everywhere: give each table the same seed, or none, and the same "
                "optimizer."
            )
    _, seeds, written = told[0]
    return {
        weight: TableBeginning(with_seed(weight.row_store.initial_rows, seed), are_written)
        for weight, seed, are_written in zip(tables, seeds, written, strict=True)
    }


def _look(weight: TableWeight, module: EmbeddingTable | None) -> dict[str, object]:
    """Return what has to be the same of a table: of a seed that was drawn, that it was."""
    begins = weight.row_store.initial_rows
    look = asdict(replace(TableLook.of(weight.row_store), part=None))
    if has_drawn_seed(begins):
        look |= {"seed": "drawn", "begins": repr(with_seed(begins, 0)).replace("seed=0", "seed drawn")}
    if isinstance(begins, CheckedRows):
        look["begins"] = f"a function, {_digest(begins, weight.row_store.num_rows)}"
    look |= {"optimizer": _stepper(weight), "requires_grad": weight.requires_grad}
    return look | {name: getattr(module, name, None) for name in ("sparse", "target", "cache_rows")}


def _digest(begins: CheckedRows, num_rows: int) -> str:
    """Return some rows of a function, which nobody looks into, in few letters."""
    ids = torch.tensor([0, num_rows // 2, num_rows - 1], device="cpu").unique()
    content = begins(ids).contiguous().view(torch.uint8).numpy().tobytes()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _stepper(weight: TableWeight) -> str:
    """Say which optimizer steps a table, with what options."""
    optimizer = None if weight.stepped_by is None else weight.stepped_by()
    if optimizer is None:
        return "none"
    group = next(g for g in optimizer.param_groups if any(each is weight for each in g["params"]))
    options = ", ".join(f"{name}={group[name]}" for name in optimizer.defaults if name in group)
    return f"{type(optimizer).__name__}({options})"


def _has_written(store: RowStore) -> bool:
    return store.why_ended is None and next(store.written_ids(), None) is not None


class FirstRows:
    """Brings rows that the first process has written to those that will have them.

    Args:
        exchange: with the others.
        numbers: of the tables.
    """

    def __init__(self, exchange: RowExchange, numbers: Mapping[TableWeight, int]) -> None:
        self._exchange = exchange
        self._numbers = numbers

    def bring(self, weight: TableWeight, own: RowSlice, part: RowStore) -> None:
        """Write what the first process has written of a table; all processes.  Some pages at a time.

        Args:
            weight: of the table, which is as a whole in the first process.
            own: which rows will be here.
            part: they; it has the table's columns.

        Raises:
            UsageError: the processes do different things, or have other states beside the rows.
            TierStoreError: another process has ended.
            CapacityError: there is no memory for them.
        """
        exchange, whole = self._exchange, weight.row_store
        names = [column.name for column in part.columns]
        none = torch.zeros(exchange.where.world_size, dtype=torch.int64, device="cpu")
        with exchange.alone(), Unseen():
            exchange.begin(Act.FIRST_ROWS, self._numbers[weight], len(names), none)
            written = whole.written_ids() if exchange.where.rank == 0 else iter(())
            while True:
                ids = next(written, torch.empty(0, dtype=torch.int64, device="cpu"))
                owners = own.owner_of(ids)
                order, counts = owners.argsort(stable=True), torch.bincount(owners, minlength=len(none))
                if not exchange.tell(len(ids)):
                    return
                theirs = exchange.swap(counts[:, None])[:, 0]
                mine = exchange.send(ids[order], counts, theirs)
                for name in names:
                    cells = exchange.send(_cells(whole, name, ids)[order], counts, theirs)
                    for visit in part.visit(mine):
                        visit.scatter(name, cells[visit.part])


def _cells(store: RowStore, column: str, ids: torch.Tensor) -> torch.Tensor:
    cells = torch.empty(len(ids), store.width, dtype=store.dtype, device="cpu")
    for visit in store.visit(ids):
        visit.gather(column, out=cells[visit.part])
    return cells
