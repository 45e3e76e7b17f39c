"""Reading tables as a whole whose rows are spread over processes: the first writes files, the others serve.

1. All processes call the same.  The first says which column of which table it wants, and gets it block by
   block in the order of ids; it never has more than a block of what is not its own.
2. If it stops early, as its disk is full, it says so before the next block, and all raise.
3. One that cannot read what it has sends a mark instead, as in a lookup.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from tierstore.errors import TierStoreError
from tierstore.modes import Unseen
from tierstore.nn.row_blocks import own_blocks_of, own_of
from tierstore.nn.table_weight import TableWeight
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice


class _Wish(NamedTuple):
    """What the first process wants next.

    Attributes:
        table: its number; -1: nothing any more.
        column: of it.
        parts: spans of ids, ascending.
        fault: why it wants nothing any more; "": it has all.
    """

    table: int
    column: str = ""
    parts: Sequence[slice] = ()
    fault: str = ""


class WholeTables:
    """Brings all rows of tables to the first process.

    Args:
        exchange: with the others.
        numbers: of the tables.
        slices: who has which rows of each.
    """

    def __init__(
        self,
        exchange: RowExchange,
        numbers: Mapping[TableWeight, int],
        slices: Mapping[TableWeight, RowSlice],
    ) -> None:
        self._exchange = exchange
        self._numbers = numbers
        self._weights = list(numbers)
        self._slices = slices
        self._is_under_way = False  # a table, of which the first process has not got all

    @contextlib.contextmanager
    def reading(self, act: Act, table: int) -> Iterator[bool]:
        """Return a context in which the first process may read `blocks`; the others serve it until it ends.

        Args:
            act: what for.
            table: number of the table; 0 where it is about several.

        Yields:
            whether this is the first process.

        Raises:
            UsageError: the processes do different things.
            TierStoreError: another could not read its rows, or the first could not write them, or has ended.
        """
        exchange = self._exchange
        with exchange.alone():
            counts = torch.zeros(exchange.where.world_size, dtype=torch.int64, device="cpu")
            exchange.begin(act, table, self._weights[table].row_store.num_rows, counts)
            if exchange.where.rank:
                self._serve()
                yield False
                return
            fault = "it was stopped"
            try:
                yield True
                fault = ""
            except Exception as error:
                fault = f"{type(error).__name__}: {error}"
                raise
            finally:
                self._stop()
                exchange.share(_Wish(-1, fault=fault))
                exchange.end()

    def blocks(
        self, weight: TableWeight, column: str, parts: Sequence[slice]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield all rows of some spans of ids, in the first process; see `reading`."""
        self._stop()
        self._exchange.share(_Wish(self._numbers[weight], column, parts))
        owner_of = self._slices[weight].owner_of
        self._is_under_way = True
        for number, (part, rows, failure) in enumerate(_own(weight, column, parts)):
            self._exchange.tell(1)
            every = torch.arange(part.start, part.stop, device="cpu")
            owners = owner_of(every)
            counts = torch.bincount(owners, minlength=self._exchange.where.world_size) + 1
            none = torch.zeros_like(counts)
            none[0] = counts[0]
            got = self._exchange.send(rows, none, counts)
            self._is_under_way = number + 1 < len(parts)
            if failure is not None:
                raise failure
            ends = counts.cumsum(0)
            failed = got[ends - 1, 0].nonzero().flatten().tolist()
            if failed:
                raise TierStoreError(
                    f"rank {failed[0]} could not read rows of table {weight.table_name!r}; it says why"
                )
            whole = torch.empty(len(every), rows.shape[1], dtype=rows.dtype, device="cpu")
            for rank, sent in enumerate(got.split(counts.tolist())):
                whole[owners == rank] = sent[:-1]
            yield part, whole

    def _stop(self) -> None:
        """Tell the others that the rest of a table is not wanted."""
        if self._is_under_way:
            self._is_under_way = False
            self._exchange.tell(0)

    def _serve(self) -> None:
        """Send the first process what it wants, until it wants nothing any more."""
        mine: Exception | None = None
        while (wish := self._exchange.share(_Wish(-1))).table >= 0:
            weight = self._weights[wish.table]
            for _, rows, failure in _own(weight, wish.column, wish.parts):
                mine = mine or failure
                if not self._exchange.tell(1):
                    break
                counts = torch.zeros(self._exchange.where.world_size, dtype=torch.int64, device="cpu")
                counts[0] = len(rows)
                self._exchange.send(rows, counts, torch.zeros_like(counts))
        self._exchange.end()
        if mine is not None:
            raise mine
        if wish.fault:
            raise TierStoreError(f"rank 0 could not go on: {wish.fault}")


def _own(
    weight: TableWeight, column: str, parts: Sequence[slice]
) -> Iterator[tuple[slice, torch.Tensor, Exception | None]]:
    """Yield the rows of each span that are here, behind them one that says whether they could be read."""
    store = weight.row_store
    blocks = own_blocks_of(store, column, parts)
    for part in parts:
        failure: Exception | None = None
        with Unseen():
            ids = own_of(store, torch.arange(part.start, part.stop, device="cpu"))
            rows = torch.zeros(len(ids) + 1, store.width, dtype=store.dtype, device="cpu")
            try:
                _, _, rows[:-1] = next(blocks)
            except Exception as error:  # noqa: BLE001 - raised by the caller, when the others have heard of it
                failure = error
                rows[-1] = 1
        yield part, rows, failure
