"""The parameter of a table: of its true shape, and without its bytes.

1. What only looks at a parameter (shape, type, gradient, hooks) is answered as of any other.
2. What would read or write its elements is refused by name: `nn.init`, ``.data``, ``add_``, ``zeros_like``,
   and with them optimizers that know nothing of tables.
3. ``detach`` gives the entry of a state dict, which is made when it is read, and ``copy_`` writes all rows:
   so ``state_dict`` and ``load_state_dict`` are PyTorch's.
4. Its rows lie in a `RowStore`, which may be another one later: whoever keeps rows elsewhere gives it that.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Self, cast

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel

from tierstore.errors import UsageError
from tierstore.modes import Unseen
from tierstore.nn.calling import caller_of
from tierstore.nn.local_rows import LocalRows
from tierstore.nn.looks import CONVERSIONS, LIKE, is_look, is_of_gradient, name_of
from tierstore.nn.repeats import KnownRepeats
from tierstore.nn.row_access import RowAccess
from tierstore.nn.row_blocks import blocks_of, described, write_all, write_part
from tierstore.nn.table_entry import TableEntry
from tierstore.tables import ROWS, DeviceHome, RowStore
from tierstore.torch_private import tree_map_only

_DIFFERENTIATING: Final = (torch.Tensor.backward, torch.autograd.backward, torch.autograd.grad)
_SAME_BITS: Final = frozenset({"Adagrad", "SGD", "SparseAdam"})


class TableWeight(nn.Parameter):
    """A parameter ``[num_rows, width]`` whose rows are looked up and stepped by their ids.

    Attributes:
        stepped_by: the optimizer that steps it, as long as there is one.
        states_begun: how often the columns of states were begun anew.
        begun_for: the optimizer that has columns of states in the table which nobody has written yet.
        known_repeats: those of the last backward pass: of its gradient, if no other is added.
    """

    stepped_by: weakref.ref[torch.optim.Optimizer] | None
    states_begun: int
    begun_for: weakref.ref[torch.optim.Optimizer] | None
    known_repeats: KnownRepeats | None

    def __new__(cls, row_store: RowStore, requires_grad: bool = True) -> Self:
        """Make the parameter of a store's rows."""
        _watch_optimizers()
        element = _element(row_store.dtype, torch.device("cpu"))
        weight = super().__new__(cls, element.expand(row_store.num_rows, row_store.width), requires_grad)
        weight.row_store = row_store
        weight.stepped_by = None
        weight.states_begun = 0
        weight.known_repeats = None
        return weight

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Let looks through, and refuse the rest."""
        del types
        kwargs = kwargs or {}
        if func is torch.Tensor.detach:
            _refuse_replicas(args[0])
            return TableEntry.of(args[0])
        if func is torch.Tensor.copy_ and isinstance(args[0], TableWeight):
            return _copied(*args, **kwargs)
        if func in _DIFFERENTIATING:
            args, kwargs = tree_map_only(TableWeight, _edge_of, (args, kwargs))
            return func(*args, **kwargs)
        if _is_node_of(func, args):
            return TableNode.of(args[0])
        if _is_the_same(func, args, kwargs):
            return args[0] if func is not torch.Tensor.type or args[1:] or kwargs else _type_of(args[0])
        if not is_look(func) and not _is_like(func, args, kwargs):
            raise UsageError(_refusal(func, [*args, *kwargs.values()]))
        if is_of_gradient(func):
            access = args[0].access
            access.show_gradient() if func.__name__ == "__get__" else access.forget_gradient()
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ANN401
        """Say what it is: its rows are not printed."""
        del tensor_contents
        return f"TableWeight({self.description}, {self.dtype}, requires_grad={self.requires_grad})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TableWeight:
        """Copy the rows that were written, without the gradient, as any parameter is copied.

        Raises:
            UsageError: PyTorch is about to average copies.
        """
        if caller_of(AveragedModel) is not None:
            raise UsageError(
                f"AveragedModel would read and write all rows of the {self.description} at each update: "
                "average what is beside the table, as in AveragedModel(model.net)."
            )
        return TableWeight(copy.deepcopy(self.row_store, memo), self.requires_grad)

    def __reduce_ex__(self, protocol: object) -> Any:  # noqa: ANN401 - as PyTorch's
        """Be pickled as the rows that were written, without the gradient, as any parameter is."""
        del protocol
        return TableWeight, (self.row_store, self.requires_grad)

    @property
    def access(self) -> RowAccess:
        """How its rows are come to.  May be set to another access to the same rows."""
        return self._access

    @access.setter
    def access(self, access: RowAccess) -> None:
        self._access = access
        self.begun_for = None
        self._owed: list[tuple[torch.Tensor, dict[str, torch.Tensor]]] = []

    @property
    def row_store(self) -> RowStore:
        """Those of its rows that are here.  May be set to another store of the same rows, with all of them.

        Raises:
            CapacityError, BackendError: cells that are owed (see `owe`) cannot be written.
        """
        self._settle()
        return self._store

    @row_store.setter
    def row_store(self, row_store: RowStore) -> None:
        self.access = LocalRows(row_store)

    @property
    def _store(self) -> RowStore:
        """The same, whatever is owed."""
        return self._access.store

    def rows_for(self, what: str) -> RowAccess:
        """Return how its rows are come to, for whoever is about to use them.

        Args:
            what: is done with the table, such as ``"is stepped"``.

        Raises:
            UsageError: the run that has them is suspended.
            CapacityError, BackendError: as of `row_store`.
        """
        self._store.require(f"the table {self.table_name!r} {what}")
        self._settle()
        return self._access

    @property
    def is_released(self) -> bool:
        """Whether its rows are of a run that was left, and cannot be asked for."""
        return self._store.why_ended is not None

    @contextlib.contextmanager
    def loading(self) -> Iterator[RowStore]:
        """Yield where all rows are about to be written.

        They are where they were, or, if they were released, in a table of their own, which nobody sees before
        all of them are there.

        Raises:
            UsageError: as of `rows_for`.
        """
        store = self.rows_for("is loaded").store
        if store.why_ended is None:
            yield store
            return
        store = store.anew()
        yield store
        self.row_store = store

    def release(self, why: str) -> None:
        """Let the rows not be asked for any more; see `RowStore.end`.  What is owed is of no use then."""
        self._owed.clear()
        self._store.end(why)
        self._access = LocalRows(self._store)  # nobody else has a part of nothing

    def _settle(self) -> None:
        """Write what is owed."""
        if self._owed:
            with self._store.lock, Unseen():
                self._write_owed()

    def _write_owed(self) -> None:
        while self._owed:
            ids, cells = self._owed[-1]
            for visit in self._store.visit(ids):
                for name, cell in cells.items():
                    visit.scatter(name, cell[visit.part])
            self._owed.pop()

    @property
    def table_name(self) -> str:
        """What the table is called; never waits for a medium, as `description`."""
        return self._store.name

    @property
    def description(self) -> str:
        """What messages call it; never waits for a medium."""
        return described(self._store)

    def owe(self, ids: torch.Tensor, cells: dict[str, torch.Tensor]) -> None:
        """Let cells be written before anybody sees the rows again: a step of them has failed half way.

        Args:
            ids: int64 in host memory, ascending, distinct, in range.
            cells: of each column, ``[len(ids), width]``.
        """
        self._owed.append((ids, cells))

    def attach_device(self, home: DeviceHome) -> None:
        """Let hot rows, lookups and their gradient be on a device: see `RowStore.attach_device`.

        Raises:
            UsageError: a gradient is set, which is in host memory; or as there.
            CapacityError, BackendError: cells that are owed cannot be written.
        """
        if self.grad is not None:
            raise UsageError(
                f"the {self.description} has a gradient on {self.grad.device} and cannot be computed with on "
                f"{home.cells.device}: step it, or set it to None"
            )
        self.row_store.attach_device(home)
        self._have_element(self._store.num_rows)

    def detach_device(self) -> None:
        """Let rows, lookups and the gradient be in host memory: see `RowStore.detach_device`.

        A gradient that is set comes along.

        Raises:
            CapacityError, BackendError: rows, or cells that are owed, cannot be written.
        """
        self.row_store.detach_device()
        gradient, self.grad = self.grad, None
        self._have_element(self._store.num_rows)
        self.grad = None if gradient is None else _in_host_memory(gradient)

    def grow(self, num_rows: int) -> None:
        """Have more rows, as the same object.  The caller has let the store grow."""
        self._have_element(num_rows)

    def _have_element(self, num_rows: int) -> None:
        """Be of so many rows, and where the store computes with them."""
        dtype, device = self._store.dtype, self._store.device or torch.device("cpu")
        other = torch.float64 if dtype is torch.float32 else torch.float32
        with torch.DisableTorchFunctionSubclass():
            # What accumulates its gradient knows its shape; another dtype makes PyTorch forget that.
            for each in (other, dtype):
                self.data = _element(each, device).expand(num_rows, self._store.width)


def _element(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return the one element of memory that there is: nobody sees it, or notices that it is no row."""
    return torch.full((1,), math.nan, dtype=dtype, device=device)


class TableNode(torch.Tensor):
    """What PyTorch makes of a parameter to find its node in graphs: a view without elements."""

    @classmethod
    def of(cls, weight: TableWeight) -> TableNode:
        """Return a view of a table's parameter."""
        with torch.DisableTorchFunctionSubclass():
            view = weight.view_as(weight)
        view.__class__ = cls  # a view of the view would have another node
        return cast("TableNode", view)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Let looks through, and refuse the rest."""
        del types
        if not is_look(func):
            raise UsageError(_refusal(func, []))
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})


def _edge_of(weight: TableWeight) -> object:
    """Return what autograd takes in the place of a parameter, which it would look at element by element."""
    return torch.autograd.graph.get_gradient_edge(weight) if weight.requires_grad else TableEntry.of(weight)


def _is_node_of(func: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether somebody asks for a parameter's node: with a view of it as it is."""
    is_view = name_of(func) in ("view_as", "expand_as")
    return is_view and len(args) == 2 and args[0] is args[1] and torch.is_grad_enabled()


def _is_the_same(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether somebody asks for what a parameter is anyway."""
    if name_of(func) not in CONVERSIONS or not args or not isinstance(args[0], TableWeight):
        return False
    if next(_weights_in([*args[1:], *kwargs.values()]), None) is not None:
        return False
    probe = torch.empty(0, dtype=args[0].dtype, device=args[0].device)
    found = func(probe, *args[1:], **kwargs)
    return found is probe or isinstance(found, str)


def _type_of(weight: TableWeight) -> object:
    return torch.empty(0, dtype=weight.dtype, device=weight.device).type()


def _is_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether somebody asks for another tensor of a parameter's type, on its device."""
    if not args:
        return False
    if isinstance(args[0], TableWeight):
        return name_of(func) in LIKE and next(_weights_in([*args[1:], *kwargs.values()]), None) is None
    return name_of(func) in ("to", "type_as")


def _in_host_memory(gradient: torch.Tensor) -> torch.Tensor:
    if not gradient.is_sparse:
        return gradient.cpu()
    return torch.sparse_coo_tensor(
        gradient._indices().cpu(), gradient._values().cpu(), gradient.shape,  # noqa: SLF001 - repeats stay
        device="cpu", is_coalesced=gradient.is_coalesced(), check_invariants=False,
    )  # fmt: skip


def _refusal(func: Callable[..., Any], arguments: list[Any]) -> str:
    found = next(_weights_in(arguments), None)
    what = "a table" if found is None else found.description
    optimizer = caller_of(torch.optim.Optimizer)
    if optimizer is not None:
        return _refused_optimizer(type(optimizer), what)
    return (
        f"{name_of(func)}: {what} is not one tensor in memory. Read rows with table.rows(ids), write them "
        "with table.set_rows(ids, values), and set init= where the table is made."
    )


def _refused_optimizer(kind: type[torch.optim.Optimizer], what: str) -> str:
    ours = "one of tierstore.optim: LazyAdam, FTRL, SparseAdam, Adagrad, SGD"
    if kind.__name__ in _SAME_BITS:
        ours = f"tierstore.optim.{kind.__name__}, the same bits"
    return f"{kind.__module__}.{kind.__name__} cannot step the {what}: use {ours}."


def _weights_in(arguments: Iterable[Any]) -> Iterator[TableWeight]:
    for each in arguments:
        if isinstance(each, TableWeight):
            yield each
        elif isinstance(each, list | tuple):
            yield from _weights_in(each)


def _refuse_replicas(weight: TableWeight) -> None:
    """Raise where PyTorch is about to send all elements to other processes, by their address."""
    if caller_of(nn.parallel.DistributedDataParallel) is not None:
        raise UsageError(
            f"DistributedDataParallel would send and keep all rows of the {weight.description}: let "
            "it ignore the parameter, or offload the model first."
        )


def _refuse_optimizers_of_others(
    optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise before an optimizer that knows nothing of tables has stepped any of its parameters."""
    del args, kwargs
    if getattr(optimizer, "steps_tables", False):
        return
    for group in optimizer.param_groups:
        for each in group["params"]:
            if isinstance(each, TableWeight) and each.grad is not None:
                raise UsageError(_refused_optimizer(type(optimizer), each.description))


@functools.cache
def _watch_optimizers() -> None:
    """Let every optimizer be asked before its steps, from the first table on."""
    register_optimizer_step_pre_hook(_refuse_optimizers_of_others)


def _copied(weight: TableWeight, values: torch.Tensor, non_blocking: bool = False) -> TableWeight:
    del non_blocking
    if values.shape != weight.shape:
        raise UsageError(f"copy_: values of shape {list(values.shape)} for the {weight.description}")
    weight.rows_for("is loaded").begin_copy()
    with weight.loading() as store:
        if not isinstance(values, TableEntry):
            write_all(store, ROWS, values)
        elif values.weight.row_store is not store or values.column != ROWS:
            for part, rows in blocks_of(values.weight.row_store, values.column):
                write_part(store, ROWS, part, rows)
    return weight
