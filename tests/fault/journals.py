"""Journals of processes that are killed: what they have said, line by line."""

from __future__ import annotations

from pathlib import Path


def whole_lines(journal: Path) -> list[str]:
    """Return the lines of a journal but for one that the kill cut off: what it was to say has not been said.

    A write is cut off between two pages of the file, however short it is.
    """
    text = journal.read_text() if journal.exists() else ""
    return text[: text.rfind("\n") + 1].splitlines()
