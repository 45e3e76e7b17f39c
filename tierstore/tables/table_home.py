"""Where a table lies that is attached."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from tierstore.tables.frames import Policy
from tierstore.tables.page_log import LogPlace
from tierstore.tables.pages import TableTraits


class RowUse(Protocol):
    """Says whether programs may use rows that lie in a home."""

    def require(self, what: str) -> object:
        """Raise if they may not; ``what`` is about to be done, as a clause."""


@dataclass(frozen=True)
class TableHome:
    """Where a table lies that is attached.

    Attributes:
        memory: for frames: contiguous, in host memory, of any type whose bytes can be used.
        log: for what does not fit there; None: there is none, and all that is written has to fit.
        policy: which pages leave memory first: those used least often of late, or least recently.
        setting: what messages tell to raise where the memory is too small.
        executor: in which blocks are put and read beside the caller; None: threads of the table's own.
        name: what messages call the table; None: as before.
        use: whether rows may be used, asked by `RowStore.require` as long as they lie there; None: they may.
    """

    memory: torch.Tensor
    log: LogPlace | None = None
    policy: Policy = "lfu"
    setting: str = "its memory"
    executor: Executor | None = None
    name: str | None = None
    use: RowUse | None = None

    def traits_of(self, table: TableTraits, own_executor: Executor) -> TableTraits:
        """Return what a table is here.

        Args:
            table: what it is elsewhere.
            own_executor: threads of its own.
        """
        return replace(
            table,
            name=self.name or table.name,
            policy=self.policy,
            setting=self.setting,
            executor=self.executor or own_executor,
        )
