"""Which policy takes what a graph saves, beside hooks of users, against what each of them says."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tierstore.training.activations.runtime.operator_mode import WatchedOperators
from tierstore.training.activations.runtime.saved_activations import SavedActivations, Turn
from tierstore.training.pytorch.saved_tensor_hooks import top_hooks


@dataclass(eq=False)
class Packed:
    """What a policy has taken."""

    policy: Policy
    value: Tensor

    def tensor(self) -> Tensor:
        """Give it back."""
        self.policy.given_back += 1
        return self.value


class Policy:
    """Takes what is as long as it says.

    Args:
        turn: when it is asked.
        numel: of what it takes.
        shows: whether hooks of users see it first.
    """

    is_for_repetition = False

    def __init__(self, turn: Turn, numel: int, shows: bool) -> None:
        self.turn, self.numel, self.shows = turn, numel, shows
        self.taken = self.given_back = 0

    def lets_see(self, hook: Callable[..., object]) -> bool:
        """Say so of hooks of users, not of those of other pairs."""
        return self.shows and hook.__module__ == __name__

    def pack(self, tensor: Tensor) -> Packed | None:
        """Take it if it is as long."""
        if tensor.numel() != self.numel:
            return None
        self.taken += 1
        return Packed(self, tensor.detach())


@dataclass
class Users:
    """Hooks of a user, which count what they see."""

    seen: list[int]

    def pack(self, tensor: Tensor) -> tuple[Tensor]:
        """See a tensor."""
        self.seen.append(tensor.numel())
        return (tensor,)


policies = st.builds(Policy, st.sampled_from(Turn), st.sampled_from([2, 3, 4]), st.booleans())
LONG = (2, 3, 4, 5)


def _run(lengths: Sequence[int]) -> list[Tensor]:
    leaves = [torch.full((n,), 0.5, requires_grad=True) for n in lengths]
    torch.stack([leaf.exp().sum() for leaf in leaves]).sum().backward()
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


@given(st.lists(policies, max_size=4), st.booleans(), st.lists(policies, max_size=3))
def test_each_tensor_is_taken_once_in_the_order_of_turns_and_nothing_is_left_in_force(
    below: Sequence[Policy], is_user_between: bool, above: Sequence[Policy]
) -> None:
    saved = SavedActivations(WatchedOperators())
    user = Users([])
    with contextlib.ExitStack() as inside:
        for policy in below:
            saved.begin(policy)
            inside.callback(saved.end, policy)
        if is_user_between:
            inside.enter_context(saved_tensors_hooks(user.pack, lambda packed: packed[0]))
        for policy in above:
            saved.begin(policy)
            inside.callback(saved.end, policy)
        found = _run(LONG)
    assert top_hooks() is None
    assert all(map(torch.equal, found, _run(LONG)))
    asked = _order(above if is_user_between else [*below, *above])
    if is_user_between:
        asked.sort(key=lambda each: each.shows)
    for n in LONG:
        taker = next((each for each in asked if each.numel == n), None)
        for each in (*below, *above):
            expected = int(each is taker) if each.numel == n else each.taken
            assert each.taken == each.given_back == expected
        if is_user_between:
            assert user.seen.count(n) == (taker is None or taker.shows)


def _order(policies: Sequence[Policy]) -> list[Policy]:
    """Return policies in the order of their turns, of those with one turn the last first."""
    return [each for turn in Turn for each in reversed(policies) if each.turn is turn]
