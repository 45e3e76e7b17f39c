"""The tables of one run: where their rows lie, what a checkpoint has of them, and how they are left.

1. A table's pages are in frames: one key of the host tier, which is leased for as long as the run is open.
   What does not fit there is in a log, blocks of which are keys of the last tier.  Hot rows may be on the
   device beside that: `tierstore.training.tables.device_caches`.
2. A checkpoint has every row and its state as the last step left them.  Blocks that it counts on stay until
   the next one is durable.
3. A table that is left is memory of the process again, or says where its rows lie.
4. While the run is suspended nobody looks rows up or writes them.  Where host memory is emptied as well,
   frames are given up, and whoever saves rows reads them from the log, by way of a little memory of the
   process.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType

import numpy as np
import torch

from tierstore.errors import ConfigError
from tierstore.leases import Lease
from tierstore.modes import Unseen
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.table_optimizer import TableOptimizer
from tierstore.planning import TableFrames
from tierstore.planning.rules import HOST
from tierstore.quoting import listed, named
from tierstore.store import Store
from tierstore.tables import (
    PAGE_BYTES,
    ROWS,
    LogPlace,
    OwnRows,
    RowStats,
    RowStore,
    RowUse,
    Snapshot,
    StoreBlocks,
    TableHome,
    with_seed,
)
from tierstore.training.bundles.ending import RunEnding
from tierstore.training.bundles.working_sets import WorkingSet
from tierstore.training.tables.cache_wishes import CacheWishes, require_cache_room
from tierstore.training.tables.device_caches import DeviceCaches, SideLink
from tierstore.training.tables.division import TableDivision
from tierstore.training.tables.found_tables import Tables
from tierstore.training.tables.kept_tables import (
    PREFIX,
    FormerTable,
    TableLook,
    log_prefix,
    map_key,
)
from tierstore.training.tables.shares import shares
from tierstore.training.tables.steppers import refuse_strangers
from tierstore.units import align_up

_SETTING = "offload_cpu_size"


@dataclass(frozen=True)
class TablesToKeep:
    """Tables as a checkpoint is about to have them.

    Attributes:
        keys: that have to be durable.
        snapshots: of each table.
    """

    keys: Sequence[str]
    snapshots: Mapping[TableWeight, Snapshot]


class RunTables:
    """The tables of one run.

    Args:
        store: of the run.
        tables: of the model.
        wishes: what of them is kept on the device.
        division: which of their rows are here.

    Attributes:
        whole_bytes: what all rows of each table that are here come to with their state, by its name.
        division: see there.
    """

    def __init__(
        self,
        store: Store,
        tables: Tables,
        wishes: CacheWishes,
        division: TableDivision,
    ) -> None:
        self._store = store
        self._tables = tables
        self.whole_bytes: Mapping[str, int] = {}
        self.division = division
        self._wishes = wishes
        self._caches = DeviceCaches(store, {})
        self._shares: Mapping[str, int] = {}
        self._released_before: dict[TableWeight, str] = {}  # this run, with what they say
        self._returned: set[TableWeight] = set()  # whole, and none of this run's any more
        self._leases: dict[TableWeight, Lease | None] = {}  # None: host memory is emptied
        self._media: dict[str, StoreBlocks] = {}
        self._optimizers: Sequence[torch.optim.Optimizer] = ()

    def __contains__(self, tensor: object) -> bool:
        """Whether a tensor is one of them."""
        return isinstance(tensor, TableWeight) and tensor in self._tables

    # --- the beginning --------------------------------------------------------------------------

    def divide(
        self,
        optimizers: Sequence[torch.optim.Optimizer],
        sets: Sequence[WorkingSet],
        given: Mapping[str, TableFrames],
        on_device: Sequence[WorkingSet] = (),
        former: Mapping[str, TableLook] = MappingProxyType({}),
    ) -> Mapping[str, TableFrames]:
        """Decide how much of the host tier is theirs, and which rows are here.

        See that the device has room for their caches, too.

        Args:
            optimizers: of the run.  Whoever steps a table keeps state beside its rows, one of them or not.
            sets: what else is offloaded.
            given: what the program says of some tables.
            on_device: what of that is used on the device.
            former: what a checkpoint has of tables, by name.

        Raises:
            CapacityError: there is not enough.
            ConfigError: something is said of a table that is not there.
            UsageError: there will be checkpoints, and another optimizer keeps state of a table; or the
                checkpoint has a part of one, and here all rows would be.
        """
        self._require_tables(given)
        self.division.check_former(former)
        if not self._tables:
            return {}
        self._optimizers = optimizers
        if self._store.is_durable:
            refuse_strangers(self._tables, optimizers)
        capacity_bytes = self._store.stats().tiers[HOST].capacity_bytes
        states = {weight: _states_of(weight, optimizers) for weight in self._tables}
        self.whole_bytes = {
            name: self._divided_bytes(weight, states[weight], former.get(name))
            for weight, name in self._tables.items()
        }
        frames = {name: each.frames for name, each in given.items()}
        self._shares = shares(self.whole_bytes, sets, capacity_bytes, _SETTING, frames)
        wishes = {
            weight: (wish, wish.nbytes(weight, states[weight])) for weight, wish in self._wishes.items()
        }
        require_cache_room(dict(wishes.values()), on_device, self._fastest_bytes)
        self._caches = DeviceCaches(self._store, wishes)
        return {name: TableFrames(nbytes) for name, nbytes in self._shares.items()}

    def _require_tables(self, given: Mapping[str, TableFrames]) -> None:
        names = list(self._tables.values())
        for name in given:
            if name not in names:
                raise ConfigError(
                    f"placement: tables[{named(name)}]: the model has no such table; it has "
                    f"{listed(names, show=named)}"
                )

    def _divided_bytes(self, weight: TableWeight, states: int, former: TableLook | None) -> int:
        """Decide which rows of a table are here; return what they come to with their state."""
        layout = weight.row_store.layout_with(states)
        return self.division.divide(weight, layout, former) * layout.page_bytes

    @property
    def fit(self) -> bool:
        """Whether all rows of all tables have room in host memory at once."""
        return all(self._shares[name] >= nbytes for name, nbytes in self.whole_bytes.items())

    @property
    def _fastest_bytes(self) -> int:
        return self._store.stats().tiers[self._store.tier_names[0]].capacity_bytes

    def bytes_in(self, tier: str) -> int:
        """Return what frames, or caches, take of a tier."""
        if tier == HOST:
            return sum(self._shares.values())
        return self._caches.nbytes if tier == self._store.tier_names[0] else 0

    def cache_sets(self) -> list[WorkingSet]:
        """Return what stays on the device of each table."""
        return self._caches.sets()

    def travel_over(self, link: SideLink) -> None:
        """Say how rows come to the device and back."""
        self._caches.travel_over(link)

    def take_in(self, use: RowUse, former: Mapping[str, FormerTable] = MappingProxyType({})) -> None:
        """Let rows lie in the store, of those tables that have none there yet.  Blocks.

        Those of a table that was released and that no checkpoint has are about to be loaded.

        Args:
            use: whether they may be used.
            former: what a checkpoint has of tables, by name: their rows are those.

        Raises:
            CapacityError: there is no room.
            BackendError: a medium failed.
        """
        if not former:
            for optimizer in self._optimizers:
                if isinstance(optimizer, TableOptimizer):
                    optimizer.begin_tables()
        for weight, name in self._tables.items():
            if weight not in self._leases and weight not in self._returned:
                self._take_in(weight, name, use, former.get(name))
        self.go_to_device()

    def _take_in(self, weight: TableWeight, name: str, use: RowUse, former: FormerTable | None) -> None:
        memory, self._leases[weight] = self._lease_frames(name)
        home = TableHome(memory, self._log_place(name), setting=_SETTING, name=name, use=use)
        begun_for = weight.begun_for
        if former is not None:
            own_rows = self.division.own_rows(weight)
            rows, begun_for = _restored(former, weight.row_store, home, own_rows), None
        else:
            rows = self._rows_at_first(weight)
            rows.attach(home)
        self.division.take(weight, rows)
        weight.begun_for = begun_for  # its columns came along

    def _rows_at_first(self, weight: TableWeight) -> RowStore:
        """Return those rows of a table which will lie here, and which no checkpoint has."""
        if (why := weight.row_store.why_ended) is not None:
            self._released_before[weight] = why
        return self.division.rows_at_first(weight)

    # --- the device -----------------------------------------------------------------------------

    def go_to_device(self) -> None:
        """Let tables whose rows lie in the store keep hot ones on the device.  Blocks.

        Raises:
            CapacityError: there is no room; those before the one that finds none have theirs.
            BackendError: a medium failed; likewise.
        """
        for weight, name in self.attached().items():
            self._caches.attach(weight, name)

    def leave_device(self) -> None:
        """Let all rows be in host memory and below.  Blocks.

        Raises:
            TierStoreError: some could not be carried back: those tables keep their rows on the device.
        """
        for weight in self._tables:
            self._caches.detach(weight)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no other thread have rows in hand.

        Whoever is about to take the bindings' lock and then to look at rows does this before: a thread that
        has rows in hand may wait for that lock, for room.
        """
        with contextlib.ExitStack() as locks:
            for weight in self._tables:
                locks.enter_context(weight.row_store.lock)
            yield

    def _lease_frames(self, name: str) -> tuple[torch.Tensor, Lease]:
        key = _frames_key(name)
        # Unlike PyTorch's, NumPy's zeros that nobody has written take no memory of their own.
        with Unseen():
            zeros = torch.from_numpy(np.zeros(self._shares[name], dtype=np.uint8))
            self._store.put(key, zeros, tier=HOST, replace=True)
        lease = self._store.lease(key, tier=HOST, write=True)
        return lease.tensor, lease

    def _log_place(self, name: str) -> LogPlace | None:
        last = self._store.tier_names[-1]
        if last == HOST:
            return None
        medium = self._media[name] = StoreBlocks(self._store)
        return LogPlace(medium, log_prefix(name))

    # --- checkpoints ----------------------------------------------------------------------------

    def described(self) -> dict[str, dict[str, object]]:
        """Return what each table is, as JSON."""
        return {name: asdict(TableLook.of(weight.row_store)) for weight, name in self._tables.items()}

    def kept(self) -> dict[str, str]:
        """Return the key of each table in a checkpoint, by the table's name."""
        return {name: map_key(name) for name in self._tables.values()}

    def begin_checkpoint(self, optimizers: Sequence[torch.optim.Optimizer]) -> TablesToKeep:
        """Bring everything that was changed to the last tier.  Blocks.

        Args:
            optimizers: whose state the checkpoint has.

        Raises:
            UsageError: another one keeps state of a table.
            CapacityError: there is no room.
            BackendError: a medium failed.
        """
        refuse_strangers(self._tables, optimizers)
        keys: list[str] = []
        snapshots: dict[TableWeight, Snapshot] = {}
        for weight, name in self._tables.items():
            store = weight.row_store
            with store.lock:
                store.write_back()
                snapshot = snapshots[weight] = store.snapshot()
            self._store.put(
                map_key(name), snapshot.as_tensor(), tier=self._store.tier_names[-1], replace=True
            )
            keys += [map_key(name), *snapshot.blocks]
        return TablesToKeep(keys, snapshots)

    def end_checkpoint(self, kept: TablesToKeep) -> None:
        """Note that a checkpoint is durable."""
        for weight, snapshot in kept.snapshots.items():
            weight.row_store.keep(snapshot)

    def saving(self) -> contextlib.AbstractContextManager[bool]:
        """See `TableDivision.saving`."""
        return self.division.saving()

    # --- while the run is suspended -------------------------------------------------------------

    def keep_gradients(self) -> None:
        """Let gradients be memory of their own: values in them may be lent by the store."""
        for weight in self._leases:
            if weight.grad is not None and not self.division.has_own_gradient(weight):
                weight.grad = weight.grad.clone()

    def unwritten_bytes(self) -> int:
        """Return what the last tier gets when frames are given up."""
        stats = [weight.row_store.stats() for weight, lease in self._leases.items() if lease is not None]
        return sum(each.dirty_pages * align_up(each.page_bytes, PAGE_BYTES) for each in stats)

    def leased_bytes(self) -> int:
        """Return what frames take of host memory now."""
        held = [weight for weight, lease in self._leases.items() if lease is not None]
        return sum(self._store.spec(_frames_key(self._tables[weight])).nbytes for weight in held)

    def give_up_frames(self) -> None:
        """Let nothing of a table be in host memory.  Blocks.  See rule 4.  Idempotent.

        Raises:
            CapacityError: the last tier has no room for what was not there yet.
            BackendError: a medium failed.  In either case nothing is lost, and `take_frames` takes back what
                was given up.
        """
        for weight, lease in self._leases.items():
            if lease is not None:
                weight.row_store.move(None)
                self._let_frames_go(weight, lease)

    def _let_frames_go(self, weight: TableWeight, lease: Lease) -> None:
        self._leases[weight] = None
        lease.release(written=False)
        self._store.drop(_frames_key(self._tables[weight]))

    def take_frames(self) -> None:
        """Give tables the frames again that they have given up; no page is in them yet.  Blocks.  Idempotent.

        Raises:
            CapacityError: there is no room.
            BackendError: a medium failed.  In either case the table goes on as it is.
        """
        for weight, name in self._tables.items():
            if weight in self._leases and self._leases[weight] is None:
                memory, lease = self._lease_frames(name)
                try:
                    weight.row_store.move(memory)
                except BaseException:
                    self._let_frames_go(weight, lease)
                    raise
                self._leases[weight] = lease

    # --- the end --------------------------------------------------------------------------------

    def attached(self) -> dict[TableWeight, str]:
        """Return the tables whose rows lie in the store."""
        return {weight: self._tables[weight] for weight in self._leases}

    def coming_back(self) -> dict[TableWeight, str]:
        """Return those that are memory of the process again when everything is brought back."""
        return self.attached() if self.division.are_all_here else {}

    def bring_back(self, weight: TableWeight, why: str) -> None:
        """Bring a table back to memory of the process, or release it where that cannot be."""
        if weight in self.coming_back():
            self.restore(weight)
        else:
            self.release(weight, why)

    def needed_bytes(self, weight: TableWeight) -> int:
        """Return what it takes at most to have every row of a table that was touched in memory."""
        stats = weight.row_store.stats()
        return (stats.log_pages + stats.pages) * stats.page_bytes

    def bring_shared_back(self, fits: Callable[[int], bool]) -> str:
        """Let tables of which others have a part have all rows, here and there, if all have room.  Blocks.

        All of them call it.

        Args:
            fits: whether there is room for so many bytes.

        Returns:
            why they are where they were, as a clause; "": they are whole, or there are none.

        Raises:
            UsageError: others do something else; all raise the same.
            TierStoreError, MemoryError: the rows of one could not be brought; all raise.  It stays where it
                is, and those before are whole.
        """

        def came_back(weight: TableWeight) -> None:
            self._returned.add(weight)
            self._let_go(weight)

        needed = {weight: self.needed_bytes(weight) for weight in self._leases}
        return self.division.bring_shared_back(needed, fits, came_back)

    def restore(self, weight: TableWeight) -> None:
        """Bring a table back to memory of the process.  Blocks.  If that fails it stays as it is.

        Raises:
            MemoryError: there is too little.
            BackendError: a medium failed.
        """
        self._caches.detach(weight)
        self.division.bring_home(weight)
        self._let_go(weight)

    def undo(self, weight: TableWeight) -> None:
        """Let a table be what it was before the run, which could not be opened; raises as `restore`."""
        if weight in self._released_before:
            self.release(weight, self._released_before[weight])
        else:
            self.restore(weight)

    def release(self, weight: TableWeight, why: str) -> None:
        """Let a table say where its rows are.

        Args:
            weight: its parameter.
            why: they cannot be read any more.
        """
        weight.release(why)
        self.division.forget(weight)
        self._let_go(weight)

    def _let_go(self, weight: TableWeight) -> None:
        self._caches.forget(weight)
        name = self._tables[weight]
        if name in self._media:
            self._media.pop(name).close()
        lease = self._leases[weight]
        if lease is not None:
            self._let_frames_go(weight, lease)
        del self._leases[weight]

    def end(self, ending: RunEnding) -> None:
        """Let go of what is in the store still."""
        for weight, name in self.attached().items():
            why = f"the run that had the rows of the table {name!r} was closed"
            ending.attempt(functools.partial(self.release, weight, why))

    # --- looks ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, RowStats]:
        """Return where the rows of each table were, by its name."""
        return {name: weight.row_store.stats() for weight, name in self._tables.items()}


def _frames_key(name: str) -> str:
    return f"{PREFIX}{name}/frames"


def _states_of(weight: TableWeight, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Return how many states are, or will be, beside each row of a table."""
    store = weight.row_store
    columns = dict.fromkeys(column.name for column in store.columns)
    stepped_by = None if weight.stepped_by is None else weight.stepped_by()
    for optimizer in (*optimizers, stepped_by):
        if isinstance(optimizer, TableOptimizer):
            for group in optimizer.param_groups:
                if any(each is weight for each in group["params"]):
                    columns |= dict.fromkeys(optimizer.initial_state(group))
    return len(columns.keys() - {ROWS})


def _restored(former: FormerTable, made: RowStore, home: TableHome, own_rows: OwnRows | None) -> RowStore:
    """Return a table as a checkpoint has it, in the place of one that was made anew."""
    begins = with_seed(made.initial_rows, former.seed)
    like = made.width, made.dtype, begins
    return RowStore.restored(former.snapshot, *like, home, name=made.name, own_rows=own_rows)
