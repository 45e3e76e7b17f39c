"""What a caller's request holds: from before it is asked until it is ended, whatever comes between."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from tierstore.core import messages as m
from tierstore.engine.transfer import Transfer
from tierstore.signals import uninterrupted

T = TypeVar("T")


class Asked(Protocol):
    """Who grants what is asked for."""

    def ask(self, event: m.Event, number: int, transfer: Transfer[Sequence[m.Granted]]) -> None:
        """Put a request to the books; what it comes to will be in the transfer."""
        ...

    def tell(self, outcome: m.Event) -> None:
        """Tell what something came to that a caller did."""
        ...


class Hold:
    """Replicas that a request is granted, and that are given back when it is ended.

    End it in the block that asks, and again where anything comes out of that: a second end does nothing::

        hold = Hold(engine, end)
        try:
            granted = hold.obtain(...)
            ...
            hold.end()
        except BaseException:
            hold.end()
            raise

    Args:
        asked: who grants.
        ending: what gives back what is granted.

    Attributes:
        is_ended: whether it was ended.
    """

    __slots__ = ("_asked", "_ending", "_transfer", "is_ended")

    def __init__(self, asked: Asked, ending: m.ReadDone | m.LeaseReleased) -> None:
        self._asked = asked
        self._ending = ending
        self._transfer: Transfer[Sequence[m.Granted]] | None = None
        self.is_ended = False

    def obtain(
        self,
        event: m.Event,
        number: int,
        keys: tuple[str, ...],
        waited: Callable[[float], None] | None = None,
    ) -> Sequence[m.Granted]:
        """Put a request to the ledger that grants replicas; return them.  Blocks.

        Args:
            event: the request.
            number: its number.
            keys: those that it is about.
            waited: told for how many seconds the call had to wait, if it had to.

        Raises:
            UsageError: the call is wrong; nothing was changed.
            TierStoreError: the request failed.
            BaseException: what a signal's handler raises, at any time.
        """
        self.ask(event, number, keys)
        return self.granted(waited)

    def ask(self, event: m.Event, number: int, keys: tuple[str, ...]) -> None:
        """Put a request to the ledger, once: `granted` has what it comes to.

        Raises:
            UsageError: the call is wrong; nothing was changed.
            StoreClosed: too late.
        """
        self._transfer = Transfer(keys)
        self._asked.ask(event, number, self._transfer)

    def granted(self, waited: Callable[[float], None] | None = None) -> Sequence[m.Granted]:
        """Return the replicas that were asked for.  Blocks.

        Args:
            waited: told for how many seconds the call had to wait, if it had to.

        Raises:
            TierStoreError: the request failed.
        """
        transfer = self._transfer
        assert transfer is not None  # it was asked, and has not ended
        try:
            if waited is None or transfer.done():
                return transfer.result()
            begin = time.perf_counter()
            try:
                return transfer.result()
            finally:
                waited(time.perf_counter() - begin)
        finally:
            del transfer  # a failed one keeps its error, whose traceback refers to this frame

    @uninterrupted
    def end(self) -> None:
        """Give back what was granted, or will be.  A second call does nothing.

        Raises:
            StoreClosed: something has stopped the store.
        """
        self.end_whole()

    def end_whole(self) -> None:
        """End it where nothing interrupts anyhow."""
        if self.is_ended:
            return
        self.is_ended = True
        if self._transfer is not None:
            when_granted(self._transfer, lambda _: self._asked.tell(self._ending))
            self._transfer = None  # a failed one keeps its error, whose traceback refers to whoever has this


def when_granted(transfer: Transfer[T], act: Callable[[T], None]) -> None:
    """Call ``act`` with what a transfer comes to, now or later, if it comes to anything."""

    def see() -> None:
        try:
            granted = transfer.result()
        except Exception:  # noqa: BLE001 - nothing was granted, and whoever resolves it cares for nobody's wait
            return
        act(granted)

    if transfer.done():
        see()
    else:
        transfer.add_done_callback(see)
