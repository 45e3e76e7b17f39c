"""What a graph refers to instead of what it saves: one pair of hooks, and policies in an order.

1. Policies are asked in the order of `Turn`; of two with one turn the one that began last.  Who saves by
   reference, as parameters are (`SavedTensors`), is asked before them by modules within the root, and after
   them in the root's own forward.  What nobody takes goes to the hooks that were in force before, or is kept.
2. Hooks of users that are to see all that is saved see it before policies that let them; of what they pack,
   what a policy takes is replaced until it is unpacked.
3. A pair is in force while a policy is.  One that begins where others have brought hooks into force since
   gets a pair above them: it is asked for what they would be shown.
4. A policy is asked in the thread in which it began.  What it has packed may be unpacked in any, long after
   it has ended.
"""

from __future__ import annotations

import enum
import functools
import threading
from typing import Protocol

import torch

from tierstore.training.activations.runtime.operator_mode import WatchedOperators
from tierstore.training.autograd.saved_tensors import AwayAlias, Delegated, Kept, in_packed, keep, restore
from tierstore.training.pytorch import saved_tensor_hooks
from tierstore.training.pytorch.function_modes import in_sight, out_of_sight
from tierstore.training.pytorch.saved_tensor_hooks import (
    Hook,
    InForce,
    Inside,
    bring_into_force,
    chain,
    take_out_of_force,
    top_hooks,
    whose,
)
from tierstore.uncompiled import uncompiled


class PackedTensor(Protocol):
    """What stands for a saved tensor."""

    def tensor(self) -> torch.Tensor:
        """Return the tensor, or a view that is the same.  From any thread; blocks until its bytes are there.

        Raises:
            RuntimeError: it was changed in place since; the text is PyTorch's.
        """
        ...


class Turn(enum.IntEnum):
    """When a policy is asked."""

    RECOMPUTE = enum.auto()  # what is made again need not be kept anywhere
    SWAP = enum.auto()


class SavePolicy(Protocol):
    """Takes some of the tensors that a graph saves.

    Attributes:
        turn: when it is asked.
        is_for_repetition: whether what it leaves to others now is wanted by something that runs again.
    """

    turn: Turn

    @property
    def is_for_repetition(self) -> bool:
        """See above."""
        ...

    def lets_see(self, hook: Hook) -> bool:
        """Say whether a hook of others that was in force before sees first what is saved."""
        ...

    def pack(self, tensor: torch.Tensor) -> PackedTensor | None:
        """Return what the graph refers to instead of ``tensor``; ``None``: the next is asked."""
        ...


class PolicyHooks(Inside):
    """A pair of hooks that is in force.

    Attributes:
        policies: that are asked, in order.
    """

    def __init__(self, operators: WatchedOperators) -> None:
        self.policies: tuple[SavePolicy, ...] = ()
        self.outer = top_hooks()
        self._operators = operators
        self._first: tuple[SavePolicy, ...] = ()
        self._after_others: tuple[SavePolicy, ...] = ()
        self._in_force: InForce | None = None

    @property
    def is_for_repetition(self) -> bool:  # type: ignore[override]
        """See `Inside`."""
        return any(each.is_for_repetition for each in self.policies)

    def begin(self) -> None:
        """Come into force in this thread."""
        self._in_force = bring_into_force(self, unpack)

    def end(self) -> None:
        """Be in force no more."""
        in_force, self._in_force = self._in_force, None
        if in_force is not None:
            take_out_of_force(in_force)

    def ask(self, *policies: SavePolicy) -> None:
        """Ask these from now on, in the order of their turns."""
        self.policies = tuple(sorted(policies, key=lambda each: each.turn))
        outer = self.outer
        shown = [each for each in self.policies if outer is not None and each.lets_see(outer[0])]
        self._after_others = tuple(shown)
        self._first = tuple(each for each in self.policies if each not in self._after_others)

    def first_of(self, kind: type) -> SavePolicy | None:
        """Return the policy of a kind that is asked first."""
        for each in self.policies:
            if type(each) is kind:
                return each
        return None

    @uncompiled
    def __call__(self, tensor: torch.Tensor) -> object:
        """Return what is kept instead of ``tensor``."""
        with self._operators.unwatched(), out_of_sight():
            for policy in self._first:
                taken = policy.pack(tensor)
                if taken is not None:
                    return taken
            if self.outer is None:
                return keep(tensor)
            pack, unpack_others = self.outer
            with in_sight():
                packed = pack(tensor)
            for policy in self._after_others:
                packed = in_packed(torch.Tensor, functools.partial(_taken, policy), packed)
            return Delegated(packed, unpack_others)


def _taken(policy: SavePolicy, tensor: torch.Tensor) -> torch.Tensor | AwayAlias:
    """Return what others keep in the place of a tensor that they have packed."""
    packed = policy.pack(tensor)
    return tensor if packed is None else AwayAlias(packed.tensor)


@uncompiled
def unpack(packed: object) -> torch.Tensor:
    """Return the tensor that was packed.

    Raises:
        RuntimeError: it was changed in place since; the text is PyTorch's.
    """
    with out_of_sight():
        if isinstance(packed, Delegated):
            packed = Delegated(in_packed(AwayAlias, lambda away: away.bring(), packed.packed), packed.unpack)
        if isinstance(packed, Kept | Delegated):
            return restore(packed)
        stands_in: PackedTensor = packed  # type: ignore[assignment]  # what a policy has returned
        return stands_in.tensor()


class SavedActivations(threading.local):
    """The policies that are asked in a thread while it runs a model.

    Args:
        operators: of the model.
    """

    def __init__(self, operators: WatchedOperators) -> None:
        self._operators = operators
        self._pairs: list[PolicyHooks] = []

    def begin(self, policy: SavePolicy) -> None:
        """Ask a policy from now on."""
        owners = list(map(whose, chain()))
        pair = next((each for each in reversed(self._pairs) if any(own is each for own in owners)), None)
        if pair is None:
            pair = PolicyHooks(self._operators)
            self._pairs.append(pair)
            pair.begin()
        pair.ask(policy, *pair.policies)

    def end(self, policy: SavePolicy) -> None:
        """Ask a policy no more."""
        pair = self._pair_of(policy)
        if pair is not None:
            pair.ask(*(each for each in pair.policies if each is not policy))
            if not pair.policies:
                self._pairs.remove(pair)
                pair.end()

    def asks(self, policy: SavePolicy) -> bool:
        """Say whether what is saved now comes to a policy, and to no other of its kind before."""
        top = top_hooks()
        # Asked for every operator that is marked, and nearly always of hooks of ours that are the last ones.
        if top is not None and isinstance(top[0], PolicyHooks):
            found = top[0].first_of(type(policy))
            if found is not None:
                return found is policy
        for owner in map(whose, chain()):
            found = owner.first_of(type(policy)) if isinstance(owner, PolicyHooks) else None
            if found is not None:
                return found is policy
        return False

    def is_for_repetition(self, policy: SavePolicy) -> bool:
        """Say whether what a policy is asked for is wanted by something that runs again."""
        return saved_tensor_hooks.is_for_repetition(self._pair_of(policy))

    def _pair_of(self, policy: SavePolicy) -> PolicyHooks | None:
        return next((each for each in self._pairs if any(own is policy for own in each.policies)), None)
