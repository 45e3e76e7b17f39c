"""The life of one replica: one key's bytes in one tier.

Rule 1: every change of state goes through `Replica.step`, by the table below.
Rule 2: bytes stay charged to the tier from ``RESERVE`` until ``FREED``, so the books never call
memory free that the hardware may still touch.

Knows nothing of quotas, policies or who wants what.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from tierstore.core.messages import ReplicaId
from tierstore.errors import InvariantError

if TYPE_CHECKING:
    from tierstore.core.entry import Entry


class ReplicaState(enum.Enum):
    """What may be done with a replica's bytes."""

    ABSENT = enum.auto()  # nothing: there are none
    FILLING = enum.auto()  # nothing: exactly one copy is writing them, or is about to
    READY = enum.auto()  # read, lease, copy from
    DRAINING = enum.auto()  # finish what was begun; nothing new may start
    RETAINED = enum.auto()  # nothing: only a commit names them, and they are found if the power fails

    __hash__ = object.__hash__  # an enum's own is a call into Python, for every step


class ReplicaStep(enum.Enum):
    """What can happen to a replica."""

    RESERVE = enum.auto()  # room was charged for it
    FILLED = enum.auto()  # its copy ended well
    FAILED = enum.auto()  # its copy ended badly, or found no room in the medium
    DROP = enum.auto()  # nobody needs these bytes any more
    RETAIN = enum.auto()  # nobody is busy with the bytes any more, but a commit names them
    RELEASE = enum.auto()  # no commit names the bytes any more
    FREED = enum.auto()  # the backend gave the bytes back

    __hash__ = object.__hash__  # as above


TABLE: dict[tuple[ReplicaState, ReplicaStep], ReplicaState] = {
    (ReplicaState.ABSENT, ReplicaStep.RESERVE): ReplicaState.FILLING,
    (ReplicaState.FILLING, ReplicaStep.FILLED): ReplicaState.READY,
    (ReplicaState.FILLING, ReplicaStep.FAILED): ReplicaState.DRAINING,
    (ReplicaState.FILLING, ReplicaStep.DROP): ReplicaState.DRAINING,
    (ReplicaState.READY, ReplicaStep.DROP): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaStep.RETAIN): ReplicaState.RETAINED,
    (ReplicaState.RETAINED, ReplicaStep.RELEASE): ReplicaState.DRAINING,
    (ReplicaState.DRAINING, ReplicaStep.FREED): ReplicaState.ABSENT,
}


class Replica:
    """One key's bytes in one tier, and who is busy with them.

    Attributes:
        entry: whose bytes.
        place: names them for those who have them, whatever key they are under.
        tier: index of the tier.
        charge_bytes: what the tier is charged while the replica is not ``ABSENT``; once its copy has
            ended, what the medium really holds for it.
        leases: how many leases hold it; it is not dropped while there are any.
        readers: how many copies and gets read it; it is not freed while there are any.
        copy: the number of the copy that writes it, if one does; it is not freed meanwhile.
        promises: how many commits and flushes count on finding it; it is not freed while there are any.
    """

    __slots__ = (
        "charge_bytes",
        "copy",
        "entry",
        "leases",
        "place",
        "promises",
        "readers",
        "state",
        "tier",
    )

    def __init__(self, entry: Entry, place: ReplicaId, charge_bytes: int) -> None:
        self.entry = entry
        self.place = place
        self.tier = place.tier
        self.charge_bytes = charge_bytes
        self.state = ReplicaState.ABSENT
        self.leases = 0
        self.readers = 0
        self.copy: int | None = None
        self.promises = 0

    @property
    def key(self) -> str:
        """The key whose bytes these are."""
        return self.entry.key

    @property
    def is_idle(self) -> bool:
        """Whether nobody holds, reads or writes the bytes, so that they may be freed."""
        return not (self.leases or self.readers or self.copy is not None)

    def step(self, step: ReplicaStep) -> None:
        """Change the state.

        Raises:
            InvariantError: the table has no such step.
        """
        try:
            self.state = TABLE[self.state, step]
        except KeyError:
            raise InvariantError(
                f"replica of {self.key!r} in tier {self.tier} cannot take {step.name} "
                f"while {self.state.name}. This is a bug in tierstore.",
                key=self.key,
            ) from None
