"""The life of one replica: one key's bytes in one tier.

Rule 1: every change of state goes through `tierstore.core.entry.Replica.step`, by the table below.
Rule 2: bytes stay charged to the tier from ``RESERVE`` until ``FREED``, so the books never call
memory free that the hardware may still touch.

Knows nothing of quotas, policies or who wants what.
"""

from __future__ import annotations

import enum


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
