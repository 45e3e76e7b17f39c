"""Copies of a table's rows that PyTorch computes with: nothing is written to them, as nobody would find it.

1. An operator that would write to a copy, or to a view of one, is refused before it is run, whichever
   function of PyTorch runs it: ``out=``, ``torch._foreach_*_``, ``embedding`` with ``max_norm``.
2. What a function returns of a copy's own memory is a `RowsView`, of which the same is true, a `RowsMemory`,
   or an array of NumPy that cannot be written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Self

import numpy as np
import torch

from tierstore.errors import UsageError
from tierstore.modes import run_operator
from tierstore.nn.looks import is_in_place, name_of, written_by
from tierstore.nn.rows_memory import RowsMemory
from tierstore.torch_private import TorchDispatchMode, make_subclass, throw_on_write, tree_map_only

_EXPORTS: Final = frozenset({"__dlpack__", "share_memory_", "storage", "to_dlpack"})
_SHARING: Final = frozenset(
    getattr(torch.ops.aten.set_, name)
    for name in torch.ops.aten.set_.overloads()
    if name.startswith("source_T")
)
"""What lets one tensor have the memory of another."""


def refuse_writing(
    what: str, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raise if a function is known by its name to write to what it is given, or to let others do it.

    Args:
        what: is given to it, for the message.
        func: the function.
        args: given to it.
        kwargs: likewise.

    Raises:
        UsageError: it would.
    """
    name = name_of(func)
    if name in ("requires_grad_", "requires_grad"):
        wanted = [*args[1:], *kwargs.values()]
        is_setting = name == "requires_grad_" or func.__name__ == "__set__"
        if is_setting and (wanted[0] if wanted else True):
            raise UsageError(
                f"{name}: {what} is no parameter, and would never be trained. Make one of a copy, as in "
                "nn.Parameter(entry.clone()), and load without assign=True."
            )
    elif (is_in_place(func) and _has_entries(args[:1])) or _has_entries([kwargs.get("out")]):
        raise UsageError(_refusal(name, what))
    if name in _EXPORTS:
        raise UsageError(f"{name}: {what} cannot be written to by others: give them a copy, entry.clone().")


def _refusal(name: str, what: str) -> str:
    return f"{name}: {what} cannot be written to. Write rows with table.set_rows(ids, values)."


def _has_entries(values: Iterable[object]) -> bool:
    return any(
        isinstance(each, NeverWritten) or (isinstance(each, list | tuple) and _has_entries(each))
        for each in values
    )


def answered(
    what: str,
    copies: Sequence[torch.Tensor],
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - whatever the function returns
    """Return what a function of PyTorch returns for copies; see the rules above.

    Args:
        what: they are copies of, for messages.
        copies: that it is given.
        func: the function.
        args: given to it, with the copies.
        kwargs: likewise.

    Raises:
        UsageError: it would write to one.
    """
    guard = _Guard(what, copies)
    with guard:
        found = func(*args, **kwargs)
    if isinstance(found, Iterator):
        return map(guard.read_only, found)
    return tree_map_only((torch.Tensor, torch.UntypedStorage, np.ndarray), guard.read_only, found)


class NeverWritten(torch.Tensor):
    """What cannot be written to: an entry of a state dict, or rows of one.

    It has no memory.  What would take that without asking it, as ``other.data = entry`` does, is refused by
    PyTorch.
    """

    @classmethod
    def like(cls, look: torch.Tensor) -> Self:
        """Make one that looks as a tensor on the meta device, but for the device that its class says."""
        made = make_subclass(cls, look, require_grad=False, dispatch_device=True)
        if throw_on_write is not None:
            throw_on_write(made)
        assert isinstance(made, cls)
        return made


class RowsView(NeverWritten):
    """Rows of an entry, in the memory of a copy: stands for what PyTorch would return as a view of all rows.

    Attributes:
        rows: the view itself.
        what: it is a view of, for messages.
    """

    rows: torch.Tensor
    what: str

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        """Answer what reads, and refuse what writes."""
        del types
        kwargs = kwargs or {}
        views: list[RowsView] = []

        def plain(view: RowsView) -> torch.Tensor:
            views.append(view)
            return view.rows

        plain_args, plain_kwargs = tree_map_only(RowsView, plain, (args, kwargs))
        what = views[0].what
        refuse_writing(what, func, args, kwargs)
        return answered(what, [view.rows for view in views], func, plain_args, plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its first argument has no name in PyTorch
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        """Answer operators that are given a view by a function that nobody may override: as above."""
        if func is torch.ops.prim.device.default:
            return args[0].rows.device
        return cls.__torch_function__(func, types, args, kwargs)


class _Guard(TorchDispatchMode):
    """Refuses operators that would write to copies."""

    def __init__(self, what: str, copies: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what
        self._memory = [_span(each) for each in copies]

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the operator returns
        del types
        kwargs = kwargs or {}
        shares = func in _SHARING and self._is_ours(args[1])
        if shares or any(self._is_ours(each) for each in written_by(func, args, kwargs)):
            raise UsageError(_refusal(name_of(func), self._what))
        return run_operator(func, args, kwargs)

    def read_only(self, found: Any) -> Any:  # noqa: ANN401 - what it is given
        """Return what a function has returned, so that nobody can write to a copy by way of it."""
        if not self._is_ours(found):
            return found
        if isinstance(found, np.ndarray):
            found.flags.writeable = False
            return found
        if isinstance(found, torch.UntypedStorage):
            return RowsMemory(found, self._what)
        rows = found.detach()
        view = RowsView.like(torch.empty_strided(rows.shape, rows.stride(), dtype=rows.dtype, device="meta"))
        view.rows, view.what = rows, self._what
        return view

    def _is_ours(self, found: object) -> bool:
        if isinstance(found, np.ndarray):
            address = found.__array_interface__["data"][0]
        elif isinstance(found, torch.UntypedStorage):
            address = found.data_ptr()
        elif isinstance(found, torch.Tensor) and found.layout is torch.strided and not found.is_meta:
            address = _span(found).start
        else:
            return False
        return any(address in span for span in self._memory)


def _span(tensor: torch.Tensor) -> range:
    """Return the addresses of what a tensor lies in."""
    with torch.DisableTorchFunctionSubclass():
        memory = tensor.untyped_storage()
        return range(memory.data_ptr(), memory.data_ptr() + memory.nbytes())
