"""What a codec has done, counted where it happens."""

from __future__ import annotations

import threading
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class CodecStats:
    """What one tier's codec has done since the store was opened.

    Attributes:
        packed_tensors: writes whose bytes were packed.
        skipped_tensors: writes that were looked at, and stored as they are because packing does not pay.
        raw_bytes: the bytes of those that were packed.
        held_bytes: what they took of the medium.
        pack_seconds: how long bytes were looked at and packed, summed over threads.
        unpack_seconds: how long bytes were unpacked, summed over threads.
    """

    packed_tensors: int = 0
    skipped_tensors: int = 0
    raw_bytes: int = 0
    held_bytes: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """What the packed ones took of the medium, as a share of their bytes."""
        return self.held_bytes / self.raw_bytes if self.raw_bytes else 1.0


class CodecCounters:
    """Adds up.  Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stats = CodecStats()  # guarded by _lock

    def add(self, more: CodecStats) -> None:
        """Count what ``more`` says."""
        with self._lock:
            former = self._stats
            sums = {
                field.name: getattr(former, field.name) + getattr(more, field.name)
                for field in fields(CodecStats)
            }
            self._stats = replace(former, **sums)

    @property
    def stats(self) -> CodecStats:
        """All that was counted."""
        return self._stats
