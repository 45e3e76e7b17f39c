"""Cells of rows written to pages, all or none of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import numpy.typing as npt
import torch

from tierstore.tables.pages import TablePages
from tierstore.tables.visits import visits

Cells = dict[str, torch.Tensor]
Owe = Callable[[torch.Tensor, Cells], None]


def change_pages(
    pages: TablePages,
    ids: npt.NDArray[np.int64],
    cells: Mapping[str, torch.Tensor],
    owe: Owe,
    then: Callable[[], None],
) -> None:
    """Write cells of rows, and do what belongs to it.

    Args:
        pages: of the table.
        ids: ascending, distinct.
        cells: of each column, ``[len(ids), width]`` in host memory.
        owe: told the ids and the former cells of rows that were written, where it fails after all: they are
            to be written back before anybody sees the table again.
        then: done at last.

    Raises:
        CapacityError, BackendError: a page could not be brought.  Or whatever ``then`` raises.
    """
    former = {name: torch.empty_like(each) for name, each in cells.items()}
    reached = 0
    try:
        for visit in visits(pages, ids):
            for name, each in former.items():
                visit.gather(name, out=each[visit.part])
            reached = visit.part.stop
            for name, each in cells.items():
                visit.scatter(name, each[visit.part])
        then()
    except BaseException:
        if reached:
            owe(torch.from_numpy(ids[:reached]), {name: each[:reached] for name, each in former.items()})
        raise
