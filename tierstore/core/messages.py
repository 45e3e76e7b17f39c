"""What the ledger is told (events) and what it answers (commands).

Plain data without behaviour.  *Request* numbers name what a caller waits for, *copy* numbers name a
movement of bytes, *places* name the bytes of one replica, and *tiers* are indices, fastest first.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierstore.core.model import Plan


class Urgency(enum.IntEnum):
    """Who goes first."""

    DEMAND = 0  # somebody stands and waits
    PREFETCH = 1  # somebody will need it
    WRITE_BACK = 2  # room is being made in good time

    __hash__ = int.__hash__  # an enum's own is a call into Python


class Access(enum.Enum):
    """What a lease is for."""

    READ = enum.auto()
    WRITE = enum.auto()


class ReplicaId(NamedTuple):
    """Names one replica's bytes from their reservation until they are freed, whatever key they are under."""

    replica: int  # a number that is never used again
    tier: int


# --- events: requests -------------------------------------------------------------------------


@dataclass(slots=True)
class PutRequested:
    """A caller brings ``nbytes`` for ``key``; ``tier`` None: the highest that can take them.

    ``spec`` is the caller's own description of the bytes; grants hand it back.
    """

    request: int
    key: str
    nbytes: int
    tier: int | None
    replace: bool
    spec: object = None


@dataclass(slots=True)
class LeaseRequested:
    """A caller wants the keys to stay ready in ``tier``; ``holder`` names it in messages."""

    request: int
    keys: Sequence[str]
    tier: int
    access: Access
    holder: str


@dataclass(slots=True)
class LeaseReleased:
    """The lease that request ``request`` was granted ends; ``written``: its bytes were changed."""

    request: int
    written: bool


@dataclass(slots=True)
class ReadRequested:
    """A caller wants to copy the key's bytes out, from wherever they are."""

    request: int
    key: str


@dataclass(slots=True)
class ReadDone:
    """The read that request ``request`` was granted has ended."""

    request: int


@dataclass(slots=True)
class FetchRequested:
    """A caller wants the keys in ``tier``; a ``PREFETCH`` is advice."""

    request: int
    keys: Sequence[str]
    tier: int
    urgency: Urgency


@dataclass(slots=True)
class EvictRequested:
    """A caller wants the keys at or below ``to`` (None: the tier below their fastest)."""

    request: int
    keys: Sequence[str]
    to: int | None


@dataclass(slots=True)
class FlushRequested:
    """A caller wants keys (None: every key) to survive a power loss.

    Attributes:
        request: its number.
        keys: which.
        keep: what was found under them before is found after it, too, under this and the key; "": not.
        release: what was kept under this before is kept no more; "": it is.
    """

    request: int
    keys: Sequence[str] | None = None
    keep: str = ""
    release: str = ""


class Found(NamedTuple):
    """A key that an earlier process made durable."""

    key: str
    nbytes: int
    charge_bytes: int
    spec: object


@dataclass(slots=True)
class RecordsRecovered:
    """The medium of ``tier`` holds what its last commit named.  Granted with one replica for each."""

    request: int
    tier: int
    found: Sequence[Found]


@dataclass(slots=True)
class DropRequested:
    """A caller forgets the keys."""

    keys: Sequence[str]


@dataclass(slots=True)
class SplitRequested:
    """Who holds the write lease ``lease`` wants replicas that it holds to be keys of their own.

    ``names`` are the new keys.  Granted with the replicas, or settled without: nothing was changed.  Copies
    of the replicas that are still under way are waited for.
    """

    request: int
    lease: int
    names: Mapping[ReplicaId, str]


@dataclass(slots=True)
class RenameRequested:
    """A caller wants what is under some keys to be found under others; ``replace``: that are there."""

    names: Mapping[str, str]
    replace: bool


@dataclass(slots=True)
class ResizeRequested:
    """A caller changes a tier's quota; ``high_bytes`` and ``low_bytes`` belong to the new one."""

    request: int
    tier: int
    capacity_bytes: int
    high_bytes: int
    low_bytes: int


@dataclass(slots=True)
class CloseRequested:
    """The caller is done: fail what waits, finish what moves."""

    request: int


@dataclass(slots=True)
class PlanFollowed:
    """From now on ``plan`` (or none) says what is used when."""

    plan: Plan | None


@dataclass(slots=True)
class Advanced:
    """The caller is at ``position`` of the plan."""

    position: int


# --- events: what the hardware did ------------------------------------------------------------


@dataclass(slots=True)
class CopyOrdered:
    """The target may be used by later work on its device; the source is still being read."""

    copy: int


@dataclass(slots=True)
class CopyRefused:
    """The target's medium has no room in this shape; nothing was reserved."""

    copy: int
    error: BaseException


@dataclass(slots=True)
class CopyDone:
    """A copy ended, with an error or without.

    ``charge_bytes`` is what the target takes of its medium, if that is not what it was charged: less,
    and a multiple of the tier's alignment.
    """

    copy: int
    error: BaseException | None = None
    charge_bytes: int | None = None


@dataclass(slots=True)
class CommitDone:
    """The commit ended: without an error, exactly what it was to leave survives."""

    commit: int
    error: BaseException | None = None


@dataclass(slots=True)
class Freed:
    """A backend gave a replica's bytes back, or could not."""

    place: ReplicaId
    error: BaseException | None = None


Event = (
    PutRequested
    | LeaseRequested
    | LeaseReleased
    | ReadRequested
    | ReadDone
    | FetchRequested
    | EvictRequested
    | FlushRequested
    | RecordsRecovered
    | DropRequested
    | SplitRequested
    | RenameRequested
    | ResizeRequested
    | CloseRequested
    | PlanFollowed
    | Advanced
    | CopyOrdered
    | CopyRefused
    | CopyDone
    | CommitDone
    | Freed
)


class Granted(NamedTuple):
    """One replica that a grant keeps READY."""

    key: str
    place: ReplicaId
    spec: object


# --- commands ---------------------------------------------------------------------------------


@dataclass(slots=True)
class StartCopy:
    """Reserve a slot in ``target`` and copy into it; ``source`` None: the caller of ``put`` does."""

    copy: int
    key: str
    nbytes: int
    source: ReplicaId | None
    target: ReplicaId
    request: int  # of the put, when source is None


@dataclass(slots=True)
class FreeSlot:
    """Give a replica's bytes back."""

    place: ReplicaId


@dataclass(slots=True)
class Grant:
    """A lease or a read may begin: ``replicas`` in the order of the keys."""

    request: int
    replicas: Sequence[Granted]


@dataclass(slots=True)
class Settle:
    """A request has ended, with an error or without."""

    request: int
    error: BaseException | None = None


@dataclass(slots=True)
class SetCapacity:
    """Tell a backend its new, smaller quota; its slots already fit."""

    tier: int
    capacity_bytes: int


@dataclass(slots=True)
class Commit:
    """Tell the medium of ``tier`` what survives from now on otherwise than before.

    Attributes:
        commit: its number.
        tier: which one.
        replicas: what is to be found under some keys.
        gone: keys under which nothing is; under all others is what was there.
    """

    commit: int
    tier: int
    replicas: Sequence[Granted]
    gone: Sequence[str] = ()


Command = StartCopy | FreeSlot | Grant | Settle | SetCapacity | Commit
