"""One bundle's part of an optimizer's step: whose turn it is, and how the optimizer is made to see only that.

Knows nothing of when a step is made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from tierstore.training.binding import Binding, Bindings

Group = dict[str, Any]
Parameters = list[torch.Tensor]


class Turn(NamedTuple):
    """What one bundle's step is about."""

    bundle: Binding
    groups: list[tuple[Group, Parameters]]

    @property
    def parameters(self) -> Parameters:
        """All of them, in the order of the groups."""
        return [parameter for _, members in self.groups for parameter in members]

    @property
    def merged(self) -> list[tuple[Group, Parameters]]:
        """Each group once, with all its parameters."""
        found: dict[int, tuple[Group, Parameters]] = {}
        for group, members in self.groups:
            found.setdefault(id(group), (group, []))[1].extend(members)
        return list(found.values())

    def is_same(self, other: Turn) -> bool:
        """Whether it is about the same parameters in the same groups."""

        def names(turn: Turn) -> list[tuple[int, list[int]]]:
            return [(id(group), [id(member) for member in members]) for group, members in turn.groups]

        return self.bundle is other.bundle and names(self) == names(other)


def options_of(group: Group) -> Group:
    """Return what a group of parameters says beside which they are."""
    return {name: value for name, value in group.items() if name != "params"}


def own_step(optimizer: torch.optim.Optimizer) -> Callable[..., object]:
    """Return the optimizer's ``step`` without the hooks that led here."""
    step = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    return step


@contextmanager
def only(optimizer: torch.optim.Optimizer, turn: Turn) -> Iterator[None]:
    """Let the optimizer's groups name only the turn's parameters, inside the context."""
    former_groups = optimizer.param_groups
    former = [(group, group["params"]) for group, _ in turn.groups]
    merged = turn.merged
    optimizer.param_groups = [group for group, _ in merged]
    for group, members in merged:
        group["params"] = members
    try:
        yield
    finally:
        optimizer.param_groups = former_groups
        for group, members in former:
            group["params"] = members


@contextmanager
def placed(bindings: Bindings, needed: Sequence[Binding], tier: str) -> Iterator[None]:
    """Lease in ``tier``, where the optimizer computes, inside the context."""
    former = [binding.tier for binding in needed]
    for binding in needed:
        if bindings.release_idle(binding):
            binding.tier = tier
    try:
        yield
    finally:
        for binding, tier_before in zip(needed, former, strict=True):
            binding.tier = tier_before
