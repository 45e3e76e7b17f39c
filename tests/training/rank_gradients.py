"""What becomes of a table's gradient that programs and wrappers treat in their own ways; scenarios."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import distributed

from tests.training.rank_table_rules import small
from tests.training.rank_tables import said
from tests.training.twins import same

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
