"""What stays in the fastest tier from step to step, in a run and in one that is simulated.

1. What a placement names stays, and nothing where it names none.
2. Where it leaves that open it is chosen when a step has run, and anew when there is another room.  While it
   is not known what room there is, nothing stays, and nothing goes for what would.
3. Where optimizers step it is `tierstore.planning.staying`'s to say, and where backward steps it is
   `tierstore.planning.residents_in_backward`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction

from tierstore.planning.placement import Placement
from tierstore.planning.residents import Staying, Trained
from tierstore.planning.residents_in_backward import KeptInBackward, choose_in_backward, stay_in_backward
from tierstore.planning.staying import choose_staying, is_another_room


class ResidentChoice:
    """Chooses what stays, and has what was chosen last.

    Args:
        placement: that says what stays, or leaves it open.
        room_bytes: returns what of the fastest tier can be kept from step to step; 0: it is not known yet.
        low_share: returns the share of that room down to which the tier writes back early.
        in_backward: whether backward steps.

    Attributes:
        residents: keys of bundles that stay with their state, and where backward steps perhaps without.
        without_state: those of them whose state does not.
    """

    def __init__(
        self,
        placement: Placement,
        room_bytes: Callable[[], int],
        low_share: Callable[[], float],
        *,
        in_backward: bool,
    ) -> None:
        self.residents = placement.residents or frozenset[str]()
        self.without_state = placement.residents_without_state
        self.is_open = placement.residents is None
        self._room_bytes = room_bytes
        self._low_share = low_share
        self._in_backward = in_backward
        self._chosen_bytes: int | None = None  # the room that was chosen for

    @property
    def is_stale(self) -> bool:
        """See `tierstore.planning.deciding.ResidentChooser.is_stale`."""
        return self.is_open and is_another_room(self._chosen_bytes, self._room_bytes())

    def choose(
        self, trained: Mapping[str, Trained], accesses: Sequence[str], sizes: Mapping[str, int]
    ) -> Staying:
        """Return what stays.

        Args:
            trained: all bundles that a step used, by key, first use first.
            accesses: the keys that it used, first use first.
            sizes: in bytes, of each of the keys in ``trained``.
        """
        room_bytes = self._room_bytes()
        if self.is_open:
            self._chosen_bytes = room_bytes
        if not room_bytes or not (self.is_open or self.residents):
            return Staying()
        if self._in_backward:
            return self._stay_in_backward(list(trained.values()), room_bytes)
        if not self.is_open:
            return Staying(frozenset(self._named(trained)))
        # Where no gradients are the store's there is room for all of them beside it.
        are_beside = not any(each.gradients for each in trained.values())
        stepped = {
            key for key, each in trained.items() if (each.is_trained if are_beside else each.gradients)
        }
        able = [each for key, each in trained.items() if key in stepped and each.may_stay]
        passing = (each.kept_bytes for key, each in trained.items() if key not in stepped)
        keys = choose_staying(able, accesses, sizes, room_bytes, max(passing, default=0))
        self.residents = frozenset(key for key in trained if keys.issuperset(trained[key].keys))
        return Staying(keys)

    def _named(self, trained: Mapping[str, Trained]) -> Iterator[str]:
        for key in self.residents & trained.keys():
            yield from (*trained[key].keys, *trained[key].gradients)

    def _stay_in_backward(self, trained: Sequence[Trained], room_bytes: int) -> Staying:
        """Do so where backward steps: parameters may stay without their state."""
        if self.is_open:
            low_bytes = math.floor(Fraction(self._low_share()) * room_bytes)
            kept = choose_in_backward(trained, room_bytes, low_bytes)
            self.residents, self.without_state = kept.bundles, kept.without_state
        return stay_in_backward(trained, KeptInBackward(self.residents, self.without_state), room_bytes)
