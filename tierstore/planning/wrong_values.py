"""What is wrong with something that somebody wrote, gathered so that one error says all of it."""

from __future__ import annotations

from tierstore.errors import ConfigError
from tierstore.quoting import quoted

_MOST_FAULTS = 32


class WrongValues:
    """Gathers what is wrong, so that one error says all of it."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, name: str, value: object, accepted: str) -> None:
        """Note that something cannot be so."""
        self.lines.append(f"{name}={quoted(value)}: accepted: {accepted}")

    def add_unless(self, is_right: bool, name: str, value: object, accepted: str) -> None:
        """Note it if it is not right."""
        if not is_right:
            self.add(name, value, accepted)

    def raise_if_any(self, owner: str) -> None:
        """Raise one error that lists everything."""
        if self.lines:
            more = len(self.lines) - _MOST_FAULTS
            shown = [*self.lines[:_MOST_FAULTS], *[f"and {more} more"] * (more > 0)]
            raise ConfigError(f"{owner}: " + "\n  ".join(shown))
