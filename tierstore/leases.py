"""A lease as its holder sees it: tensors that stay ready while it is held.

Knows no store: it is told how to end and how to split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import torch

from tierstore import forks
from tierstore.core.messages import ReplicaId
from tierstore.errors import KeyNotFound, NotResident, UsageError
from tierstore.signals import let_wait, uninterrupted


class Lease:
    """Tensors that stay ready in one tier while the lease is held.

    A context manager; it is held from the call of `Store.lease` until the block ends or `release`.

    Args:
        tensors: by key.
        places: by key, where they are.
        use: lets the calling thread's current device stream use the bytes.
        end: ends the lease, given whether bytes were written; called once.
        split: makes replicas keys of their own; returns whether it did.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        places: Mapping[str, ReplicaId],
        use: Callable[[], None],
        end: Callable[[bool], None],
        split: Callable[[Mapping[ReplicaId, str]], bool],
    ) -> None:
        self._tensors = tensors
        self._places = places
        self._use = use
        self._end = end
        self._split = split
        self._is_held = True
        self._process = forks.here()

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the tensor of ``key``, without a copy.  Do not use it after the release.

        Raises:
            NotResident: the lease was released.
            KeyNotFound: it is on other keys.
        """
        forks.require_here(self._process, "the lease")
        if not self._is_held:
            raise NotResident("the lease was released; the bytes it showed may be gone.", key=key)
        try:
            return self._tensors[key]
        except KeyError:
            raise KeyNotFound(f"{key!r} is not in this lease: {tuple(self._tensors)}", key=key) from None

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of a lease on one key."""
        if self._is_held and len(self._tensors) != 1:
            raise UsageError(f"lease.tensor needs a lease on one key, not on {len(self._tensors)}.")
        return self[next(iter(self._tensors), "")]

    @uninterrupted
    def use(self) -> None:
        """Let the calling thread's current device stream use the bytes as well.  Never blocks the host.

        The stream waits for them, and what it has been told when the lease ends is done before they go.  So
        it is from the beginning with the stream on which the lease was taken, and with the one on which it
        is released.  Nothing happens for a stream that uses them already, or where the device has no streams.

        Raises:
            NotResident: the lease was released.
        """
        forks.require_here(self._process, "the lease")
        if not self._is_held:
            raise NotResident("the lease was released; no stream can use its bytes any more.")
        self._use()

    @uninterrupted
    def release(self, *, written: bool = True) -> None:
        """End the lease.  A second call does nothing.

        In the child of a fork it does nothing, either: the lease is the parent's.

        Args:
            written: for a write lease, whether the bytes were changed; if not, the other replicas
                stay valid.
        """
        if self._is_held and self._process is forks.here():
            self._is_held = False
            self._tensors = {}
            self._end(written)

    def split(self, names: Mapping[str, str]) -> bool:
        """Make the leased replicas keys of their own, with the same bytes.  For write leases; moves no bytes.

        The lease goes on with the new keys; the former ones keep their other replicas and are free to
        be used.  So new bytes can be written beside the old ones, until `Store.rename` lets them take
        their place, all at once, or `Store.drop` forgets them.  Blocks while copies of the keys are under
        way, as they could fail yet: on a device whose copies are in stream order a lease begins before that.

        Args:
            names: the new key for each key of the lease that is to be split.

        Returns:
            False, and nothing was changed, if a key has no other ready replica, or the copy of one failed.

        Raises:
            KeyNotFound: a key is not in the lease.
            UsageError: the lease is for reading, or was released.
            KeyExists: a new key is there.
        """
        forks.require_here(self._process, "the lease")
        for key in names:
            self[key]
        return self._split({self._places[key]: name for key, name in check_names(names).items()})

    @let_wait
    def __enter__(self) -> Self:
        """Return the lease itself."""
        return self

    @uninterrupted
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Release it."""
        self.release()


def check_key(key: object) -> str:
    """Return ``key`` if it can be one.

    Raises:
        UsageError: it is not text.
    """
    if not isinstance(key, str):
        raise UsageError(f"a key is text, not {type(key).__name__}: {key!r}.")
    return key


def check_names(names: Mapping[str, str]) -> dict[str, str]:
    """Return ``names`` if both sides of it can be keys.

    Raises:
        UsageError: one is not text.
    """
    return {check_key(key): check_key(name) for key, name in names.items()}
