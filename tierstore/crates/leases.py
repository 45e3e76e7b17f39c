"""A lease on small tensors as its holder sees it.  Knows no store: it is told how to end."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from tierstore import forks
from tierstore.crates import layout
from tierstore.crates.index import CrateUse
from tierstore.errors import KeyNotFound, NotResident, UsageError
from tierstore.signals import in_one_piece, let_wait, uninterrupted


class CrateLease:
    """Small tensors that stay ready in one tier while the lease is held: views of their crates.

    A context manager; it is held from the call of `Crates.lease` until the block ends or `release`.

    Args:
        use: of the records, with a lease of the store.
        end: ends the use, given whether bytes were written; called once.
    """

    def __init__(self, use: CrateUse, end: Callable[[CrateUse, bool], None]) -> None:
        self._use = use
        self._end = end
        self._is_held = True
        self._process = forks.here()

    def __getitem__(self, key: str) -> torch.Tensor:
        """Return the tensor of ``key``, without a copy.  Do not use it after the release.

        Raises:
            NotResident: the lease was released.
            KeyNotFound: it is on other keys.
        """
        forks.require_here(self._process, "the lease")
        lease = self._use.lease
        if not self._is_held or lease is None:
            raise NotResident("the lease was released; the bytes it showed may be gone.", key=key)
        try:
            crate, record = self._use.records[key]
        except KeyError:
            raise KeyNotFound(
                f"{key!r} is not one of the {len(self._use.records)} keys of this lease.", key=key
            ) from None
        return layout.view(lease[crate.name], record)

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor of a lease on one key."""
        if self._is_held and len(self._use.records) != 1:
            raise UsageError(f"lease.tensor needs a lease on one key, not on {len(self._use.records)}.")
        return self[next(iter(self._use.records))]

    def use(self) -> None:
        """Let the calling thread's current device stream use the bytes as well: see `tierstore.Lease.use`.

        Raises:
            NotResident: the lease was released.
        """
        lease = self._use.lease
        if not self._is_held or lease is None:
            raise NotResident("the lease was released; no stream can use its bytes any more.")
        lease.use()

    @in_one_piece
    def release(self, *, written: bool = True) -> None:
        """End the lease.  A second call does nothing, nor does one in the child of a fork.

        Args:
            written: for a write lease, whether the bytes were changed.
        """
        if self._is_held and self._process is forks.here():
            self._is_held = False
            self._end(self._use, written)

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
