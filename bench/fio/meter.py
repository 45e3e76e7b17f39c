"""What a job used while its clock ran: time, processor, pages, I/O, and what the store counted.

The clock of a job stands still while tensors are made ready for the next operations.  Processor and I/O
are of the whole process: threads of the store work for all of its jobs.
"""

from __future__ import annotations

import os
import resource
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import tierstore as ts

_IO = Path("/proc/self/io")


class Meter:
    """A clock that can stand still, and counters that stand still with it.

    Args:
        store: returns the store, as it is open now.
    """

    def __init__(self, store: Callable[[], ts.Store]) -> None:
        self._store = store
        self._active_ns = 0
        self._since_ns = 0
        self._is_running = False
        self._at_start: Counter[str] = Counter()
        self.counted: Counter[str] = Counter()

    def resume(self) -> None:
        """Let the clock run."""
        self._at_start = self._look()
        self._is_running = True
        self._since_ns = time.perf_counter_ns()

    def pause(self) -> None:
        """Let the clock stand still."""
        self._active_ns = self.now_ns()
        self._is_running = False
        found = self._look()
        found.subtract(self._at_start)
        self.counted.update(found)

    def restart(self) -> None:
        """Count from now on; the clock goes on."""
        self._at_start = self._look()
        self.counted.clear()

    def at(self, moment_ns: int) -> int:
        """Return what the clock showed at a moment since it last began to run."""
        return self._active_ns + moment_ns - self._since_ns

    def now_ns(self) -> int:
        """Return what the clock shows."""
        return self.at(time.perf_counter_ns()) if self._is_running else self._active_ns

    def _look(self) -> Counter[str]:
        counted = _process_counters()
        counted.update(_store_counters(self._store()))  # not +, which leaves out what is 0
        return counted


def _process_counters() -> Counter[str]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    counted = Counter(
        user_us=round(usage.ru_utime * 1e6),
        system_us=round(usage.ru_stime * 1e6),
        switches=usage.ru_nvcsw + usage.ru_nivcsw,
        major_faults=usage.ru_majflt,
        minor_faults=usage.ru_minflt,
    )
    try:
        lines = _IO.read_text().splitlines()
    except OSError:  # not on this system, or not for this user
        return counted
    for line in lines:
        name, _, number = line.partition(":")
        counted[f"io.{name}"] = int(number)
    return counted


def _store_counters(store: ts.Store) -> Counter[str]:
    counted: Counter[str] = Counter()
    stats = store.stats()
    for name, tier in stats.tiers.items():
        for what in ("hits", "faults", "evictions", "refusals"):
            counted[f"tier.{name}.{what}"] = getattr(tier, what)
    for (source, target), traffic in stats.traffic.items():
        counted[f"traffic.{source}.{target}.copies"] = traffic.copies
        counted[f"traffic.{source}.{target}.bytes"] = traffic.nbytes
    counted["stall_us"] = round(stats.stall_seconds * 1e6)
    return counted


class DiskMeter:
    """What the block device under a directory did meanwhile; nothing where there is none to ask."""

    def __init__(self, directory: Path) -> None:
        self._device = _block_device(directory)
        self._begun_ms = time.monotonic() * 1e3
        self._at_start = self._look()

    def entry(self) -> dict[str, object] | None:
        """Return the device's entry of fio's ``disk_util``."""
        if self._device is None or self._at_start is None or (now := self._look()) is None:
            return None
        moved = [new - old for new, old in zip(now, self._at_start, strict=True)]
        passed_ms = max(1.0, time.monotonic() * 1e3 - self._begun_ms)
        # The fields of /sys/block/*/stat, as the kernel's documentation numbers them.
        return {
            "name": self._device.name,
            "read_ios": moved[0],
            "write_ios": moved[4],
            "read_merges": moved[1],
            "write_merges": moved[5],
            "read_ticks": moved[3],
            "write_ticks": moved[7],
            "in_queue": moved[10],
            "util": min(100.0, 100.0 * moved[9] / passed_ms),
        }

    def _look(self) -> list[int] | None:
        if self._device is None:
            return None
        try:
            return [int(number) for number in (self._device / "stat").read_text().split()[:11]]
        except (OSError, ValueError):
            return None


def _block_device(directory: Path) -> Path | None:
    number = directory.stat().st_dev
    device = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")
    return device.resolve() if (device / "stat").exists() else None
