"""What a program uses for the first time after it was measured: it was in no peak.

An expert that no token was sent to before, an optimizer that steps every tenth time, a layer that is trained
from now on.

1. Bundles are used in forward and backward, and stepped; parameters are trained.  Each is known as such once
   it was in a use of the model that was measured.
2. What is not known may take anything, and so may more that is used together than ever was in a use that was
   measured.  The uses that follow are measured, so that it is known if it comes again soon, as is what else
   comes with it.
3. A use counts for all of them if all that is known was used in it.
4. A bundle's first step makes its state, and takes more than those that follow.  So uses are measured until
   all that was stepped was stepped again, and what first steps took counts until then.

Pure: no torch, threads, clocks or files.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from tierstore.planning.deciding.lessons import MARGIN

_USES_TO_MEASURE = 16
"""How many uses are measured after one in which something was met, and at the beginning at most."""


@dataclass(frozen=True, slots=True)
class StepPeak:
    """What optimizers' steps took of a device.

    Attributes:
        program_bytes: the most that the program had.
        more_bytes: the most that it had beside what was there when an optimizer began.
    """

    program_bytes: int = 0
    more_bytes: int = 0

    def at_least(self, other: StepPeak) -> StepPeak:
        """Return the most of both."""
        return StepPeak(max(self.program_bytes, other.program_bytes), max(self.more_bytes, other.more_bytes))

    def times(self, elements: int, former_elements: int) -> StepPeak:
        """Return what they will take with so many times as large inputs, which are there meanwhile."""
        return replace(self, program_bytes=self.program_bytes * elements // max(1, former_elements))


class Role(enum.Enum):
    """What something has to do with a step."""

    USED = enum.auto()  # in forward and backward, together
    TRAINED = enum.auto()  # what is made for it in forward is kept for backward, together
    STEPPED = enum.auto()  # by an optimizer, one bundle after another as a rule

    __hash__ = object.__hash__  # an enum's own is a call into Python, for every use


class _Keys:
    """What was used in one role."""

    def __init__(self) -> None:
        self.known: set[Hashable] = set()  # in uses that were measured
        self.used: dict[Hashable, int] = {}  # in the use that is measured, with their bytes
        self.now: set[Hashable] = set()  # in this use
        self.now_bytes = 0
        self.most = 0  # keys in a use that was measured
        self.most_bytes = 0

    def begin(self) -> None:
        """A use begins."""
        self.now.clear()
        self.now_bytes = 0

    def take_in(self, keys: Mapping[Hashable, int]) -> None:
        """Keys are used in this use."""
        for key, nbytes in keys.items():
            if key not in self.now:
                self.now.add(key)
                self.now_bytes += nbytes

    @property
    def are_more(self) -> bool:
        """Whether this use is larger than those that were measured, by more than steps differ."""
        return len(self.now) > self.most * MARGIN or self.now_bytes > self.most_bytes * MARGIN

    def conclude(self) -> None:
        """A use was measured to its end."""
        self.known |= self.used.keys()
        self.most = max(self.most, len(self.used))
        self.most_bytes = max(self.most_bytes, sum(self.used.values()))
        self.used.clear()


class FirstUses:
    """Knows what was used, trained and stepped when a program was measured."""

    def __init__(self) -> None:
        self._keys = {role: _Keys() for role in Role}
        self._met: set[Role] = set()
        self._has_met_any = False
        self._stepped_again: set[Hashable] = set()
        self._first_step = self._step_again = StepPeak()
        self._uses_to_measure = _USES_TO_MEASURE

    @property
    def are_to_be_measured(self) -> bool:
        """Whether uses are measured: something was met lately, or was stepped once."""
        return self._uses_to_measure > 0 and (self._has_met_any or not self._was_stepped_again)

    @property
    def _was_stepped_again(self) -> bool:
        return self._keys[Role.STEPPED].known <= self._stepped_again

    @property
    def step_peak(self) -> StepPeak:
        """What steps take."""
        first = StepPeak() if self._was_stepped_again else self._first_step
        return self._step_again.at_least(first)

    def begin_use(self) -> None:
        """A use begins: nothing was met in it."""
        self._met.clear()
        for keys in self._keys.values():
            keys.begin()

    def begin_measuring(self) -> None:
        """What is used from now on is measured."""
        for keys in self._keys.values():
            keys.used.clear()

    def take_in(self, role: Role, keys: Mapping[Hashable, int], *, is_measured: bool) -> bool:
        """Keys are used.

        Args:
            role: as what.
            keys: with their bytes.
            is_measured: whether this use is.

        Returns:
            whether all of them are known, and no more is used together than was.
        """
        found = self._keys[role]
        if is_measured:
            found.used.update(keys)
        if role is Role.STEPPED:
            return found.known.issuperset(keys)
        found.take_in(keys)
        return found.known.issuperset(keys) and not found.are_more

    def is_known(self, role: Role, key: Hashable) -> bool:
        """Say whether it was used so when the program was measured."""
        return key in self._keys[role].known

    def meet(self, role: Role) -> None:
        """Something is used so that is not known."""
        self._met.add(role)
        self._has_met_any = True
        self._uses_to_measure = _USES_TO_MEASURE

    def has_met(self, roles: Iterable[Role]) -> bool:
        """Say whether something that is not known was used so in this use."""
        return not self._met.isdisjoint(roles)

    def is_like_all(self, roles: Iterable[Role]) -> bool:
        """Say whether all that is known was used in the use that is measured."""
        return all(self._keys[role].known <= self._keys[role].used.keys() for role in roles)

    def take_in_step(self, peak: StepPeak, *, has_largest: bool) -> None:
        """Take in what the steps took of the use that is measured.

        Args:
            peak: of all of them.
            has_largest: whether it had the largest inputs of all.
        """
        is_alone = has_largest and self.is_like_all([Role.STEPPED])
        stepped = self._keys[Role.STEPPED]
        if stepped.used.keys() <= stepped.known:
            self._step_again = peak if is_alone else peak.at_least(self._step_again)
            self._stepped_again |= stepped.used.keys()
        else:
            self._first_step = peak if is_alone else peak.at_least(self._first_step)

    def grow(self, elements: int, former_elements: int) -> None:
        """Inputs are so many times as large from now on."""
        self._first_step = self._first_step.times(elements, former_elements)
        self._step_again = self._step_again.times(elements, former_elements)

    def conclude(self) -> None:
        """A use was measured to its end."""
        for keys in self._keys.values():
            keys.conclude()
        self._uses_to_measure = max(0, self._uses_to_measure - 1)
        self._has_met_any &= self._uses_to_measure > 0
