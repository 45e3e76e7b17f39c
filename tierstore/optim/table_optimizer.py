"""What optimizers of tables have in common: whose table it is, and its state beside its rows.

1. One optimizer steps a table: its state lies in columns of the table, of which there is one of a name.
2. In ``optimizer.state`` a state of a table is a `TableEntry`: dense for whoever reads it.  A dense tensor
   that is found there, since one was loaded, is written to the column.
3. A table that another optimizer has stepped before begins with new state.  Entries of the former one raise
   where they are read, or put back.
4. A step that fails leaves each parameter stepped or as it was, and the next one goes on from there.
"""

from __future__ import annotations

import abc
import copy
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch

from tierstore.errors import StoreClosed, UsageError
from tierstore.modes import Unseen
from tierstore.nn.row_blocks import blocks_of, write_all, write_part
from tierstore.nn.table_entry import TableEntry
from tierstore.nn.table_weight import TableWeight
from tierstore.optim.failed_step import FailedStep
from tierstore.optim.targets import target_of
from tierstore.tables import ROWS, Column, RowStore, Visit

Options = dict[str, Any]
Cells = dict[str, torch.Tensor]


class TableOptimizer(torch.optim.Optimizer, metaclass=abc.ABCMeta):
    """An optimizer that knows tables.

    Attributes:
        steps_tables: read where optimizers that do not are refused.
    """

    steps_tables: ClassVar[bool] = True
    _failed_step: FailedStep | None = None

    @property
    def failed_step(self) -> FailedStep:
        """What the last step has changed, if it has failed in its midst."""
        known = self._failed_step
        if known is None or not known.is_of(self):
            known = self._failed_step = FailedStep(self)
        return known

    def add_param_group(self, param_group: Options) -> None:
        """See PyTorch.

        Raises:
            ConfigError: ``target`` is unknown, or an option is not for tables.
            TypeError: ``target`` is no text.
            UsageError: a table of the group is stepped by another optimizer, or is in another group.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            if "target" in group:
                group["target"] = target_of(group["target"])
            self.check(group)
            for weight in tables_of(group):
                self._check_owner(weight)
        except (ValueError, TypeError, UsageError):
            del self.param_groups[-1]
            raise
        for weight in tables_of(group):
            weight.stepped_by = weakref.ref(self)

    def check(self, group: Options) -> None:
        """Raise ``ValueError`` if an option of a group is out of its range, or not for its parameters."""

    def load_state_dict(self, state_dict: Options) -> None:
        """See PyTorch.  State of tables is written to them a block at a time.

        Raises:
            UsageError: it has state of a table that has begun anew since; nothing has changed.
        """
        _refuse_former(state_dict.get("state", {}))
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            for weight in tables_of(group):
                if self.state.get(weight):
                    self.state_of_table(weight, group)
        for parameter, state in self.state.items():
            if not isinstance(parameter, TableWeight) and isinstance(state, dict):
                dense = {
                    name: value.dense() for name, value in state.items() if isinstance(value, TableEntry)
                }
                state.update(dense)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See PyTorch."""
        for group in self.param_groups:
            for weight in tables_of(group):
                weight.access.forget_gradient()  # which a pass that failed may have put aside
        super().zero_grad(set_to_none)

    def take_target(self, target: str | None) -> None:
        """Let groups that do not say where they are stepped say this.

        Raises:
            ConfigError: it is unknown.
            TypeError: it is no text.
        """
        if target is not None:
            self.defaults["target"] = target_of(target)
            for group in self.param_groups:
                group.setdefault("target", self.defaults["target"])

    @property
    def target(self) -> str | None:
        """Where it steps, if its groups say the same; setting it sets all groups.

        Raises:
            ConfigError: it is set to an unknown one.
            TypeError: it is set to no text.
        """
        targets = {group.get("target") for group in self.param_groups}
        return targets.pop() if len(targets) == 1 else None

    @target.setter
    def target(self, value: object) -> None:
        target = target_of(value)
        for group in self.param_groups:
            group["target"] = target

    @abc.abstractmethod
    def initial_state(self, group: Options) -> dict[str, float]:
        """Return what is kept of each element of a parameter, by names, and what it begins with."""

    def first_step(self) -> object:
        """Return what ``step`` of a parameter begins with."""
        return torch.tensor(0.0, device="cpu")

    def require_state(self) -> None:
        """Raise before a step has changed anything, if state of a table was put back that is gone.

        Raises:
            UsageError: there is such.
        """
        for group in self.param_groups:
            for weight in tables_of(group):
                if weight.grad is not None and weight in self.state:
                    _refuse_former({weight: self.state[weight]})

    def state_of_table(self, weight: TableWeight, group: Options) -> Options:
        """Return what is kept of a table.

        Its columns are there then: new ones if this optimizer has not stepped it, and what was loaded in them
        if somebody has loaded it.
        """
        self._check_owner(weight)
        weight.stepped_by = weakref.ref(self)
        state: Options = self.state[weight]
        store, initial = weight.row_store, self.initial_state(group)
        if not state:
            self._begin_columns(weight, initial)
            weight.begun_for = None  # from the first step on they are not new
            state["step"] = self.first_step()
            state |= {name: TableEntry.of(weight, name) for name in initial}
        loaded = [name for name in initial if not _is_of(state[name], weight, name)]
        if {*initial} - {*loaded} - {column.name for column in store.columns}:
            raise StoreClosed(
                f"what {type(self).__name__} keeps of the {weight.description} was released when its run was "
                "closed, and rows were loaded since. Load its state dict, too, or make it anew.",
            )
        if loaded:
            _refuse_former({weight: state})
            kept = [name for name in initial if name not in loaded]
            _write_columns(store, {Column(name, initial[name]): state[name] for name in loaded})
            weight.states_begun += 1
            state |= {name: TableEntry.of(weight, name) for name in (*loaded, *kept)}
            state["step"] = copy.deepcopy(state["step"])  # cells were copied, so it is another's no more
        return state

    def begin_tables(self) -> None:
        """Let tables that this optimizer has not stepped have the columns of its first step already.

        A table that is large by then would be copied, page by page.  One that was released has no rows yet.
        """
        for group in self.param_groups:
            for weight in tables_of(group):
                if not self.state.get(weight) and not weight.is_released:
                    self._begin_columns(weight, self.initial_state(group))

    def _begin_columns(self, weight: TableWeight, initial: Mapping[str, float]) -> None:
        store = weight.row_store
        columns = tuple(Column(name, start) for name, start in initial.items())
        is_mine = weight.begun_for is not None and weight.begun_for() is self
        if not is_mine or store.columns[1:] != columns:
            store.drop_columns([column.name for column in store.columns if column.name != ROWS])
            store.ensure_columns(columns)
            weight.states_begun += 1
            weight.begun_for = weakref.ref(self)

    def _check_owner(self, weight: TableWeight) -> None:
        if self._is_of_another(weight):
            gc.collect()  # one that is in a circle of references stays until then
            if self._is_of_another(weight):
                raise UsageError(
                    f"{type(self).__name__} cannot step the {weight.description}: another optimizer "
                    "does, whose state lies beside its rows. Let go of that one first. A run that was given "
                    "it has it as long as anybody has the run, closed or not: close it, and let go of it "
                    "(run = None)."
                )

    def _is_of_another(self, weight: TableWeight) -> bool:
        other = None if weight.stepped_by is None else weight.stepped_by()
        return other is not None and other is not self


def rate_of(group: Options, device: torch.device | None = None) -> float | torch.Tensor:
    """Return the learning rate of a group as PyTorch computes with it: a tensor's in the tensor's type.

    Args:
        group: of parameters.
        device: where it is computed with; ``None``: on the host.
    """
    rate: float | torch.Tensor = group["lr"]
    if not isinstance(rate, torch.Tensor):
        return rate
    rate = rate.detach().squeeze()
    return rate if rate.device.type == "cpu" else rate.to(device or "cpu")


def tables_of(group: Options) -> Iterator[TableWeight]:
    """Yield the tables of a parameter group."""
    return (each for each in group["params"] if isinstance(each, TableWeight))


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return the gradient that a parameter has: of a table, of the rows that are here.

    Raises:
        UsageError: others have a part of it, which has not come.
    """
    assert parameter.grad is not None
    gradient = parameter.grad
    return parameter.access.own_gradient(gradient) if isinstance(parameter, TableWeight) else gradient


def check_gradient(weight: TableWeight, gradient: torch.Tensor) -> None:
    """Raise unless the gradient of a table is of whole rows.

    Raises:
        UsageError: somebody has set one of single elements.
    """
    if gradient.is_sparse and gradient.sparse_dim() != 1:
        raise UsageError(
            f"the gradient of the {weight.description} is of single elements; a table takes those of rows, "
            "with one sparse dimension"
        )


def change_rows(
    weight: TableWeight, ids: torch.Tensor | None, names: list[str], change: Callable[[Cells], None]
) -> None:
    """Change cells of rows in place, all of them or, where that fails, none.

    Rows that do not fit into frames at once are gathered part by part, changed together, and written part by
    part: vectorised kernels may round the last elements of a tensor otherwise than the rest.

    Args:
        weight: of the table.
        ids: int64, ascending, distinct, in range, where the table is computed with; ``None``: all.
        names: of columns.
        change: takes ``[len(ids), width]`` of each column, in the same place, and changes them.

    Raises:
        CapacityError, BackendError: pages could not be brought, or others not be put away.
    """
    store = weight.rows_for("is stepped").store
    with store.lock, Unseen():  # what is made on the way is nothing of the program's
        if ids is None:
            ids = torch.arange(store.num_rows, device="cpu")
        elif store.device is not None:
            ids = store.take_numbers_back(ids)
        else:
            ids = ids.clone()  # NumPy looks at ids: no others could be resized
        if store.device is not None:
            _change_on_device(weight, ids, names, change)
        else:
            _change_rows(weight, ids, names, change)


def _change_on_device(
    weight: TableWeight, ids: torch.Tensor, names: list[str], change: Callable[[Cells], None]
) -> None:
    store = weight.row_store
    cells = store.gather(ids, names)
    change(cells)
    store.scatter(ids, cells, weight.owe)


def _change_rows(
    weight: TableWeight, ids: torch.Tensor, names: list[str], change: Callable[[Cells], None]
) -> None:
    store = weight.row_store
    visits = store.visit(ids)
    first = next(visits, None)
    if first is None:
        return
    if first.part == slice(0, len(ids)):
        cells = {name: first.take() if name == ROWS else first.gather(name) for name in names}
        change(cells)
        _scatter(first, cells)
        return
    cells = {name: torch.empty(len(ids), store.width, dtype=store.dtype, device="cpu") for name in names}
    visit: Visit | None = first
    while visit is not None:
        for name, cell in cells.items():
            visit.gather(name, out=cell[visit.part])
        visit = next(visits, None)
    before = {name: cell.clone() for name, cell in cells.items()}
    change(cells)
    reached = 0
    try:
        for visit in store.visit(ids):
            reached = visit.part.stop
            _scatter(visit, _part(cells, visit.part))
    except BaseException:
        if reached:
            weight.owe(ids[:reached], _part(before, slice(0, reached)))
        raise


def _part(cells: Cells, part: slice) -> Cells:
    return {name: cell[part] for name, cell in cells.items()}


def _scatter(visit: Visit, cells: Cells) -> None:
    for name, cell in cells.items():
        visit.scatter(name, cell)


def _is_of(value: object, weight: TableWeight, name: str) -> bool:
    if not isinstance(value, TableEntry) or value.is_former:
        return False
    return value.weight is weight and value.column == name


def _refuse_former(state: Mapping[Any, object]) -> None:
    """Raise if entries are of a state that has begun anew since.

    Raises:
        UsageError: the first.
    """
    for entries in state.values():
        for value in entries.values() if isinstance(entries, Mapping) else ():
            if isinstance(value, TableEntry):
                value.require_current()


def _write_columns(store: RowStore, values: Mapping[Column, torch.Tensor]) -> None:
    """Write states that somebody has put there, whatever was there before."""
    known = set(store.columns)
    store.drop_columns(
        [each.name for each in known - set(values) if each.name in {new.name for new in values}]
    )
    store.ensure_columns(list(values))
    for column, value in values.items():
        if isinstance(value, TableEntry):
            for part, cells in blocks_of(value.weight.row_store, value.column):
                write_part(store, column.name, part, cells)
        else:
            write_all(store, column.name, value)
