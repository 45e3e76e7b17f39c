"""What a state dict holds of a table: all of its rows, or of one of its states, made when it is read.

1. What only looks at an entry (shape, type) is answered without its rows.
2. All else is answered by PyTorch, with a dense copy of the rows as they are then; operators of functions
   that nobody may override, such as ``torch.tensor``, too.
3. Nothing is written by way of an entry, nor of what PyTorch returns as a view of one: see
   `tierstore.nn.copied_rows`.  None becomes a parameter that is trained.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Protocol, Self

import torch

from tierstore.errors import UsageError
from tierstore.nn.calling import caller_of
from tierstore.nn.copied_rows import NeverWritten, answered, refuse_writing
from tierstore.nn.looks import OF_MEMORY, is_look, name_of
from tierstore.nn.row_access import RowAccess
from tierstore.nn.row_blocks import blocks_of, read_all
from tierstore.tables import ROWS, RowStore
from tierstore.torch_private import tree_map_only


class Table(Protocol):
    """What an entry knows of the parameter of its table."""

    @property
    def row_store(self) -> RowStore:
        """Where its rows are."""

    @property
    def access(self) -> RowAccess:
        """How they are come to."""

    @property
    def description(self) -> str:
        """What messages call it."""

    device: torch.device
    states_begun: int


class TableEntry(NeverWritten):
    """What a state dict holds: all rows of a table, or one state of them, made when it is read.

    Whoever uses it finds what the rows are then.  What reads its memory behind PyTorch's back, by its
    address, finds them as they were when the address was asked for.

    Attributes:
        weight: of the table.
        column: ``"rows"``, or the state's name.
        states_begun: of the table, when the entry was made: a state that has begun anew since is another one.
    """

    weight: Table
    column: str
    states_begun: int
    held: torch.Tensor | None

    @classmethod
    def of(cls, weight: Table, column: str = ROWS) -> Self:
        """Make the entry of a column."""
        store = weight.row_store
        element = torch.empty(1, dtype=store.dtype, device="meta")
        entry = cls.like(element.expand(store.num_rows, store.width))
        entry.weight, entry.column, entry.held = weight, column, None
        entry.states_begun = weight.states_begun
        return entry

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Answer looks as they are, and all else with the rows."""
        del types
        kwargs = kwargs or {}
        name = name_of(func)
        what = _what(args, kwargs)
        refuse_writing(what, func, args, kwargs)
        if is_look(func) and name not in OF_MEMORY:
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        first = args[0] if args else None
        if isinstance(first, TableEntry) and (
            name in ("detach", "data") or _is_the_same(name, first, args, kwargs)
        ):
            return first.again()
        if name == "to" and isinstance(first, TableEntry) and not _steps_tables():
            return func(first.dense(), *args[1:], **kwargs)
        copies: list[torch.Tensor] = []

        def copied(entry: TableEntry) -> torch.Tensor:
            copies.append(entry._keep() if name in OF_MEMORY else entry.dense())
            return copies[-1]

        args, kwargs = tree_map_only(TableEntry, copied, (args, kwargs))
        return answered(what, copies, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its first argument has no name in PyTorch
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        """Answer operators that are given an entry by a function that nobody may override: as above."""
        if func is torch.ops.prim.device.default:
            return torch.device("cpu")
        return cls.__torch_function__(func, types, args, kwargs)

    def again(self) -> TableEntry:
        """Return the same entry as another object."""
        entry = TableEntry.of(self.weight, self.column)
        entry.states_begun = self.states_begun
        return entry

    @property
    def is_former(self) -> bool:
        """Whether it is of a state that has begun anew since: its numbers are gone."""
        return self.column != ROWS and self.states_begun != self.weight.states_begun

    def require_current(self) -> None:
        """Raise if its numbers are gone.

        Raises:
            UsageError: another optimizer has begun its state since, or other state was loaded.
        """
        if self.is_former:
            raise UsageError(
                f"the state {self.column!r} of the {self.weight.description} that was kept is gone: a table "
                "has one state of a name, which has begun anew or was loaded since. Keep a copy, "
                "copy.deepcopy(optimizer.state_dict()), before that."
            )

    def dense(self) -> torch.Tensor:
        """Return a copy of all rows, in host memory.

        Raises:
            CapacityError: that is more than there is.
            UsageError: its numbers are gone.
        """
        self.require_current()
        return read_all(self.weight.row_store, self.column)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # noqa: ANN401
        """Say what it is: its rows are not printed."""
        del tensor_contents
        return f"TableEntry({self.column!r} of the {self.weight.description})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TableEntry:
        """Return the entry of a copy of the table: of rows that nobody writes any more."""
        self.require_current()
        return TableEntry.of(copy.deepcopy(self.weight, memo), self.column)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as PyTorch's
        """Be pickled as a tensor of all rows."""
        return self.dense().__reduce_ex__(protocol)

    def _keep(self) -> torch.Tensor:
        """Return a copy of all rows that lives as long as the entry, always in the same memory."""
        self.require_current()
        if self.held is None:
            self.held = self.dense()
        else:
            for part, rows in blocks_of(self.weight.row_store, self.column):
                self.held[part] = rows
        return self.held


def _what(args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Say of which table the first entry among arguments is."""
    found: list[TableEntry] = []
    tree_map_only(TableEntry, found.append, (args, kwargs))
    with torch.DisableTorchFunctionSubclass():
        return f"an entry of a state dict of the {found[0].weight.description}"


def _is_the_same(name: str, entry: TableEntry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether somebody asks with ``to`` for what an entry is anyway."""
    if name != "to" or kwargs.get("copy") or not _steps_tables():
        return False
    if entry.weight.device.type != "cpu" and caller_of(torch.optim.Optimizer) is not None:
        # It brings what it loads to the parameter's device: our optimizers read an entry where it is.
        return bool(kwargs.get("dtype", entry.dtype) == entry.dtype)
    probe = torch.empty(0, dtype=entry.dtype, device="cpu")
    return probe.to(*args[1:], **kwargs) is probe


def _steps_tables() -> bool:
    """Whether no optimizer of others is about to take an entry for its own state, which it writes to."""
    optimizer = caller_of(torch.optim.Optimizer)
    return optimizer is None or bool(getattr(optimizer, "steps_tables", False))
