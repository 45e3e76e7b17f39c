"""One tree of errors; the branch says whose move it is.

Every error carries fields beside its text, so that programs need not parse messages: ``key``,
``tier``, ``needed_bytes``, ``free_bytes`` and ``holders`` (``None`` or empty where they do not
apply).  Messages say what was tried, on what, with which numbers, and what to do next.
"""

from __future__ import annotations

from collections.abc import Sequence


class TierStoreError(Exception):
    """The root of everything that tierstore raises on purpose."""

    def __init__(
        self,
        message: str = "",
        *,
        key: str | None = None,
        tier: str | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        holders: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.key = key
        self.tier = tier
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.holders = tuple(holders)

    def __str__(self) -> str:
        """Return the message alone: ``KeyError`` would print its representation."""
        return str(self.args[0]) if self.args else ""


class UsageError(TierStoreError):
    """The caller's move: the call is wrong; nothing was changed."""


class KeyNotFound(UsageError, KeyError):
    """Nothing was put under the key, or it was dropped."""


class KeyExists(UsageError):
    """A ``put`` without ``replace=True`` on a key that is there."""


class LeaseError(UsageError):
    """Another lease on the key forbids the call; ``holders`` names them."""


class ConfigError(UsageError, ValueError):
    """A configuration is wrong: the message lists every fault with what is accepted."""


class NotResident(UsageError):
    """The bytes of a lease were asked for after its release: they may have left its tier."""


class CapacityError(TierStoreError):
    """Nobody's fault: there is no room, and none can be made.  Free, wait or enlarge."""


class BackendError(TierStoreError):
    """The hardware's move: a medium failed.  The cause is attached.

    Args:
        transient: whether the same call may succeed when tried again.
    """

    def __init__(
        self,
        message: str = "",
        *,
        transient: bool = False,
        key: str | None = None,
        tier: str | None = None,
        needed_bytes: int | None = None,
        free_bytes: int | None = None,
        holders: Sequence[str] = (),
    ) -> None:
        super().__init__(
            message, key=key, tier=tier, needed_bytes=needed_bytes, free_bytes=free_bytes, holders=holders
        )
        self.transient = transient


class IntegrityError(BackendError):
    """Bytes came back different from what was written."""


class StoreClosed(TierStoreError):
    """Too late: the store was closed."""


class StoreForked(StoreClosed):
    """Too late in this process: it was forked from the one that the store or run belongs to."""


class InvariantError(TierStoreError):
    """Our move: a bug in tierstore.  The message carries the key's story."""
