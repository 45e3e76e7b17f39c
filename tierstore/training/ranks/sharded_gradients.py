"""Gradients of tables come to the processes that have the rows, and are averaged there.

1. They travel at the end of a backward pass, of all tables together and in the order of the tables: what ends
   first inside of a pass may differ between processes.  Inside of ``no_sync`` they stay where they are.
2. The average is PyTorch's, of ``DistributedDataParallel`` over gloo: each process divides what it has by the
   number of processes and sums it up by ids; these sums are added in the order of ranks.  (PyTorch adds them
   as its sort leaves them, which for two processes is the same, and for three the same where that is stable.)
3. ``weight.grad`` is then the average of the rows that this process has.  Where a value somewhere is not
   finite, every process has one that is not, of a row that it need not have: a ``GradScaler`` leaves the step
   out everywhere, or nowhere.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch.nn.parallel import DistributedDataParallel

from tierstore.errors import UsageError
from tierstore.modes import Unseen
from tierstore.nn.table_weight import TableWeight
from tierstore.torch_private import call_after_backward, current_graph_task
from tierstore.training.ranks.acts import Act
from tierstore.training.ranks.row_exchange import RowExchange
from tierstore.training.ranks.row_slices import RowSlice

_IS_AVERAGE = "tierstore_is_average"


class ShardedGradients:
    """Averages the gradients of the tables of one run.

    Args:
        exchange: with the other processes.
        slices: who has which rows of each table, in an order that all processes share.
    """

    def __init__(self, exchange: RowExchange, slices: Mapping[TableWeight, RowSlice]) -> None:
        self._exchange = exchange
        self._slices = slices
        self._pass: weakref.ref[_TablePass] | None = None
        self._is_synced = False
        self._aside: dict[TableWeight, torch.Tensor] = {}
        self._named: dict[TableWeight, tuple[torch.Tensor, torch.Tensor]] = {}
        self._wrappers: list[DistributedDataParallel] = []
        self._pauses = 0

    # --- whether they are averaged ------------------------------------------------------------

    @property
    def are_synced(self) -> bool:
        """Whether gradients of lookups that are made now are averaged in backward.

        Not where a wrapper's ``no_sync`` is: as for its other parameters it counts when forward runs.  The
        run's counts when backward runs, as in `GradientAverages`.
        """
        return all(each.require_backward_grad_sync for each in self._wrappers)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Return a context in which backward passes only accumulate."""
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1

    def are_paused_by(self, wrapper: DistributedDataParallel) -> None:
        """Note that a wrapper's ``no_sync`` is about the tables, too."""
        self._wrappers.append(wrapper)

    def refuse_joins(self, weight: TableWeight) -> None:
        """Raise inside of PyTorch's ``Join``, which lets some processes come to their end before others.

        A wrapper that was in one once says so for good.
        """
        if any(each._join_config.enable for each in self._wrappers):  # noqa: SLF001 - no other way
            raise UsageError(
                f"table {weight.table_name!r} is looked up inside of torch's Join, and its rows are spread "
                f"over {self._exchange.where.world_size} processes: one without a batch would not send the "
                "others rows. Leave Join out, and let that process look up an empty batch, or end all at the "
                "same step."
            )

    # --- a pass -------------------------------------------------------------------------------

    def begin(self, weight: TableWeight, *, is_synced: bool) -> None:
        """Backward has come to a lookup: what was averaged before is put aside until the pass is over.

        Args:
            weight: of the table.
            is_synced: whether the lookup was made outside of a wrapper's ``no_sync``.
        """
        now = None if self._pass is None else self._pass()
        if now is None or now.task != current_graph_task():
            self._bring_back()  # of a pass that has failed
            now, self._is_synced = _TablePass(current_graph_task()), False
            self._pass = weakref.ref(now)
            call_after_backward(functools.partial(self._last_of_all, now))
        self._is_synced |= is_synced and not self._pauses
        self._put_aside(weight)

    def _put_aside(self, weight: TableWeight) -> None:
        gradient = weight.grad
        if gradient is None or not hasattr(gradient, _IS_AVERAGE):
            return
        is_zeroed = gradient._version != getattr(gradient, _IS_AVERAGE)  # noqa: SLF001 - no other way
        if is_zeroed and not len(gradient._values()):  # noqa: SLF001 - `values()` refuses repeats
            delattr(gradient, _IS_AVERAGE)  # what is accumulated into it now is no average
        else:
            weight.grad = None
            self._aside[weight] = gradient  # now: whoever sets a gradient lets go of what is put aside

    def _last_of_all(self, now: _TablePass) -> None:
        """The pass is over.  Whoever averages other gradients does that first, in every process."""
        call_after_backward(functools.partial(self._end, now))

    def _end(self, now: _TablePass) -> None:
        now.task = None
        if self._is_synced:
            with self._exchange.alone(), Unseen(), torch.no_grad():
                self._average()
            return
        mixed = [weight for weight in self._aside if weight.grad is not None]
        for weight in mixed:
            gradient = self._aside.pop(weight)
            weight.grad = gradient
        self._bring_back()
        if mixed:
            raise UsageError(
                f"table {mixed[0].table_name!r} has a gradient that was averaged already, and a pass inside "
                "of no_sync() would add one that was not; it was left out. Begin to accumulate after "
                "zero_grad(), or leave no_sync() out."
            )

    def show(self) -> None:
        """Somebody asks for a gradient: what a pass that has failed had put aside is there again."""
        if self._aside and (self._pass is None or self._pass() is None):
            self._bring_back()

    def forget(self, weight: TableWeight) -> None:
        """Somebody sets the gradient of a table: what was put aside of it is of no use any more."""
        self._aside.pop(weight, None)

    def _bring_back(self) -> None:
        """Let averages be gradients again, but where something was accumulated since: that is added later."""
        aside, self._aside = self._aside, {}  # asking for a gradient comes here
        for weight, gradient in aside.items():
            if weight.grad is None:
                weight.grad = gradient
            else:
                self._aside[weight] = gradient

    # --- the average --------------------------------------------------------------------------

    def _average(self) -> None:
        weights = list(self._slices)
        for weight in weights:
            self._put_aside(
                weight
            )  # what this process has looked up nothing of in this pass, but others have
        sums = [self._summed(weight) for weight in weights]
        counts = torch.stack([each.counts for each in sums], 1)
        has = torch.tensor([each.is_there for each in sums], device="cpu").to(torch.int64)
        self._exchange.begin(Act.GRADIENTS, 0, 0, torch.zeros(len(counts), dtype=torch.int64, device="cpu"))
        told = self._exchange.swap(torch.cat([counts, has.expand(len(counts), -1)], 1))
        theirs, whose = told[:, : len(weights)], told[:, len(weights) :].sum(0).tolist()
        found: list[_Averaged | None] = []
        for number, weight in enumerate(weights):
            each = sums[number]
            named, values = self._exchange.send_both(
                each.named, each.values, counts[:, number], theirs[:, number]
            )
            found.append(_added(weight, named, values, theirs[:, number]) if whose[number] else None)
        strange = self._strange(found)
        self._exchange.end()
        for weight, average, ids in zip(weights, found, strange, strict=True):
            if average is not None:
                self._give(weight, average, ids)
        self._bring_back()

    def _summed(self, weight: TableWeight) -> _Summed:
        """Return this process's part of the average, summed up by ids, for those that have the rows."""
        processes, gradient = self._exchange.where.world_size, weight.grad
        if gradient is None:
            none = torch.zeros(0, 2, dtype=torch.int64, device="cpu")
            counts = torch.zeros(processes, dtype=torch.int64, device="cpu")
            empty = torch.zeros(0, weight.shape[1], dtype=weight.dtype, device="cpu")
            return _Summed(none, empty, counts, is_there=False)
        index, values = gradient._indices(), gradient._values()  # noqa: SLF001 - `indices()` refuses repeats
        shares = torch.sparse_coo_tensor(
            index, values / processes, weight.shape, device="cpu", check_invariants=False,
            is_coalesced=gradient.is_coalesced(),
        ).coalesce()  # fmt: skip
        ids, times = torch.unique(index[0], return_counts=True)
        owners = self._slices[weight].owner_of(ids)
        order = owners.argsort(stable=True)
        return _Summed(
            torch.stack([ids, times], 1)[order],
            shares.values()[order],
            torch.bincount(owners, minlength=processes),
            is_there=True,
        )

    def _strange(self, found: Sequence[_Averaged | None]) -> list[int]:
        """Return of each table the id of a row of another process whose gradient is not finite, or -1."""
        mine = torch.tensor([-1 if each is None else each.first_strange() for each in found], device="cpu")
        told = self._exchange.gather(mine)
        del told[self._exchange.where.rank]
        return torch.stack(told).amax(0).tolist()

    def _give(self, weight: TableWeight, average: _Averaged, strange: int) -> None:
        gradient, times = average.gradient, (average.ids, average.times)
        if strange >= 0:
            bad = torch.full((1, weight.shape[1]), torch.nan, dtype=weight.dtype, device="cpu")
            gradient = (gradient + _sparse(torch.tensor([strange], device="cpu"), bad, weight)).coalesce()
        former = self._aside.pop(weight, None)
        if former is not None:
            gradient = (former + gradient).coalesce()
            times = _merged(self._named[weight], times)
        setattr(gradient, _IS_AVERAGE, gradient._version)  # noqa: SLF001 - `zero_grad` changes it
        weight.grad = gradient
        self._named[weight] = times

    # --- steps --------------------------------------------------------------------------------

    def has_average(self, weight: TableWeight) -> bool:
        """Whether the gradient of a table is one that was averaged."""
        return hasattr(weight.grad, _IS_AVERAGE)

    def part_of_average(self, weight: TableWeight) -> torch.Tensor:
        """Return what an averaged gradient has of the rows that are here, whatever else it names."""
        assert weight.grad is not None
        gradient = weight.grad.coalesce()
        ids, values = gradient.indices()[0], gradient.values()
        is_own = self._slices[weight].own(ids)
        return _sparse(ids[is_own], values[is_own], weight)

    def own(self, weight: TableWeight, gradient: torch.Tensor) -> torch.Tensor:
        """Return the averaged gradient of the rows that this process has.

        Args:
            weight: of the table.
            gradient: of it.

        Raises:
            UsageError: it was not averaged, or somebody has averaged it once more.
        """
        if not hasattr(gradient, _IS_AVERAGE):
            raise UsageError(
                f"table {weight.table_name!r}, whose rows are spread over {self._exchange.where.world_size} "
                "processes, has a gradient that was not averaged: backward was inside of no_sync(), or "
                "somebody has set it. Let the last pass before a step be outside of no_sync(), and change "
                "gradients in place."
            )
        gradient = gradient.coalesce()
        ids, values = gradient.indices()[0], gradient.values()
        is_own = self._slices[weight].own(ids)
        if is_own.all():
            return gradient
        strangers = ids[~is_own & values.isfinite().any(1)]
        if len(strangers):
            raise UsageError(
                f"the gradient of table {weight.table_name!r} names {len(strangers)} rows that other "
                f"processes have, such as {strangers[0].item()}: it was averaged when backward was "
                "over, and somebody has averaged it over the processes once more, or added another one. "
                "Leave tables out where a program averages gradients itself."
            )
        return _sparse(ids[is_own], values[is_own], weight)

    def occurrences(self, weight: TableWeight, ids: torch.Tensor) -> torch.Tensor:
        """Return how often ids were named in all processes; those that somebody else has set count once."""
        known, times = self._named.get(weight, (ids[:0], ids[:0]))
        places = torch.searchsorted(known, ids).clamp_(max=max(0, len(known) - 1))
        if not len(known):
            return torch.ones_like(ids)
        return torch.where(known[places] == ids, times[places], 1)


class _TablePass:
    """A backward pass.  PyTorch has the only reference, so it is gone with the pass, however that ended.

    Attributes:
        task: its number; ``None``: it is over.
    """

    def __init__(self, task: int) -> None:
        self.task: int | None = task


class _Summed:
    """A process's part of an average.

    Attributes:
        named: ids and how often each was named, ``[n, 2]``, by who has the rows.
        values: of them.
        counts: how many are for each rank.
        is_there: whether the process has a gradient.
    """

    def __init__(
        self, named: torch.Tensor, values: torch.Tensor, counts: torch.Tensor, *, is_there: bool
    ) -> None:
        self.named, self.values, self.counts, self.is_there = named, values, counts, is_there


class _Averaged:
    """The average of the rows that a process has.

    Attributes:
        ids: ascending, distinct.
        times: how often each was named.
        gradient: the average, sparse and coalesced.
    """

    def __init__(self, ids: torch.Tensor, times: torch.Tensor, gradient: torch.Tensor) -> None:
        self.ids, self.times, self.gradient = ids, times, gradient

    def first_strange(self) -> int:
        """Return the first id whose values are not all finite, or -1."""
        places = (~self.gradient.values().isfinite()).any(1).nonzero()
        return int(self.ids[places[0, 0]]) if len(places) else -1


def _added(weight: TableWeight, named: torch.Tensor, values: torch.Tensor, counts: torch.Tensor) -> _Averaged:
    """Add up what processes have sent, in the order of ranks: the first is copied, others are added."""
    ids, inverse = torch.unique(named[:, 0], return_inverse=True)
    sums = torch.zeros(len(ids), weight.shape[1], dtype=weight.dtype, device="cpu")
    times = torch.zeros(len(ids), dtype=torch.int64, device="cpu")
    for places, part, counted in zip(
        *(each.split(counts.tolist()) for each in (inverse, values, named[:, 1])), strict=True
    ):
        is_first = times[places] == 0
        sums[places] = torch.where(is_first[:, None], part, sums[places] + part)
        times[places] += counted
    return _Averaged(ids, times, _sparse(ids, sums, weight))


def _sparse(ids: torch.Tensor, values: torch.Tensor, weight: TableWeight) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        ids[None], values, weight.shape, device="cpu", is_coalesced=True, check_invariants=False
    )


def _merged(
    former: tuple[torch.Tensor, torch.Tensor], new: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    ids, inverse = torch.unique(torch.cat([former[0], new[0]]), return_inverse=True)
    times = torch.zeros(len(ids), dtype=torch.int64, device="cpu")
    return ids, times.index_add_(0, inverse, torch.cat([former[1], new[1]]))
