"""How much of host memory a table's rows have."""

from __future__ import annotations

from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.units import format_bytes, parse_bytes


@dataclass(frozen=True, slots=True)
class TableFrames:
    """Where the rows of one table live, beside the last tier: in its frames.

    Args:
        frames: bytes of host memory that are its own; as a number or as text such as ``"4GiB"``.

    Raises:
        ConfigError: it is no size, or 0.
    """

    frames: int

    def __post_init__(self) -> None:
        frames = parse_bytes(self.frames)
        if not frames:
            raise ConfigError("frames=0: a table needs a page of host memory at least")
        object.__setattr__(self, "frames", frames)

    def __str__(self) -> str:
        return f"frames of {format_bytes(self.frames)} in host"
