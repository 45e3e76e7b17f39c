"""What an activation store has under one key: who may still ask for the bytes, and who uses them now.

1. Every device stream that the bytes are taken on uses their lease: it waits for them, and what it was told
   while they were lent is done before they are freed, whoever ends the lease, wherever.
2. What is lent is a storage of its own over the leased memory.  So its use count tells who got the bytes
   here, and not who else refers to memory that the program has handed over.
3. The lease ends when nobody refers to that storage any more.

Knows no store: who lends brings a lease.
"""

from __future__ import annotations

import enum
import sys
import weakref
from collections.abc import Callable, Sequence

import torch
from torch.utils import dlpack

from tierstore.leases import Lease
from tierstore.torch_private import storage_use_count
from tierstore.training import locks
from tierstore.training.locks import Rank


class StayOnDevice(enum.Enum):
    """What is known of the bytes' stay on the device, and what the next one to take them counts as."""

    UNTAKEN = "handed_over"  # not taken since they were kept, or began to leave; not seen to be away
    TAKEN = ""  # taken before: no more is counted
    AWAY = "brought"  # seen to be away, and counted as released


_MOVES = {
    (StayOnDevice.UNTAKEN, StayOnDevice.TAKEN),  # taken before they had left
    (StayOnDevice.UNTAKEN, StayOnDevice.AWAY),  # seen to have left
    (StayOnDevice.AWAY, StayOnDevice.TAKEN),  # brought and taken
    (StayOnDevice.AWAY, StayOnDevice.UNTAKEN),  # brought, and begin to leave once more
    (StayOnDevice.TAKEN, StayOnDevice.UNTAKEN),  # begin to leave, for another pass
    (StayOnDevice.TAKEN, StayOnDevice.AWAY),  # a quota sent them down
}


class StorageUser(weakref.ref[object]):
    """Somebody who may ask for the bytes of an offloaded storage, as long as it lives.

    Attributes:
        offloaded_storage: whose.
        turn: the offloaded storage's turn in which it took them last.
    """

    __slots__ = ("offloaded_storage", "turn")

    offloaded_storage: OffloadedStorage
    turn: int


class OffloadedStorage:
    """What one key has in the store.

    Attributes:
        key: in the store.
        nbytes: of what is kept.
        version: of what was kept.
        below: where the bytes go when they leave the device: to the first of these tiers that takes them.
        lock: guards all that follows; held while hardware is waited for.
        users: by id, who may ask for the bytes, and those whose end nobody has taken note of yet.
        turn: how often the bytes were sent down so far.
        stay: what is known of their stay on the device, for what is counted.
    """

    __slots__ = (
        "_baseline",
        "_flat",
        "_lease",
        "below",
        "key",
        "lock",
        "nbytes",
        "stay",
        "turn",
        "users",
        "version",
    )

    def __init__(self, nbytes: int, version: int, below: Sequence[str]) -> None:
        self.key = ""
        self.nbytes = nbytes
        self.version = version
        self.below = below
        self.lock = locks.new_lock(Rank.OFFLOADED_STORAGE)
        self.users: dict[int, StorageUser] = {}
        self.turn = 0
        self.stay = StayOnDevice.UNTAKEN
        self._lease: Lease | None = None
        self._flat: torch.Tensor | None = None
        self._baseline = 0

    def move(self, stay: StayOnDevice) -> None:
        """Take in what became of the bytes; nothing may have."""
        assert stay is self.stay or (self.stay, stay) in _MOVES, (self.stay, stay)
        self.stay = stay

    def admit(self, owner: object, note_end: Callable[[StorageUser], None]) -> StorageUser:
        """Let ``owner`` ask for the bytes; when it has died, ``note_end`` is told, anywhere."""
        user = StorageUser(owner, note_end)
        user.offloaded_storage, user.turn = self, -1
        self.users[id(user)] = user
        return user

    @property
    def is_leased(self) -> bool:
        """Whether a lease is held."""
        return self._lease is not None

    @property
    def has_been_taken_by_all(self) -> bool:
        """Whether every user that is left took the bytes since they were last sent down."""
        return {user.turn for user in list(self.users.values())} == {self.turn}

    def lend(self, lease: Callable[[], Lease]) -> torch.Tensor:
        """Return the bytes, for the current stream; ``lease`` is asked for a lease if there is none."""
        if self._lease is None:
            self._lease = lease()
        else:
            self._lease.use()
        if self._flat is None:
            flat = dlpack.from_dlpack(dlpack.to_dlpack(self._lease.tensor))  # type: ignore[attr-defined]
            self._baseline = _references(flat)
            self._flat = flat
        return self._flat

    def let_go(self) -> bool:
        """End the lease unless somebody uses the bytes; return whether none is held.

        What was begun is gone on with by the next call, if this one is interrupted.
        """
        if self._flat is not None and _references(self._flat) > self._baseline:
            return False
        self._flat = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        return True


def _references(flat: torch.Tensor) -> int:
    """Count who refers to the memory of ``flat``: tensors, and users of the storage object itself."""
    storage = flat.untyped_storage()
    return storage_use_count(storage._cdata) + sys.getrefcount(storage)  # noqa: SLF001
