"""Whoever watches operators: what a mode of the library owes to them, and work that no watcher is to see.

A dispatch mode owes the operators that it sees their tensors' version counters.  Below one PyTorch counts no
writes of operators over lists (``torch._foreach_*``) that it runs as loops over their tensors: the loops
count, and there they are not asked to.  A backward pass would then go through changed weights in silence.

What the library does inside, such as bringing rows of a table, is nothing that a program makes.  It counts
for nobody who measures programs: dispatch modes, and the observers of `tierstore.training.pytorch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, Final

import torch

from tierstore import signals
from tierstore.torch_private import (
    DisableTorchDispatch,
    EnableTorchFunction,
    dispatch_key,
    is_dispatch_key_included,
    set_dispatch_key_included,
)

# A signal may come where PyTorch has switched subclasses off, as at the end of each `record_function`: its
# handler finds parameters with their bytes, as anywhere.
signals.call_in(EnableTorchFunction)


def run_operator(func: Callable[..., Any], args: Sequence[object], kwargs: Mapping[str, object]) -> Any:  # noqa: ANN401
    """Run an operator that a mode was asked to run; what it writes is counted as without the mode.

    Args:
        func: the operator.
        args: that it is given.
        kwargs: likewise.
    """
    known = _lists_by_id.get(id(func))
    places = _lists_written(func) if known is None else known[1]
    if not places:
        return func(*args, **kwargs)
    with torch.DisableTorchFunctionSubclass():
        given = list(_given(places, args, kwargs))
        before = [tensor._version for tensor in given]  # noqa: SLF001 - nobody else tells
    result = func(*args, **kwargs)
    with torch.DisableTorchFunctionSubclass():
        uncounted = [each for each, then in zip(given, before, strict=True) if each._version == then]  # noqa: SLF001
        if uncounted:
            torch.autograd.graph.increment_version(uncounted)
    return result


_Places = tuple[tuple[int, str], ...]

_lists_by_id: dict[int, tuple[Callable[..., Any], _Places]] = {}
"""By an operator's id, which stays its own as it is kept: it, and `_lists_written`.  Its hash is slower."""


def _lists_written(func: Callable[..., Any]) -> _Places:
    """Return place and name of each list that an operator over lists writes to."""
    schema = getattr(func, "_schema", None)
    places: _Places = ()
    if schema is not None and schema.name.startswith("aten::_foreach_"):
        places = tuple(
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        )
    _lists_by_id[id(func)] = (func, places)
    return places


def _given(
    places: Sequence[tuple[int, str]], args: Sequence[object], kwargs: Mapping[str, object]
) -> Iterator[torch.Tensor]:
    for place, name in places:
        found = args[place] if place < len(args) else kwargs.get(name, ())
        for each in found if isinstance(found, list | tuple) else ():
            if isinstance(each, torch.Tensor) and not each.is_inference():
                yield each


OBSERVERS_KEY_NAME: Final = "TESTING_ONLY_GenericMode"
"""The dispatch key of observers: PyTorch has it for its own tests, and uses it nowhere."""
_OBSERVERS_KEY: Final = dispatch_key(OBSERVERS_KEY_NAME)


class Unseen:
    """A context in which nobody sees what this thread does.  May be nested; is entered once."""

    __slots__ = ("_are_observers", "_dispatch")

    def __enter__(self) -> None:
        """Let nobody see what comes."""
        self._dispatch = DisableTorchDispatch()
        self._dispatch.__enter__()
        self._are_observers = is_dispatch_key_included(_OBSERVERS_KEY)
        if self._are_observers:
            set_dispatch_key_included(_OBSERVERS_KEY, False)  # noqa: FBT003 - PyTorch's signature

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let those see again who did before."""
        if self._are_observers:
            set_dispatch_key_included(_OBSERVERS_KEY, True)  # noqa: FBT003 - PyTorch's signature
        self._dispatch.__exit__(kind, error, trace)
