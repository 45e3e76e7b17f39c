"""When bytes come and go: PyTorch's own module hooks, registered and removed.

Before a module's forward its bundles get windows, and after it they close, whatever happened inside.
The hooks are objects that copy and pickle as hooks that do nothing, so that a copied or saved model is
an ordinary one.  On a module that they were not made for, to which a tool has moved them, they do nothing
either: guards serve what it uses.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.autograd.saved_tensors import SavedTensors
from tierstore.training.bundles.binding import natively_in_sight
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.bundles.unseen_writes import is_pytorchs_own, written_unseen
from tierstore.training.faults import guarded_classes
from tierstore.training.modules.abandoned_checkpoints import end_left_checkpoints
from tierstore.training.pytorch.function_modes import out_of_sight
from tierstore.training.pytorch.own_work import has_hands_on_tensors
from tierstore.training.pytorch.saved_tensor_hooks import InForce, take_out_of_force
from tierstore.uncompiled import uncompiled


def do_nothing(*arguments: object, **named: object) -> None:
    """What our hooks are on a copy of the model."""
    del arguments, named


def _nothing() -> Callable[..., None]:
    return do_nothing


class Hook:
    """A hook that does not travel with copies of the model."""

    def __deepcopy__(self, memo: dict[int, object]) -> Callable[..., None]:
        del memo
        return do_nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _nothing, ()


class _RunningModule:
    """A module that is being run, with what is open for it.

    It is there before anything is opened, so that no interrupt leaves open what nobody knows of.
    """

    __slots__ = ("call", "natively", "opened", "owner", "pushed")

    def __init__(self, owner: ModuleHooks) -> None:
        self.owner = owner
        self.opened: list[Binding] = []
        self.pushed: InForce | None = None
        self.natively: AbstractContextManager[None] | None = None
        self.call: ModuleCall | None = None

    def leave_force(self) -> None:
        """Let nothing of it be in force in this thread any more."""
        if self.natively is not None:
            self.natively.__exit__(None, None, None)
            self.natively = None
        if self.pushed is not None:
            take_out_of_force(self.pushed)
            self.pushed = None


class _RunningModules(threading.local):
    """The modules that run in this thread, outermost first."""

    def __init__(self) -> None:
        self.entries: list[_RunningModule] = []


class ModuleWindows:
    """Opens and closes the windows of modules, in every thread's own order.

    Args:
        bindings: of the model.
        saved: is in force while a window is open.
        discard_inner: ends what others put into force inside the outermost window, before it is discarded.

    Attributes:
        owners: the hooks that open and close windows.
    """

    def __init__(self, bindings: Bindings, saved: SavedTensors, discard_inner: Callable[[], None]) -> None:
        self._bindings = bindings
        self._saved = saved
        self._discard_inner = discard_inner
        self._running = _RunningModules()
        self._classes: dict[Binding, list[type]] = {}
        self.owners: list[ModuleHooks] = []

    @property
    def is_outermost(self) -> bool:
        """Whether no module of the model runs in this thread."""
        return not self._running.entries

    def enter(self, owner: ModuleHooks, bindings: Sequence[Binding]) -> None:
        """Open windows on ``bindings`` for a module that begins to run."""
        if is_in_backward():  # a checkpoint computes it again
            self._saved.before_unpacking()
        self._bindings.sweep()
        if not self._running.entries:
            self._bindings.note_thread()
        end_left_checkpoints(owner.module)
        entry = _RunningModule(owner)
        self._running.entries.append(entry)
        self._bindings.open_all(bindings, self._open_classes)
        entry.opened += bindings
        if bindings and (has_hands_on_tensors() or not is_pytorchs_own(owner.module)):
            self._bindings.watch(bindings)
        elif owner.written_unseen:
            self._bindings.watch(owner.written_unseen)
        entry.pushed = self._saved.push()
        if entry.pushed is not None:
            entry.call = ModuleCall(sys._getframe(), self._leave_force)  # noqa: SLF001
        if owner.asks_for_guards and self._bindings.are_several:
            entry.natively = natively_in_sight()
            entry.natively.__enter__()

    def leave(self, owner: ModuleHooks) -> None:
        """Close what `enter` opened; nothing, if it could not."""
        entries = self._running.entries
        if entries and entries[-1].owner is owner:
            self._end_last()

    def _end_last(self) -> None:
        """End the innermost entry; it stays until that is done."""
        entries = self._running.entries
        entry = entries[-1]
        entry.leave_force()
        try:
            self._bindings.close_all(entry.opened)
        finally:
            if not entry.opened:
                entries.pop()

    def leave_out(self, binding: Binding) -> None:
        """Open no window on ``binding`` from now on."""
        for owner in self.owners:
            owner.leave_out(binding)
        self._classes.pop(binding, None)

    def discard_interrupted(self, beginning: nn.Module | None = None) -> None:
        """Close what modules left open that a ``KeyboardInterrupt`` or its like has ended.

        PyTorch calls no hooks then.

        Args:
            beginning: the module whose call has only begun: it has opened nothing yet.
        """
        for _ in self._interrupted(beginning):
            if len(self._running.entries) == 1:
                self._discard_inner()
            self._end_last()

    def _leave_force(self) -> None:
        """Do of `discard_interrupted` at once what may be done anywhere: leases stay until it is called."""
        for entry in self._interrupted():
            entry.leave_force()

    def _interrupted(self, beginning: nn.Module | None = None) -> list[_RunningModule]:
        """Return the entries of calls that run no more, innermost first."""
        entries = self._running.entries
        if not entries:
            return []
        calls = calls_on_the_stack(sys._getframe())  # noqa: SLF001 - there is no other way to know
        if beginning is not None:
            calls[beginning] -= 1
        opened = Counter(entry.owner.module for entry in entries)
        found: list[_RunningModule] = []
        for entry in reversed(entries):
            if opened[entry.owner.module] <= calls[entry.owner.module]:
                break
            opened[entry.owner.module] -= 1
            found.append(entry)
        return found

    def _open_classes(self, binding: Binding) -> list[type]:
        classes = self._classes.get(binding)
        if classes is None:
            classes = self._classes[binding] = [
                guarded_classes.open_of(kind) if issubclass(kind, nn.Parameter) else kind
                for kind in binding.plain
            ]
        return classes


def calls_on_the_stack(frame: FrameType | None) -> Counter[nn.Module]:
    """Return how often each module runs in ``frame`` and in those that called it."""
    found: Counter[nn.Module] = Counter()
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code is nn.Module._call_impl.__code__ else None  # noqa: SLF001
        if isinstance(module, nn.Module):
            found[module] += 1
        frame = frame.f_back
    return found


class ModuleCall:
    """A call of a module: says whether it runs, and keeps nothing of it alive.

    PyTorch calls no hooks where a ``KeyboardInterrupt`` or its like ends a call, but what the call alone
    refers to goes with its frames, as soon as nobody keeps the exception.  A call that is compiled is not
    seen, and taken to run.

    Args:
        frame: in the call.
        note_interrupt: called when an exception that has ended the call is gone, in whichever thread lets go
            of it, unless somebody is amid changing what is in force there, or backward runs: it must take no
            locks.  What drops this object first is not told.
    """

    __slots__ = ("_alive", "_number")

    def __init__(self, frame: FrameType | None, note_interrupt: Callable[[], None]) -> None:
        call = _call_around(frame)

        def note(_: object) -> None:
            if _may_leave_force():
                note_interrupt()

        self._number = id(call)
        own = None if call is None else call.f_locals.get(_OWN)  # of this call alone
        self._alive: Callable[[], object] = (lambda: call) if own is None else weakref.ref(own, note)

    def is_around(self, frame: FrameType | None) -> bool:
        """Say whether a frame is in the call, and in none of another module inside it."""
        call = _call_around(frame)
        return id(call) == self._number and (call is None or self._alive() is not None)

    @property
    def is_running(self) -> bool:
        """Whether the call runs in this thread."""
        frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way to know
        while frame is not None and id(frame) != self._number:
            frame = frame.f_back
        return id(frame) == self._number and (frame is None or self._alive() is not None)


_OWN = "called_always_called_hooks"
"""A variable of PyTorch's own in every call of a module with hooks; where there is none the frame is kept."""


def _call_around(frame: FrameType | None) -> FrameType | None:
    """Return the call of a module that ``frame`` is in, the innermost."""
    code = nn.Module._call_impl.__code__  # noqa: SLF001 - there is no other way to know
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


def _may_leave_force() -> bool:
    """Say whether nobody in this thread is amid changing what is in force: garbage is collected anywhere.

    In backward PyTorch puts back what was in force before it.
    """
    if is_in_backward():
        return False
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - there is no other way to know
    while frame is not None:
        if frame.f_code is take_out_of_force.__code__ or frame.f_code.co_name == "__torch_dispatch__":
            return False
        frame = frame.f_back
    return True


class ModuleHooks:
    """The two hooks of one module.

    Args:
        windows: that they open and close.
        module: whose.
        bindings: the bundles that its forward needs.
        in_evaluation: those that it needs as well when it does not train.

    Attributes:
        asks_for_guards: whether its forward computes in another way where somebody sees its parameters' uses.
    """

    def __init__(
        self,
        windows: ModuleWindows,
        module: nn.Module,
        bindings: Sequence[Binding],
        in_evaluation: Sequence[Binding] = (),
    ) -> None:
        self.windows = windows
        self.module = module
        self.bindings = tuple(bindings)
        self.in_evaluation = (*bindings, *in_evaluation)
        self.written_unseen = tuple(written_unseen(module, bindings))
        self.asks_for_guards = isinstance(module, nn.MultiheadAttention)

    def leave_out(self, binding: Binding) -> None:
        """Open no window on ``binding`` from now on."""
        self.bindings = tuple(each for each in self.bindings if each is not binding)
        self.in_evaluation = tuple(each for each in self.in_evaluation if each is not binding)
        self.written_unseen = tuple(each for each in self.written_unseen if each is not binding)

    def register(self) -> Iterator[RemovableHandle]:
        """Hook them to the module: around whatever other hooks it has; yield each when it is there."""
        self.windows.owners.append(self)
        yield self.module.register_forward_pre_hook(_BeforeForward(self), prepend=True, with_kwargs=True)
        yield self.module.register_forward_hook(_AfterForward(self), always_call=True)

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module begins to run."""
        del args, kwargs
        self.windows.enter(self, self.bindings if self.module.training else self.in_evaluation)

    def after(self, output: object) -> None:
        """The module has run, well or badly: then there is no output."""
        del output
        self.windows.leave(self)


class _BeforeForward(Hook):
    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks

    @uncompiled
    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> None:
        if module is self._hooks.module:
            with out_of_sight():
                self._hooks.before(args, kwargs or {})


class _AfterForward(Hook):
    def __init__(self, hooks: ModuleHooks) -> None:
        self._hooks = hooks

    @uncompiled
    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ANN401 - and returns it
        del args
        if module is self._hooks.module:
            with out_of_sight():
                self._hooks.after(output)


class CalledHooks(ModuleHooks):
    """The hooks of what a program calls, the whole model or a part: they also tell where a use of it begins.

    A discriminator and a generator in one model, an encoder that runs once and a decoder that runs often.
    What runs inside of another begins no use, nor does what a checkpoint computes again in backward.

    Args:
        hooks: of the module alone.
        begin: called with the module and what it is given, without names and by name, before it runs.
        end: called after it with what it returned; with ``None``, if an exception ended it.
    """

    def __init__(
        self,
        hooks: ModuleHooks,
        begin: Callable[[nn.Module, Sequence[object], Mapping[str, object]], None],
        end: Callable[[object], None],
    ) -> None:
        super().__init__(hooks.windows, hooks.module, hooks.bindings)
        self.in_evaluation = hooks.in_evaluation
        self._begin = begin
        self._end = end

    @property
    def _is_by_program(self) -> bool:
        return self.windows.is_outermost and not is_in_backward()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The module begins to run."""
        self.windows.discard_interrupted(self.module)
        if self._is_by_program:
            self._begin(self.module, args, kwargs)
        super().before(args, kwargs)

    def after(self, output: object) -> None:
        """The module has run."""
        super().after(output)
        if self._is_by_program:
            self._end(output)


class GradientHook(Hook):
    """A hook on a parameter, as `ModuleHooks` are on modules.

    Args:
        parameter: whose.
        act: what to do before its gradient is accumulated.
    """

    def __init__(self, parameter: torch.Tensor, act: Callable[[torch.Tensor], None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._act = act

    @uncompiled
    def __call__(self, gradient: torch.Tensor | None) -> None:
        """Act; what is accumulated stays as it is."""
        del gradient
        parameter = self._parameter()
        if parameter is not None:
            with out_of_sight():
                self._act(parameter)


def modules_read_whole(module: nn.Module) -> list[nn.Module]:
    """Return the modules under ``module`` whose parameters its own forward may read when it evaluates.

    PyTorch's transformer encoder looks at those of its first layer to know if it may use nested tensors: they
    have to wear no guard's class.  Its layers have a fast path that reads all of theirs, and do not take it
    where one of their modules has hooks, as ours have.
    """
    if isinstance(module, nn.TransformerEncoder) and getattr(module, "use_nested_tensor", False):
        return list(module.layers[0].modules())
    return []


def modules_read_always(module: nn.Module) -> list[nn.Module]:
    """Return the modules under ``module`` whose parameters its own forward reads.

    What ``torch.jit`` has made of modules runs in C++, which calls no hooks of theirs.
    """
    return (
        list(module.modules()) if isinstance(module, nn.MultiheadAttention | torch.jit.ScriptModule) else []
    )
