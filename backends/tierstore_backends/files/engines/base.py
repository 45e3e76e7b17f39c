"""What an engine is: who moves fragments, in what order, and when they stop.

Rule 1: reads before writes when both wait, for somebody waits for a read and write-backs are
nobody's hurry; first come, first served within a direction.  The order among reads is the
caller's business.
Rule 2: at most ``depth`` fragments are in flight: in the hands of whoever moves them.
Rule 3: every transfer ends exactly once, whatever happens to its fragments, outside every lock; those
that moved in one batch end together.
Rule 4: tidying runs after a time of quiet, and no fragment begins to move while it runs.
Rule 5: closing moves everything that waits, then stops.

Knows nothing of where bytes are or how they move.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierstore.errors import InvariantError
from tierstore_backends.files.io.io_request import Fragment

log = logging.getLogger("tierstore.files")

Move = Callable[[Sequence[Fragment]], None]
"""Moves a batch, in one thread at a time; notes errors at the fragments."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How much an engine moves at a time, and when it tidies.

    Attributes:
        depth: the most fragments in flight.
        tidy: gives unused disk back; what is reserved while it runs is not yet written (rule 4).
        quiet_s: how long nothing has moved before that.
    """

    depth: int
    tidy: Callable[[], None]
    quiet_s: float


class IoEngine(Protocol):
    """Moves fragments and ends their transfers."""

    @property
    def most_in_flight(self) -> int:
        """The most fragments that were in flight at a time."""
        ...

    def submit(self, fragments: Sequence[Fragment]) -> None:
        """Move all fragments of one transfer.

        Raises:
            StoreClosed: the engine was closed; nothing moves.
        """
        ...

    def tidy_when_quiet(self) -> None:
        """Call the tidier when nothing has moved for a while."""
        ...

    def close(self) -> None:
        """Move what waits, then stop.  Blocks until nothing moves.  Idempotent.

        A worker may call this only when no other transfer is under way.
        """
        ...

    def is_worker(self) -> bool:
        """Whether the calling thread moves bytes, and so runs completions' callbacks."""
        ...


def move_or_note(move: Move, batch: Sequence[Fragment]) -> None:
    """Move a batch; whatever goes wrong, note it at the fragments: someone waits for each of them."""
    try:
        move(batch)
    except Exception as error:  # noqa: BLE001 - handed to whoever waits, and logged
        note_unforeseen(batch, error)


def note_unforeseen(batch: Sequence[Fragment], error: Exception) -> None:
    """Note a failure that nobody foresaw at the fragments that it met.  Called while it is handled."""
    log.exception("moving bytes failed in an unforeseen way")
    for fragment in batch:
        fragment.error = InvariantError(f"moving bytes failed in an unforeseen way: {error!r}")


def tidy_or_log(tidy: Callable[[], None]) -> None:
    """Give unused disk back; a failure costs nobody anything."""
    try:
        tidy()
    except Exception:
        log.warning("unused space of the files could not be given back", exc_info=True)
