"""Tables of which other processes have a part of the rows."""

from __future__ import annotations

from typing import Protocol

import torch

from tierstore.errors import UsageError


class OwnRows(Protocol):
    """Which rows of a table are here.

    Attributes:
        where: which part that is, for messages.
    """

    @property
    def where(self) -> str: ...  # noqa: D102 - see above

    def own(self, ids: torch.Tensor) -> torch.Tensor:
        """Return for each of some ids whether its row is here."""
        ...

    def as_numbers(self) -> tuple[int, int, int]:
        """Return what a checkpoint notes: rank, processes, and how many consecutive ids go together."""
        ...


def require_whole(name: str, own_rows: OwnRows | None, what: str) -> None:
    """Raise if other processes have a part of the rows of a table.

    Args:
        name: of the table.
        own_rows: which are here; ``None``: all.
        what: would need all rows, for the message.

    Raises:
        UsageError: it says what to do instead.
    """
    if own_rows is not None:
        raise UsageError(
            f"{what}: of table {name!r} this process has {own_rows.where}. Read rows with table.rows(ids) in "
            "all processes, write them to files with table.export(path) or run.save(path) in all processes, "
            "or keep them with run.checkpoint()."
        )
