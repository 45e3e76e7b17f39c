"""What a piece of work cost this process: seconds, processor seconds, and bytes to and from the drive.

Bytes are those of ``/proc/self/io``: what the kernel sent to block devices for this process and for
the children that it has waited for, so a read that the page cache answers counts nothing.  Memory is
the kernel's own high-water mark.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

GB = 10**9


@dataclass(frozen=True)
class Usage:
    """What one piece of work took.

    Attributes:
        seconds: by the clock.
        cpu_seconds: of all threads of the process, user and system.
        read_bytes: fetched from block devices.
        written_bytes: sent to block devices; for the page cache: made dirty.
    """

    seconds: float
    cpu_seconds: float
    read_bytes: int
    written_bytes: int

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, float]) -> Usage:
        """Read what `to_mapping` wrote."""
        return cls(
            float(mapping["seconds"]),
            float(mapping["cpu_seconds"]),
            int(mapping["read_bytes"]),
            int(mapping["written_bytes"]),
        )

    def to_mapping(self) -> dict[str, float]:
        """Return it as JSON takes it."""
        return asdict(self)

    def __add__(self, other: Usage) -> Usage:
        """Add up two pieces of work, one after the other."""
        return Usage(
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            self.read_bytes + other.read_bytes,
            self.written_bytes + other.written_bytes,
        )


def metered(work: Callable[[], object]) -> Usage:
    """Do the work and return what it cost.  What other threads do meanwhile counts, too."""
    io_before, cpu_before, begun = drive_bytes(), cpu_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - begun
    io_after, cpu_after = drive_bytes(), cpu_seconds()
    return Usage(seconds, cpu_after - cpu_before, io_after[0] - io_before[0], io_after[1] - io_before[1])


def cpu_seconds() -> float:
    """Return the processor seconds of all threads of this process so far."""
    taken = resource.getrusage(resource.RUSAGE_SELF)
    return taken.ru_utime + taken.ru_stime


def drive_bytes() -> tuple[int, int]:
    """Return the bytes read from and written to block devices so far."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"]) - int(fields["cancelled_write_bytes"])


def resident_bytes() -> int:
    """Return the resident memory of this process now."""
    return _status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Return the most that was ever resident, or since `reset_peak`."""
    return _status_bytes("VmHWM")


def reset_peak() -> None:
    """Let `peak_resident_bytes` begin again from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def proportional_bytes() -> int:
    """Return the resident memory now, with pages that several processes share divided among them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel reports no Pss in /proc/self/smaps_rollup")


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"this kernel reports no {name} in /proc/self/status")
