"""Hooks on saved tensors that are in force in a thread: PyTorch's stack of them, and ours in it."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from torch.autograd import function
from torch.utils import checkpoint

from tierstore.torch_private import (
    pop_saved_tensor_hooks,
    push_saved_tensor_hooks,
    pytree,
    top_saved_tensor_hooks,
)

Hook = Callable[[Any], Any]

push_hooks = push_saved_tensor_hooks
pop_hooks = pop_saved_tensor_hooks


def top_hooks() -> tuple[Hook, Hook] | None:
    """Return the hooks that are in force in this thread."""
    return top_saved_tensor_hooks(True)  # noqa: FBT003 - also while torch.jit traces


class InForce(NamedTuple):
    """Hooks of ours that are in force in this thread.

    Attributes:
        own: what packs.
        before: the hooks that were in force until then.
    """

    own: Hook
    before: tuple[Hook, Hook] | None


def bring_into_force(pack: Hook, unpack: Hook) -> InForce:
    """Let hooks see what is saved in this thread from now on."""
    hooks = InForce(pack, top_hooks())
    push_hooks(pack, unpack)
    return hooks


def take_out_of_force(hooks: InForce) -> None:
    """Undo `bring_into_force`; what others have brought into force since stays.

    Where an interrupt has left ours in force, somebody may have ended theirs and taken ours away in their
    place: then it is theirs that go.
    """
    above: list[tuple[Hook, Hook]] = []
    while (top := top_hooks()) is not None and top[0] is not hooks.own:
        above.append(top)
        pop_hooks()
    if top is not None:
        pop_hooks()
    elif hooks.before is not None:
        left = [number for number, each in enumerate(above) if each[0] is hooks.before[0]]
        if left:
            del above[left[0]]
    for each in reversed(above):
        push_hooks(*each)


class Inside:
    """Whoever packs some tensors, and leaves the rest to the hooks that were in force before.

    Attributes:
        outer: those; ``None``: there were none.
        is_for_repetition: whether what it leaves to them now is wanted by something that runs again.
    """

    outer: tuple[Hook, Hook] | None = None
    is_for_repetition: bool = False


def whose(hook: Hook) -> object:
    """Return the object that a hook is, or is a method of."""
    return getattr(hook, "__self__", hook)


def onwards(hook: Hook) -> Iterator[Hook]:
    """Yield a hook, then the one that it leaves the rest to, and so on."""
    yield hook
    while isinstance(owner := whose(hook), Inside) and owner.outer is not None:
        hook = owner.outer[0]
        yield hook


def chain() -> Iterator[Hook]:
    """Yield the hook that packs in this thread, then the one that it leaves the rest to, and so on."""
    top = top_hooks()
    return iter(()) if top is None else onwards(top[0])


def packs_the_rest() -> Hook | None:
    """Return the hook in this thread that packs what no other one does; ``None``: nobody does."""
    return next(iter(deque(chain(), maxlen=1)), None)


def is_checkpoints(hook: Hook) -> bool:
    """Say whether a hook is of ``torch.utils.checkpoint``."""
    return getattr(hook, "__module__", None) == checkpoint.__name__


def is_for_repetition(asker: object) -> bool:
    """Say whether what is packed now is wanted by something that runs again: it is to stay where it is.

    Args:
        asker: whose hook packs it; others may have left it to him.
    """
    for owner in map(whose, chain()):
        if isinstance(owner, Inside) and owner.is_for_repetition:
            return True
        if owner is asker:
            break
    return is_input_of_checkpoint(sys._getframe())  # noqa: SLF001 - there is no other way to know


def is_input_of_checkpoint(frame: FrameType | None) -> bool:
    """Say whether a tensor is saved as the input of what ``torch.utils.checkpoint`` will recompute.

    It has its inputs saved as nodes have; only who calls the hook tells.

    Args:
        frame: in the hook.
    """
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(_BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == checkpoint.__name__


_BETWEEN = ("tierstore.", "torch._dynamo.", function.__name__, pytree.__name__)
"""The modules whose frames are between a hook and who saves."""
