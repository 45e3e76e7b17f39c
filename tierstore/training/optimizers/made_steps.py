"""A step that was made ahead of its time: what from, and what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tierstore.planning.deciding import next_version
from tierstore.training.bundles.bindings import Binding
from tierstore.training.optimizers.doubles import (
    Entries,
    Flat,
    UnsuitableError,
    copied,
    double_of,
    entries_in,
    is_alike,
    is_large,
    settings,
    snapshot,
    stand_in_of,
    step_double,
)
from tierstore.training.optimizers.step_units import Group, StepUnit, options_of
from tierstore.training.pytorch.own_work import ordinary_mode

Stashed = list[tuple[torch.Tensor, Binding]]


@dataclass(slots=True)
class StepBasis:
    """What a step is made from, as it was when its last gradient had landed.

    Attributes:
        turn: whose.
        needed: the bundles that get new values: of parameters, and of state if there is any.
        stashed: the gradients, with their parameters.
        written: how often each of ``needed`` had been written.
        read: likewise the gradients.
        options: of the turn's groups.
        former: what state there was, by parameter: the large tensors themselves, copies of the small.
        double: of the optimizer as it was.
        device: that it is made on.
    """

    turn: StepUnit
    needed: list[Binding]
    stashed: Stashed
    written: list[tuple[Binding, int]]
    read: list[tuple[Binding, int]]
    options: list[Group]
    former: dict[torch.Tensor, Entries]
    double: torch.optim.Optimizer
    device: torch.device

    @property
    def gradients(self) -> list[Binding]:
        """Those that are read."""
        return [binding for _, binding in self.stashed]

    @property
    def names(self) -> dict[str, str]:
        """The key of the new values for each key that gets some."""
        return {binding.key: next_version(binding.key) for binding in self.needed}


@dataclass(slots=True)
class MadeStep:
    """A step that was made ahead of its time.

    Attributes:
        basis: what it was made from.
        settings: of PyTorch, that results may depend on.
        later: what small state is to become, by parameter.
    """

    basis: StepBasis
    settings: tuple[object, ...]
    later: dict[torch.Tensor, Entries]

    @property
    def names(self) -> dict[str, str]:
        """The keys of the new values, with those that they are to get."""
        return {new: key for key, new in self.basis.names.items()}


def basis_of(
    optimizer: torch.optim.Optimizer,
    turn: StepUnit,
    needed: Sequence[Binding],
    stashed: Stashed,
    device: torch.device,
) -> StepBasis:
    """Take in what a step is to be made from, and on; whatever changes from now on is noticed."""
    with ordinary_mode():
        former = {p: snapshot(optimizer.state.get(p, {})) for p in turn.parameters}
    return StepBasis(
        turn,
        list(needed),
        stashed,
        [(binding, binding.writes) for binding in needed],
        [(binding, binding.writes) for _, binding in stashed],
        [copied(options_of(group)) for group, _ in turn.merged],
        former,
        double_of(optimizer),
        device,
    )


def made_from(basis: StepBasis, flat_of: Flat, gradient_of: Callable[[Binding], torch.Tensor]) -> MadeStep:
    """Let the double of an optimizer step on stand-ins, in the thread that calls this.

    Args:
        basis: what the step is about.
        flat_of: returns the bytes that hold a bundle's values, and are to hold the new ones, by its key.
        gradient_of: returns a gradient whose bytes are there.

    Raises:
        UnsuitableError: it did something else to its state or options than change values.
    """
    turn = basis.turn
    with ordinary_mode():
        stand_ins = {p: stand_in_of(p, flat_of, gradient_of(gradient)) for p, gradient in basis.stashed}
        given = {p: entries_in(entries, flat_of) for p, entries in basis.former.items()}
    groups = [
        {**copied(options), "params": [stand_ins[p] for p in members]}
        for options, (_, members) in zip(basis.options, turn.merged, strict=True)
    ]
    state = {stand_ins[p]: dict(entries) for p, entries in given.items() if entries}
    step_double(basis.double, groups, state)
    left = {p: state[s] for p, s in stand_ins.items() if s in state}
    if basis.options != [options_of(group) for group in groups] or not all(
        is_alike(given[p], left.get(p, {})) for p in turn.parameters
    ):
        raise UnsuitableError("it makes state or options anew in every step")
    later = {p: {n: x for n, x in entries.items() if not is_large(x)} for p, entries in left.items()}
    return MadeStep(basis, settings(basis.device), later)
