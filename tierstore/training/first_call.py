"""What a step does is known before the first one: a copy of the model that has no bytes is asked.

1. At opening the model is copied without bytes, if anybody wants to know.  At its first call in training,
   when its inputs are known and nothing was computed, the copy makes a step on inputs like them.
2. The program of that step is judged, where the run may be one that cannot fit, and kept for who plans.
3. Whatever a copy cannot tell for sure ends the matter, and nothing else: DEBUG says why.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tierstore.errors import CapacityError, UsageError
from tierstore.planning import Machine, Program
from tierstore.planning.rules import HOST
from tierstore.torch_private import (
    innermost_transform,
    top_saved_tensor_hooks,
)
from tierstore.training import processes
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.bundles.grouping import Group
from tierstore.training.foreseen import ForeseenRun, may_be_refused, refusal
from tierstore.training.modules.hooks import Hook
from tierstore.training.optimizers import registered
from tierstore.training.pytorch.own_work import are_modes_on, ordinary_mode
from tierstore.training.tracing import Inputs, trace_model
from tierstore.training.tracing.twin import ModelTwin, inputs_without_bytes, refuse_hooks
from tierstore.uncompiled import uncompiled

log = logging.getLogger("tierstore")

MOST_USES = 50_000
"""Of keys in a step; a longer one is not simulated before a run begins."""

MOST_BUNDLES = 100
MOST_FUNCTIONS = 2_000
"""Of a model, and that its forward calls, where its program is for a plan alone: about half a second each."""

_CASTING = ("cpu", "cuda", "xpu", "mps")
_COMPILERS = "eval_frame.py"


def first_call_of(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], machine: Machine, run: ForeseenRun
) -> FirstCall | None:
    """Return what looks at the first call of a model in training; ``None``: nothing is to be foreseen.

    Args:
        model: as it was given, before anything of it is taken into a store.
        optimizers: that train it.
        machine: with the quotas that were given.
        run: what is known.
    """
    try:
        _require_foreseeable(optimizers, machine, run)
        return FirstCall(ModelTwin(model, optimizers), model, machine, run)
    except Exception as reason:  # noqa: BLE001 - a program's own copying may raise anything
        _say_unknown(reason)
        return None


def _require_foreseeable(
    optimizers: Sequence[torch.optim.Optimizer], machine: Machine, run: ForeseenRun
) -> None:
    _require_wanted(machine, run)
    if processes.are_several():
        raise UsageError("there are several processes")
    if not run.is_plain or run.placement.marks or run.placement.inputs is not None:
        raise UsageError("modules on the host, tables, and activations that are moved are not foreseen")
    if not optimizers or not all(map(registered.is_per_parameter, optimizers)):
        raise UsageError("not every optimizer treats each parameter by itself")
    if any(group.repeated_bytes for group in run.groups):
        raise UsageError("parameters share memory")


def _require_wanted(machine: Machine, run: ForeseenRun) -> None:
    if not run.config.foresee:
        raise UsageError("foresee is false")
    if may_be_refused(machine, run):
        return
    if not run.is_planned or machine.tiers[0].name != HOST:
        raise UsageError("nothing is planned, or little of the device is certain to be used")
    if len(run.groups) > MOST_BUNDLES:
        raise UsageError("it has too many bundles to be copied for a plan alone")


class FirstCall:
    """Learns at a model's first call in training what a step does, before anything is computed.

    A run that cannot fit is refused there.

    Args:
        twin: of the model.
        model: that is called.
        machine: with the quotas that were given.
        run: what is known.
    """

    def __init__(self, twin: ModelTwin, model: nn.Module, machine: Machine, run: ForeseenRun) -> None:
        self._twin: ModelTwin | None = twin
        self._model = model
        self._machine = machine
        self._run = run
        self._may_refuse = may_be_refused(machine, run)
        self._program: Program | None = None
        self._handle: RemovableHandle | None = None

    def watch(self, hold: Callable[[RemovableHandle], None]) -> None:
        """Look at the model's calls from now on: before all hooks that there are.

        Args:
            hold: is given the hook, to be removed with others.
        """
        hook = _BeforeFirst(self)
        self._handle = self._model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        hold(self._handle)

    def take(self) -> Program | None:
        """Return what a step does, if that is known since this was asked last; whoever has it keeps it."""
        program, self._program = self._program, None
        return program

    def look(self, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """The model is called.

        Raises:
            CapacityError: the run cannot fit.
        """
        is_trained = torch.is_grad_enabled() and self._model.training
        if self._twin is None or not is_trained or is_in_backward():
            return
        twin, self._twin = self._twin, None
        if self._handle is not None:
            self._handle.remove()
        try:
            _require_ordinary_call(self._model)
            with ordinary_mode():
                most = sys.maxsize if self._may_refuse else MOST_FUNCTIONS
                program = _program_of(twin, self._run.groups, args, kwargs, most)
                fault = self._fault_of(program)
        except Exception as reason:  # noqa: BLE001 - of the program's own, on a copy
            _say_unknown(reason)
            return
        if fault is not None:
            raise fault
        self._program = program if self._run.is_planned else None

    def _fault_of(self, program: Program) -> CapacityError | None:
        """Return why a run cannot fit; ``None``: it can, as far as is known."""
        return refusal(program, self._machine, self._run) if self._may_refuse else None


class _BeforeFirst(Hook):
    def __init__(self, first: FirstCall) -> None:
        self._first = first

    @uncompiled
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del module
        self._first.look(args, kwargs)


def _say_unknown(reason: BaseException) -> None:
    log.debug("what a step does is not known before the first one: %s", reason)


# ---------------------------------------------------------------------- a step of the copy


def _require_ordinary_call(model: nn.Module) -> None:
    """Raise if a copy would compute in another way than the model does now."""
    refuse_hooks(model)
    if _are_casts_on():
        raise UsageError("numbers are cast as operators like them")
    saved_by = top_saved_tensor_hooks(True)  # noqa: FBT003 - those that tracing ignores as well
    if innermost_transform() is not None or are_modes_on() or saved_by is not None:
        raise UsageError("transforms, modes, or hooks of saved tensors are in force")
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - nobody else tells
    while frame is not None and frame.f_code is not nn.Module._call_impl.__code__:  # noqa: SLF001
        frame = frame.f_back  # the compiler's functions are around our hook, too
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILERS):
            raise UsageError("it is called by what was compiled")
        frame = frame.f_back


def _program_of(
    twin: ModelTwin,
    groups: Sequence[Group],
    args: Sequence[object],
    kwargs: Mapping[str, object],
    most_functions: int,
) -> Program:
    """Return what a step does on inputs like these, as the copy makes it; nothing of it is assumed."""
    if not twin.follow():
        raise UsageError("the model was changed since its run was opened")
    inputs = inputs_without_bytes({"args": list(args), "kwargs": dict(kwargs)})
    program = trace_model(
        lambda: (twin.model, _as_inputs(inputs), twin.optimizers),
        loss=functools.partial(_least_loss, most_functions=most_functions),
        grouping=lambda *_: twin.groups(groups),
    )
    if program.assumptions:
        raise UsageError(f"it depends on values: {program.assumptions[0]}")
    if sum(len(moment.uses) for moment in program.moments) > MOST_USES:
        raise UsageError("a step is too long")
    return program


def _as_inputs(inputs: object) -> Inputs:
    assert isinstance(inputs, dict)
    return inputs


def _least_loss(model: nn.Module, inputs: Inputs, *, most_functions: int) -> torch.Tensor:
    """Return the loss that takes the least: what the program's own is, is not known."""
    assert isinstance(inputs, Mapping)
    args, kwargs = inputs["args"], inputs["kwargs"]
    assert isinstance(args, list)
    assert isinstance(kwargs, dict)
    with _Forward(most_functions):
        output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = loss if isinstance(loss, torch.Tensor) else output
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"which part of a {type(output).__name__} is trained for is not known")
    return found if found.dim() == 0 else found.sum()


class _Forward(TorchFunctionMode):
    """Gives up where a forward lets operators cast, which they would not without bytes, or calls too many."""

    def __init__(self, most_functions: int) -> None:
        super().__init__()
        self._left = most_functions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - of the function
        """Call a function."""
        if _are_casts_on():
            raise UsageError("numbers are cast as operators like them")
        self._left -= 1
        if self._left < 0:
            raise UsageError("a forward calls too many functions to be run for a plan alone")
        return func(*args, **(kwargs or {}))


def _are_casts_on() -> bool:
    return any(map(torch.is_autocast_enabled, _CASTING))
