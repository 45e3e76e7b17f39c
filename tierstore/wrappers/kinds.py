"""What a wrapper is that a tier's options ask for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from tierstore.config.checks import Check
from tierstore.errors import ConfigError
from tierstore.spi import Backend, Medium


class TierWrapper(Backend, Protocol):
    """A wrapper that says what it did."""

    @property
    def stats(self) -> object:
        """A frozen dataclass, as `tierstore.spi.CountingBackend.io_stats`."""
        ...


@dataclass(frozen=True, slots=True)
class WrapperKind:
    """How one kind of wrapper is asked for and made.

    Attributes:
        name: what `tierstore.stats.TierStats.wrappers` calls it.
        options: of a tier's options, those that are for it, and how each is checked.
        fault: says what is wrong with options that are each well by themselves: of which, and why.
        wrap: makes it, around a backend, of the checked options, for the tier of a name.  Not called where
            none is more than ``None`` or 0.
    """

    name: str
    options: Mapping[str, Check]
    fault: Callable[[Mapping[str, object]], tuple[str, str] | None]
    wrap: Callable[[Backend, Mapping[str, object], str], TierWrapper]


def require_storage(backend: Backend, what: str) -> None:
    """Raise unless the bytes of a backend are reached by reads and writes alone.

    Raises:
        ConfigError: they are used where they lie, past any wrapper.
    """
    medium = backend.capabilities.medium
    if medium is not Medium.STORAGE:
        raise ConfigError(
            f"{what}: needs a tier whose bytes are read and written, such as a disk; those of {medium.name} "
            "memory are used where they lie. Leave it out there"
        )
