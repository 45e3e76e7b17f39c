"""Function modes of the program: what they see of tensors that the library looks after, and what they do not.

A ``TorchFunctionMode`` sees every function of PyTorch's that Python calls, down to a look at ``p.grad``.

1. What the library itself asks is `out_of_sight`: PyTorch's hooks call it in the midst of the program.
   What it runs there for the program (an optimizer's own step, a closure) is `in_sight` again.
2. What is a member of a guard's class in Python and of PyTorch's in C++ (``p.data``, ``p.grad``) is shown as
   what it is in PyTorch, by `show`.

Where no mode is on this costs a question of 50 ns.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from torch.overrides import handle_torch_function

from tierstore.torch_private import (
    are_saved_tensor_hooks_allowed,
    count_function_modes,
    is_function_mode_on,
    pop_function_mode,
    push_function_mode,
)

are_hooks_allowed = are_saved_tensor_hooks_allowed
"""Whether graphs show what they save to hooks: not under ``disable_saved_tensors_hooks``."""
are_function_modes_on = is_function_mode_on

_NOTHING: AbstractContextManager[None] = contextlib.nullcontext()


class _Aside(threading.local):
    """The modes that this thread has left for the library's work, innermost first; the last list counts."""

    def __init__(self) -> None:
        self.modes: list[list[object]] = []


_aside = _Aside()


def out_of_sight() -> AbstractContextManager[None]:
    """Let function modes of the program see nothing inside the context; uses of guarded tensors are seen."""
    return leave_function_modes() if are_function_modes_on() else _NOTHING


def in_sight() -> AbstractContextManager[None]:
    """Let function modes see again what is done inside the context: the program's own work."""
    return _return_to_modes(_aside.modes[-1]) if modes_aside() else _NOTHING


def modes_aside() -> list[object]:
    """Return the modes that were left for what this thread does now."""
    return _aside.modes[-1] if _aside.modes else []


@contextlib.contextmanager
def leave_function_modes() -> Iterator[None]:
    """Leave function modes, and go on seeing the uses of guarded tensors."""
    modes: list[object] = []
    _aside.modes.append(modes)
    try:
        while count_function_modes():
            modes.append(pop_function_mode())
        yield
    finally:
        _aside.modes.pop()
        while modes:
            push_function_mode(modes.pop())


@contextlib.contextmanager
def _return_to_modes(modes: list[object]) -> Iterator[None]:
    _aside.modes.append([])
    before = count_function_modes()
    try:
        for mode in reversed(modes):
            push_function_mode(mode)
        yield
    finally:
        while count_function_modes() > before:
            pop_function_mode()
        _aside.modes.pop()


class _ShownFunction:
    """A function as modes see it, with what stands in for it.

    Args:
        function: that it is for whoever looks.
        member: that does the same for a guarded tensor.
    """

    __slots__ = ("_function", "_member")

    def __init__(self, function: Callable[..., Any], member: Callable[..., Any]) -> None:
        self._function = function
        self._member = member

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        return self._member(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return bool(self._function == (other._function if isinstance(other, _ShownFunction) else other))

    def __hash__(self) -> int:
        return hash(self._function)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever it is
        return getattr(self._function, name)

    def __repr__(self) -> str:
        return repr(self._function)


def show(function: Callable[..., Any], member: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401 - as they are
    """Let the innermost function mode see a call of ``function`` with ``args``, and return what it returns.

    Args:
        function: that plain PyTorch shows.
        member: what the mode calls in its place.  It is to call this itself as long as modes are on.
        args: a guarded tensor first.
    """
    return handle_torch_function(_ShownFunction(function, member), (args[0],), *args)
