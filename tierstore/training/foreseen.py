"""What cannot fit is refused before a step begins: a copy of the model that has no bytes is asked.

1. At opening the model is copied without bytes, where parameters, gradients and state take more than half of
   the device.  At its first call in training, when its inputs are known and nothing was computed, the copy
   makes a step on inputs like them, and that step is simulated on the run's machine.
2. A run is refused only if it would need more than the device has by a tenth.  In the steps that are looked
   at, those that a run learns from, the store has on the device exactly what is in use: what they need does
   not depend on the quota, so a run that is refused is not one that another division would have let through.
3. On an emulated device nothing stops what the program makes itself, as long as no lease is in need of room.
   It is not refused there, either: a run that is refused is one whose leases would be.
4. What was not foreseen may run: whatever a copy cannot tell for sure ends the matter; DEBUG says why.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, UsageError
from tierstore.planning import Machine, Placement, Program
from tierstore.planning.deciding import LEARNING_STEPS
from tierstore.planning.rules import HOST
from tierstore.planning.searching import remedies, told
from tierstore.planning.simulating import Conditions, simulate
from tierstore.store import Store
from tierstore.torch_private import (
    innermost_transform,
    top_saved_tensor_hooks,
)
from tierstore.training import processes
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.bundles.grouping import Group
from tierstore.training.modules.hooks import Hook
from tierstore.training.optimizers import registered
from tierstore.training.pytorch.own_work import are_modes_on, ordinary_mode
from tierstore.training.run_machine import conditions_of, machine_of
from tierstore.training.tracing import Inputs, trace_model
from tierstore.training.tracing.twin import ModelTwin, inputs_without_bytes, refuse_hooks
from tierstore.units import format_bytes

log = logging.getLogger("tierstore")

MARGIN = 1.1
"""How much more than there is a run has to need to be refused: neither its loss is known, nor its kernels."""

CERTAIN_SHARE = 0.5
"""Of the device; where less is certain to be there, nothing is foreseen."""

MOST_USES = 50_000
"""Of keys in a step; a longer one is not simulated before a run begins."""

_ENOUGH = 2**50
_CASTING = ("cpu", "cuda", "xpu", "mps")
_COMPILERS = "eval_frame.py"


class ForeseenRun(NamedTuple):
    """What is known of a run before its first step.

    Attributes:
        config: of the run.
        placement: where everything lives.
        groups: what travels together.
        certain_bytes: of parameters, gradients and state together.
        is_plain: whether all that the model has and computes is on the device, and nothing of it in tables.
    """

    config: OffloadConfig
    placement: Placement
    groups: Sequence[Group]
    certain_bytes: int
    is_plain: bool


def foresee(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], store: Store, run: ForeseenRun
) -> FirstCall | None:
    """Return what looks at the first call of a model in training; ``None``: nothing is to be foreseen.

    Args:
        model: as it was given, before anything of it is taken into a store.
        optimizers: that train it.
        store: with the tiers that were given, and nothing in them.
        run: what is known.
    """
    try:
        machine = machine_of(store, run.config)
        machine = machine.with_capacities({tier.name: tier.capacity_bytes for tier in store.config.tiers})
        _require_foreseeable(optimizers, machine, run)
        return FirstCall(ModelTwin(model, optimizers), model, machine, run)
    except Exception as reason:  # noqa: BLE001 - a program's own copying may raise anything
        _say_unknown(reason)
        return None


def _require_foreseeable(
    optimizers: Sequence[torch.optim.Optimizer], machine: Machine, run: ForeseenRun
) -> None:
    fastest = machine.tiers[0]
    if fastest.name == HOST:
        raise UsageError("there is no device")
    if not run.config.foresee:
        raise UsageError("foresee is false")
    if run.certain_bytes <= CERTAIN_SHARE * fastest.capacity_bytes:
        raise UsageError("little of the device is certain to be used")
    if processes.are_several():
        raise UsageError("there are several processes")
    if not run.is_plain or run.placement.marks or run.placement.inputs is not None:
        raise UsageError("modules on the host, tables, and activations that are moved are not foreseen")
    if not optimizers or not all(map(registered.is_per_parameter, optimizers)):
        raise UsageError("not every optimizer treats each parameter by itself")
    if any(group.repeated_bytes for group in run.groups):
        raise UsageError("parameters share memory")


class FirstCall:
    """A hook on a model: at its first call in training it refuses a run that cannot fit.

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
        self._handle: RemovableHandle | None = None

    def watch(self, hold: Callable[[RemovableHandle], None]) -> None:
        """Look at the model's calls from now on: before all hooks that there are.

        Args:
            hold: is given the hook, to be removed with others.
        """
        hook = _BeforeFirst(self)
        self._handle = self._model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
        hold(self._handle)

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
                program = _program_of(twin, self._run.groups, args, kwargs)
        except Exception as reason:  # noqa: BLE001 - of the program's own, on a copy
            _say_unknown(reason)
            return
        with ordinary_mode():
            _refuse(program, self._machine, self._run)


class _BeforeFirst(Hook):
    def __init__(self, first: FirstCall) -> None:
        self._first = first

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        del module
        self._first.look(args, kwargs)


def _say_unknown(reason: BaseException) -> None:
    log.debug("whether the run fits is not known before its first step: %s", reason)


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
    twin: ModelTwin, groups: Sequence[Group], args: Sequence[object], kwargs: Mapping[str, object]
) -> Program:
    """Return what a step does on inputs like these, as the copy makes it; nothing of it is assumed."""
    if not twin.follow():
        raise UsageError("the model was changed since its run was opened")
    inputs = inputs_without_bytes({"args": list(args), "kwargs": dict(kwargs)})
    program = trace_model(
        lambda: (twin.model, _as_inputs(inputs), twin.optimizers),
        loss=_least_loss,
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


def _least_loss(model: nn.Module, inputs: Inputs) -> torch.Tensor:
    """Return the loss that takes the least: what the program's own is, is not known."""
    assert isinstance(inputs, Mapping)
    args, kwargs = inputs["args"], inputs["kwargs"]
    assert isinstance(args, list)
    assert isinstance(kwargs, dict)
    with _NoCasts():
        output = model(*args, **kwargs)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    found = loss if isinstance(loss, torch.Tensor) else output
    if not isinstance(found, torch.Tensor):
        raise UsageError(f"which part of a {type(output).__name__} is trained for is not known")
    return found if found.dim() == 0 else found.sum()


class _NoCasts(TorchFunctionMode):
    """Gives up where a forward lets operators cast: they would, but not without bytes."""

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
        return func(*args, **(kwargs or {}))


def _are_casts_on() -> bool:
    return any(map(torch.is_autocast_enabled, _CASTING))


# ---------------------------------------------------------------------- whether it fits


def _refuse(program: Program, machine: Machine, run: ForeseenRun) -> None:
    """Raise if a step does not fit on the device, even if there were a tenth more of it.

    Raises:
        CapacityError: with who would hold what, and what would help.
    """
    first = machine.tiers[0]
    conditions = replace(conditions_of(run.config, machine), is_enforced=machine.has_streams)
    room = dict.fromkeys((tier.name for tier in machine.tiers[1:]), _ENOUGH)
    error: CapacityError | None = None
    for nbytes in (first.capacity_bytes, int(MARGIN * first.capacity_bytes)):
        roomy = machine.with_capacities({**room, first.name: nbytes})
        try:
            simulate(program, roomy, run.placement, conditions=conditions, steps=LEARNING_STEPS)
        except CapacityError as found:
            error = error or found
        else:
            return
    assert error is not None
    raise _refusal(program, machine, run, conditions, error)


def _refusal(
    program: Program, machine: Machine, run: ForeseenRun, conditions: Conditions, error: CapacityError
) -> CapacityError:
    first = machine.tiers[0]
    whole = replace(conditions, is_enforced=True)  # what helps has room for what operators make, too
    found = remedies(program, machine, given=run.placement, conditions=whole)
    advice = told(found) or "Raise it, take smaller batches, or swap or recompute more."
    return CapacityError(
        f"a step on these inputs does not fit into max_device_memory, which is "
        f"{format_bytes(first.capacity_bytes)}: {error} {advice} Nothing was computed; this was found by a "
        "step of a copy of the model that has no bytes, and foresee: false lets it be tried.",
        tier=first.name,
        needed_bytes=error.needed_bytes,
        free_bytes=error.free_bytes,
    )
