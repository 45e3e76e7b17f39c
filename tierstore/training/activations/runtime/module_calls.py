"""Which calls of modules run in a thread, and what our hooks have opened for them: one stack for all.

1. A call is known by its frame, so that it is not taken for the module's next one.
2. What is opened for a call ends with it.  PyTorch calls no hooks where a ``KeyboardInterrupt`` or its like
   ends a call: what that has opened is discarded, innermost first, as soon as nobody keeps the exception, at
   the latest when a call of a module with our hooks begins or ends.
3. A stack is of one model, and has a part for each thread.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.training.modules.hooks import Hook, ModuleCall
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.uncompiled import uncompiled

Thing = TypeVar("Thing")

Enter = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
"""Is told of a module that begins to run, with its arguments."""

Leave = Callable[[nn.Module, tuple[Any, ...], Any], None]
"""Is told of a module that has run, with what it returned; ``None`` as well if an exception ended it."""


class QuietHook(Hook):
    """A hook of a module that does something and changes neither arguments nor output.

    Args:
        act: what it does.
    """

    def __init__(self, act: Callable[[nn.Module, Any, Any], None]) -> None:
        self._act = act

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, other: Any) -> None:  # noqa: ANN401 - a module's own
        """Act, with named arguments or the output as ``other``."""
        with out_of_sight():
            self._act(module, args, other)


def hook_around(module: nn.Module, enter: Enter, leave: Leave) -> list[RemovableHandle]:
    """Hook a pair to a module, around the hooks that it has; ``leave`` is told of exceptions as well."""
    return [
        module.register_forward_pre_hook(QuietHook(enter), prepend=True, with_kwargs=True),
        module.register_forward_hook(QuietHook(leave), always_call=True),
    ]


def hook_inside(module: nn.Module, enter: Enter, leave: Leave) -> list[RemovableHandle]:
    """Hook a pair to a module, inside the hooks that it has; ``leave`` is told of exceptions as well."""
    return [
        module.register_forward_pre_hook(QuietHook(enter), with_kwargs=True),
        module.register_forward_hook(QuietHook(leave), prepend=True, always_call=True),
    ]


class _OpenedThing(NamedTuple):
    """What was opened for a call.

    Attributes:
        call: of a module.
        owner: who has opened it.
        thing: that is open.
        discard: ends it where the call was interrupted.
        last: what is open and was opened last, this included, by kind.
    """

    call: ModuleCall
    owner: object
    thing: Any
    discard: Callable[[], None]
    last: Mapping[type, Any]


def _nothing() -> None:
    """What has nothing in force ends by itself."""


class CallStack(threading.local):
    """What the calls of a model's modules that run in this thread have opened, outermost first."""

    def __init__(self) -> None:
        self._opened: list[_OpenedThing] = []

    def last(self, kind: type[Thing]) -> Thing | None:
        """Return what was opened last of a kind; ``None``: nothing of it is open."""
        return self._last.get(kind)

    @property
    def _last(self) -> Mapping[type, Any]:
        return self._opened[-1].last if self._opened else {}

    def begin(self, owner: object, thing: object, discard: Callable[[], None] = _nothing) -> None:
        """Take in what a hook has opened for the call that it is called in.

        Args:
            owner: of the hook, one a module.
            thing: that is open; it is found by its class.
            discard: ends it if the call is interrupted.  It must not take locks.
        """
        call = ModuleCall(sys._getframe(), self.discard_interrupted)  # noqa: SLF001
        last = {**self._last, type(thing): thing}
        self._opened.append(_OpenedThing(call, owner, thing, discard, last))

    def end(self, owner: object, kind: type[Thing]) -> Thing | None:
        """Return what ``owner`` has opened for the call that this is called in; ``None``: nothing."""
        self.discard_interrupted()
        if self._opened:
            opened = self._opened[-1]
            if opened.owner is owner and opened.call.is_around(sys._getframe()):  # noqa: SLF001
                self._opened.pop()
                assert isinstance(opened.thing, kind)
                return opened.thing
        return None

    def discard_interrupted(self) -> None:
        """End, innermost first, what calls have opened that a ``KeyboardInterrupt`` or its like has ended."""
        while self._opened and not self._opened[-1].call.is_running:
            self._opened.pop().discard()
