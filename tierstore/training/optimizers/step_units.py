"""One bundle's part of an optimizer's step: whose turn it is, and how the optimizer is made to see only that.

Knows nothing of when a step is made, but whether one is running now.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, NamedTuple, Protocol

import torch

from tierstore.errors import CapacityError, UsageError
from tierstore.torch_private import default_to_fused_or_foreach
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.budgets.prefetcher import Prefetcher
from tierstore.training.bundles.bindings import Binding, Bindings
from tierstore.training.bundles.tensor_slots import is_sharded_kind
from tierstore.training.faults import guard
from tierstore.training.optimizers.registered import unhooked_step
from tierstore.training.optimizers.state import OptimizerState
from tierstore.training.recording.recorder import StepRecorder

Group = dict[str, Any]
Parameters = list[torch.Tensor]
ONE_BY_ONE: Final = {"foreach": False}
"""What tells a group that its parameters are stepped one after another."""


class Progress(enum.Enum):
    """What parameters and state are those of."""

    WHOLE = enum.auto()  # of whole steps: a checkpoint may be made
    PARTIAL = enum.auto()  # some are stepped and others are not: only a whole step makes it good


class StepTrainer(Protocol):
    """What steps need of the session that they are made in."""

    @property
    def bindings(self) -> Bindings:
        """Of the model."""
        ...

    @property
    def gradients(self) -> Gradients:
        """Of the model."""
        ...

    @property
    def order(self) -> Mapping[Binding, int]:
        """The place of every bundle of parameters in the forward pass."""
        ...

    @property
    def recorder(self) -> StepRecorder:
        """Of the run's steps."""
        ...

    @property
    def prefetcher(self) -> Prefetcher:
        """Of the run."""
        ...

    def step_tier(self, *bundles: Binding) -> str:
        """Return where optimizers compute when they step bundles together."""
        ...

    def computes_on(self, bundle: Binding) -> torch.device:
        """Return the device on which optimizers step a bundle."""
        ...

    def begin_step(self, steps: Steps) -> None:
        """An optimizer begins to step."""
        ...

    def go_on_with_step(self) -> None:
        """An optimizer goes on after the model has run in the midst of its step."""
        ...

    def advise(self, keys: Sequence[str], tier: str) -> None:
        """Say what is needed soon, and where."""
        ...

    def steps_aside(self, bundle: Binding) -> bool:
        """Whether a thread of its own makes a bundle's steps ahead, on the host beside a device."""
        ...

    def allows_step_ahead(self, bundle: Binding) -> bool:
        """Whether a bundle may be stepped during backward, as far as room is concerned."""
        ...


class Steps(Protocol):
    """The steps of one optimizer, however they are made."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose."""
        ...

    @property
    def state(self) -> OptimizerState:
        """What it keeps."""
        ...

    @property
    def seconds(self) -> float:
        """How long all steps took."""
        ...

    def before(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The optimizer's own ``step`` was called; return what it is called with instead."""
        ...

    def after(self) -> bool:
        """The optimizer's own ``step`` has returned; return whether a step has ended."""
        ...

    def abandon(self) -> None:
        """An exception has ended the step."""
        ...

    def require_whole(self) -> None:
        """Make sure that parameters and state are those of whole steps.

        Raises:
            UsageError: a step is under way, or the last one failed in its midst.
        """
        ...

    # --- in the midst of a step ---

    def begin_use(self, bindings: Sequence[Binding]) -> None:
        """Tensors of bundles are about to be used."""
        ...

    def note_write(self) -> None:
        """Tensors may have been written."""
        ...

    def begin_model(self) -> None:
        """The model begins to run."""
        ...

    def explain(self, error: CapacityError) -> CapacityError:
        """Return what to raise where bytes found no room."""
        ...


class StepUnit(NamedTuple):
    """What one bundle's step is about.

    Attributes:
        bundle: which.
        groups: of the optimizer, with those of their parameters that are stepped.
        one_by_one: the ids of groups of which PyTorch steps one parameter after another: see `one_by_one_of`.
    """

    bundle: Binding
    groups: list[tuple[Group, Parameters]]
    one_by_one: frozenset[int] = frozenset()

    @property
    def parameters(self) -> Parameters:
        """All of them, in the order of the groups."""
        return [parameter for _, members in self.groups for parameter in members]

    @property
    def merged(self) -> list[tuple[Group, Parameters]]:
        """Each group once, with all its parameters, and said of it how they are stepped."""
        return [
            ({**group, **ONE_BY_ONE} if id(group) in self.one_by_one else group, members)
            for group, members in _merged(self.groups)
        ]

    def is_same(self, other: StepUnit) -> bool:
        """Whether it is about the same parameters in the same groups."""

        def names(turn: StepUnit) -> list[tuple[int, list[int]]]:
            return [(id(group), [id(member) for member in members]) for group, members in turn.groups]

        return self.bundle is other.bundle and names(self) == names(other)


def options_of(group: Group) -> Group:
    """Return what a group of parameters says beside which they are."""
    return {name: value for name, value in group.items() if name != "params"}


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """Return the optimizer's ``step`` without the hooks that led here."""
    return unhooked_step(type(optimizer))


Members = list[tuple[Group, Parameters]]


def by_bundle(optimizer: torch.optim.Optimizer) -> dict[Binding, Members]:
    """Split the optimizer's groups by bundle, as they are now; what is not offloaded is left out."""
    members: dict[Binding, Members] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            guarded_tensor = guard.guarded_tensor_of(parameter)
            if guarded_tensor is None:
                continue
            parts = members.setdefault(guarded_tensor.binding, [])
            if not parts or parts[-1][0] is not group:
                parts.append((group, []))
            parts[-1][1].append(parameter)
    return members


def one_by_one_of(
    optimizer: torch.optim.Optimizer, has_gradient: Callable[[torch.Tensor], bool]
) -> frozenset[int]:
    """Return the ids of groups whose parameters PyTorch does not step in lists, though it would some of them.

    Where a group does not say ``foreach``, PyTorch asks all that have a gradient: one on the host, or of a
    class that it does not know, and none are.  The last bits depend on it.  A ``DTensor`` is of such a class,
    and its local tensor is not.
    """
    return frozenset(
        id(group)
        for group in optimizer.param_groups
        if group.get("foreach", False) is None
        and not group.get("fused")
        and _are_different([p for p in group["params"] if has_gradient(p)])
    )


def _are_different(parameters: Parameters) -> bool:
    """Whether PyTorch would step some parameters, or what stands for them, in lists, and others not."""
    is_sharded = any(is_sharded_kind(type(parameter)) for parameter in parameters)
    return is_sharded or len(set(map(_may_be_in_list, parameters))) > 1


def _may_be_in_list(parameter: torch.Tensor) -> bool:
    _, is_foreach = default_to_fused_or_foreach([parameter], differentiable=False)
    return is_foreach


def turn_of(
    bundle: Binding,
    members: Members,
    has_gradient: Callable[[torch.Tensor], bool],
    one_by_one: frozenset[int] = frozenset(),
) -> StepUnit | None:
    """Return what the step of one bundle is about; ``None``: there is no gradient."""
    parts = ((group, [p for p in parameters if has_gradient(p)]) for group, parameters in members)
    groups = [(group, parameters) for group, parameters in parts if parameters]
    return StepUnit(bundle, groups, one_by_one) if groups else None


def turns_of(
    members: Mapping[Binding, Members],
    order: Mapping[Binding, int],
    has_gradient: Callable[[torch.Tensor], bool],
    one_by_one: frozenset[int] = frozenset(),
) -> list[StepUnit]:
    """Return the turns of a step, in the order of the forward pass; other runs' bundles are theirs."""
    turns = (
        turn_of(bundle, members[bundle], has_gradient, one_by_one) for bundle in members if bundle in order
    )
    return sorted((turn for turn in turns if turn is not None), key=lambda turn: order[turn.bundle])


def runs_of_step(optimizer: torch.optim.Optimizer) -> int:
    """Count the hooked steps of the optimizer that run now, one inside another; 2 stands for more."""
    code = getattr(type(optimizer).step, "__code__", None)
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - PyTorch has no mark for it
    found = 0
    while frame is not None and found < 2:
        found += frame.f_code is code and frame.f_locals.get("self") is optimizer
        frame = frame.f_back
    return found


def not_whole(optimizer: torch.optim.Optimizer) -> UsageError:
    """Return the refusal of a checkpoint in the midst of a step."""
    return UsageError(
        f"a step of {type(optimizer).__name__} is under way, or failed in its midst: some of its parameters "
        "are stepped and others are not. Make a checkpoint between steps; after a failed step resume from "
        "the former checkpoint, or make a whole step first."
    )


def _merged(groups: Members) -> Members:
    found: dict[int, tuple[Group, Parameters]] = {}
    for group, members in groups:
        found.setdefault(id(group), (group, []))[1].extend(members)
    return list(found.values())


@contextmanager
def only(
    optimizer: torch.optim.Optimizer, groups: Members, one_by_one: frozenset[int] = frozenset()
) -> Iterator[None]:
    """Let the optimizer's groups name only some of their parameters, inside the context.

    Args:
        optimizer: whose groups.
        groups: with the parameters that they are to name.
        one_by_one: the ids of those that are told to step one parameter after another.
    """
    former_groups = optimizer.param_groups
    former = [(group, group["params"]) for group, _ in groups]
    merged = _merged(groups)
    optimizer.param_groups = [group for group, _ in merged]
    for group, members in merged:
        group["params"] = members
    told = [group for group, _ in merged if id(group) in one_by_one]
    for group in told:
        group.update(ONE_BY_ONE)
    try:
        yield
    finally:
        optimizer.param_groups = former_groups
        for group in told:
            group["foreach"] = None
        for group, members in former:
            group["params"] = members


@contextmanager
def placed(bindings: Bindings, needed: Sequence[Binding], tier: str) -> Iterator[None]:
    """Lease in ``tier``, where the optimizer computes, inside the context."""
    former = [binding.tier for binding in needed]
    for binding in needed:
        if bindings.keeps_leases or bindings.release_idle(binding):  # where they stay there is one tier
            binding.tier = tier
    try:
        yield
    finally:
        for binding, tier_before in zip(needed, former, strict=True):
            binding.tier = tier_before
