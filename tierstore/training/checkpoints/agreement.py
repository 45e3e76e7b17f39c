"""What a checkpoint has to do with other processes: nothing, unless there are some.

`tierstore.training.ranks` has the other answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol


class Attempt(Protocol):
    """One checkpoint that is being made.

    Attributes:
        keep: what the flush is told to keep the former checkpoint under; "": it is not kept.
        release: what it is told to release; "": nothing.
    """

    keep: str
    release: str

    def ready(self) -> Mapping[str, object]:
        """Everything is ready to be flushed: return what the document is to say of that.

        Raises:
            TierStoreError: another process makes no checkpoint.
        """
        ...


class Agreement(Protocol):
    """Who agrees with others about checkpoints."""

    @contextmanager
    def attempt(self, made: int) -> Iterator[Attempt]:
        """Return a context in which one is made; at its end it is made everywhere.

        Args:
            made: how many were made before, in all runs.

        Raises:
            TierStoreError: another process has not made it: the former one stays everywhere.
        """
        ...

    def forget_former(self) -> None:
        """The last attempt has ended well everywhere: the former checkpoint may go."""
        ...


class OneProcess:
    """An `Agreement` where there is nobody to agree with, and its `Attempt`."""

    keep = ""
    release = ""

    @contextmanager
    def attempt(self, made: int) -> Iterator[Attempt]:
        """See `Agreement.attempt`."""
        del made
        yield self

    def ready(self) -> Mapping[str, object]:
        """See `Attempt.ready`."""
        return {}

    def forget_former(self) -> None:
        """See `Agreement.forget_former`."""
