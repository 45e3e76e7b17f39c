"""The library's own work, told apart from what a program does: a context, and how deep a thread is in it."""

from __future__ import annotations

import contextlib
import threading
from contextlib import AbstractContextManager

import torch

from tierstore.torch_private import (
    DeviceContext,
    DisableTorchDispatch,
    count_dispatch_modes,
    count_function_modes,
    dispatch_modes,
    function_modes,
    innermost_transform,
    leave_dispatch_modes,
    leave_transforms,
)
from tierstore.training.pytorch.function_modes import leave_function_modes, modes_aside
from tierstore.training.pytorch.operator_observers import begin_unseen, end_unseen


class _OwnWork(threading.local):
    """How deep this thread is in the library's own work: one number, which contexts share."""

    def __init__(self) -> None:
        self.depth = [0]


_own_work = _OwnWork()


class ordinary_mode(AbstractContextManager[None]):  # noqa: N801 - used as a function is
    """Do the library's own work inside the context: what happens is no part of the model.

    Nothing of it is counted by a meter, nor seen by ``torch.func`` transforms, by dispatch and function modes
    (the user's, or PyTorch's own, such as ``with torch.device(...)``) and by a forward pass that derivatives
    go along with.  Inference mode is left: slots and views made under it could never be trained.

    An interrupt may keep the context from being left: then the work ends with the last reference to it.
    """

    __slots__ = ("_depth", "_is_unseen", "_left")

    def __init__(self) -> None:
        self._is_unseen = False
        self._left: contextlib.ExitStack | None = None
        self._depth: list[int] | None = None  # where it is counted

    def __enter__(self) -> None:
        """Leave what is in force in this thread."""
        depth = _own_work.depth
        depth[0] += 1
        self._depth = depth
        try:
            self._is_unseen = begin_unseen()
            if (
                innermost_transform() is not None
                or count_dispatch_modes()
                or count_function_modes()
                or torch.is_inference_mode_enabled()
            ):
                self._left = leave_all_modes()
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        """Go back to it."""
        left, self._left = self._left, None
        try:
            if left is not None:
                left.close()
        finally:
            if self._is_unseen:
                self._is_unseen = False
                end_unseen()
            depth, self._depth = self._depth, None
            if depth is not None:
                depth[0] -= 1

    def __del__(self) -> None:
        depth: list[int] | None = getattr(
            self, "_depth", None
        )  # there is none where an interrupt came at once
        if depth is not None:
            depth[0] -= 1


def leave_all_modes() -> contextlib.ExitStack:
    """Leave every mode and transform of this thread; closing what is returned goes back to them."""
    with contextlib.ExitStack() as left:
        left.enter_context(leave_function_modes())
        if count_dispatch_modes():
            left.enter_context(leave_dispatch_modes())
        if innermost_transform() is not None:
            left.enter_context(leave_transforms())
        if torch.is_inference_mode_enabled():
            left.enter_context(torch.inference_mode(mode=False))
        return left.pop_all()


def detached(tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor.detach()``, as part of the library's own work."""
    if type(tensor) is torch.Tensor and not count_function_modes() and innermost_transform() is None:
        with DisableTorchDispatch():  # a fifth of what leaving the modes costs
            return tensor.detach()
    with ordinary_mode():
        return tensor.detach()


def is_dispatch_mode_on() -> bool:
    """Say whether a dispatch mode is on in this thread: version counters do not tell of all writes there."""
    return count_dispatch_modes() > 0


def are_modes_on() -> bool:
    """Say whether somebody sees what this thread computes, and when: a mode.

    PyTorch's for devices is none of these, nor a dispatch mode that says of itself that it ``is_meter``: it
    counts what there is, whenever that is computed.
    """
    if has_hands_on_tensors():
        return True
    modes = modes_aside()
    if count_function_modes():
        modes = [*modes, *function_modes()]
    return any(not isinstance(mode, DeviceContext) for mode in modes)


def has_hands_on_tensors() -> bool:
    """Say whether a dispatch mode is handed what this thread's operators work on, to do what it likes."""
    return count_dispatch_modes() > 0 and any(
        not getattr(mode, "is_meter", False) for mode in dispatch_modes()
    )


def is_own_work() -> bool:
    """Say whether this thread does the library's own work, such as moving bytes for the store."""
    return _own_work.depth[0] > 0
