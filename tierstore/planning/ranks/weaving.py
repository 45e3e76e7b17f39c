"""A program with collectives woven in: moments of their own before and after those that it has.

1. One moment begins a collective; one awaits it; what comes of it is made in the one after that.
2. Moments that are woven in have names that no other has, take no time and belong to no layer.
3. Windows that span several moments span what is woven in between as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from tierstore.planning.program import ByteKind, Datum, Does, KeyUse, Moment, Phase, Program
from tierstore.planning.ranks.collectives import Collective, RankNetwork
from tierstore.planning.simulating.exchanges import Exchange, Exchanges


class Weaving:
    """Gathers what is woven into a program.

    Args:
        program: of one rank, without collectives.
        network: that they are carried over.

    Attributes:
        collectives: by the name of the moment that begins them.
        data: of the program, and what is added.
    """

    def __init__(self, program: Program, network: RankNetwork) -> None:
        self._program = program
        self._network = network
        self._names = {moment.name for moment in program.moments}
        self._before: dict[int, list[Moment]] = {}
        self._after: dict[int, list[Moment]] = {}
        self._begun: dict[str, Exchange] = {}
        self._awaited: dict[str, str] = {}
        self.collectives: dict[str, Collective] = {}
        self.data: dict[str, Datum] = dict(program.data)

    # --- adding -------------------------------------------------------------------------------

    def workspace(self, key: str, nbytes: int) -> str:
        """Let there be a datum of the program's own; return its key."""
        self.data[key] = Datum(key, nbytes, ByteKind.WORKSPACE)
        return key

    def before(self, number: int, name: str, uses: Sequence[KeyUse] = ()) -> str:
        """Put a moment before one of the program's; return its name."""
        return self._put(self._before.setdefault(number, []), number, name, uses)

    def after(self, number: int, name: str, uses: Sequence[KeyUse] = ()) -> str:
        """Put a moment after one of the program's; return its name."""
        return self._put(self._after.setdefault(number, []), number, name, uses)

    def begin(self, moment: str, collective: Collective, after: str | None = None) -> None:
        """Let a moment begin a collective, when another one was computed."""
        self.collectives[moment] = collective
        self._begun[moment] = Exchange(collective.name, self._network.passages(collective), after)

    def await_in(self, moment: str, begun: str) -> None:
        """Let a moment await what another one has begun."""
        self._awaited[moment] = begun

    def _put(self, line: list[Moment], number: int, name: str, uses: Sequence[KeyUse]) -> str:
        again, unique = 1, name
        while unique in self._names:
            again += 1
            unique = f"{name} ({again})"
        self._names.add(unique)
        phase = self._program.moments[number].phase
        line.append(Moment(Phase.BETWEEN if phase is Phase.OPTIMIZER else phase, unique, tuple(uses)))
        return unique

    # --- what comes of it ---------------------------------------------------------------------

    def exchanges(self) -> Exchanges:
        """Return all collectives of a step."""
        return Exchanges(dict(self._begun), dict(self._awaited))

    def ordered(self, program: Program) -> tuple[Collective, ...]:
        """Return the collectives of a woven program in the order in which they are begun."""
        return tuple(
            self.collectives[moment.name] for moment in program.moments if moment.name in self.collectives
        )

    def woven(self, change: Callable[[int, Moment], Moment]) -> Program:
        """Return the program with all that was added.

        Args:
            change: returns each of the program's moments as it is to be, by its number.
        """
        numbers: dict[int, int] = {}
        moments: list[Moment] = []
        for number, moment in enumerate(self._program.moments):
            moments += self._before.get(number, ())
            numbers[number] = len(moments)
            moments.append(change(number, moment))
            moments += self._after.get(number, ())
        for number, at in numbers.items():
            moments[at] = _stretched(moments[at], number, numbers)
        return replace(self._program, data=self.data, moments=tuple(moments))


def _stretched(moment: Moment, number: int, numbers: Mapping[int, int]) -> Moment:
    """Return a moment whose windows span what was woven in before they close."""
    if all(use.moments == 1 for use in moment.uses):
        return moment
    most = len(numbers) - 1
    uses = tuple(
        replace(use, moments=numbers[min(number + use.moments - 1, most)] - numbers[number] + 1)
        for use in moment.uses
    )
    return replace(moment, uses=uses)


def made(*keys: str) -> list[KeyUse]:
    """Return that keys are made."""
    return [KeyUse(key, Does.MAKE) for key in keys]


def ended(*keys: str) -> list[KeyUse]:
    """Return that keys end."""
    return [KeyUse(key, Does.END) for key in keys]


def read(*keys: str) -> list[KeyUse]:
    """Return that keys are read."""
    return [KeyUse(key, Does.READ) for key in keys]
