"""What this machine has: its accelerator, and how much room there is on it.

Asked only for what a configuration leaves open.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierstore.config.host_memory import host_rooms
from tierstore.errors import ConfigError
from tierstore.units import format_bytes

_log = logging.getLogger("tierstore")

EMULATED = "emulated"
CPU = "cpu"

_BLOCK_BYTES = 512  # of st_blocks, whatever the file system (stat(2))


def default_device() -> str:
    """Return the accelerator's name if this machine has one, else ``"cpu"``."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return CPU if accelerator is None else accelerator.type


def is_cpu(device: str) -> bool:
    """Return whether computing on ``device`` happens in host memory without a device tier."""
    return device.partition(":")[0] == CPU


def require_accelerator(device: str) -> None:
    """Check that this machine has the accelerator ``device``.

    Raises:
        ConfigError: it has not; the message says what it has.
    """
    import torch

    kind, _, index = device.partition(":")
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if accelerator is None else torch.accelerator.device_count()
    if accelerator is None or accelerator.type != kind or int(index or 0) >= count:
        there = f"{count} x {accelerator.type!r}" if accelerator is not None else "no accelerator"
        raise ConfigError(
            f"device={device!r}: torch finds {there} on this machine; "
            "accepted: one of those, 'emulated' or 'cpu'"
        )


def free_device_bytes(device: str) -> int:
    """Return how many bytes the accelerator ``device`` has free now."""
    import torch

    free_bytes, _ = torch.accelerator.get_memory_info(device)
    return int(free_bytes)


def available_host_bytes() -> int:
    """Return how many bytes of host memory this process can take without swapping, within all its limits."""
    return min(room.nbytes for room in host_rooms())


def free_disk_bytes(*paths: str) -> int:
    """Return the free bytes of the file systems that ``paths`` are, or would be, on."""
    return sum(usage.free for usage in _usages(paths).values())


class Usage(NamedTuple):
    """What a file system has."""

    total: int
    free: int


def _usages(paths: Sequence[str]) -> dict[Path, Usage]:
    """Return what each file system that ``paths`` are on, or would be, has; by one place on it."""
    places = [Path(path).absolute() for path in paths]
    there = [next(place for place in (path, *path.parents) if os.path.exists(place)) for path in places]  # noqa: PTH110 - names may be too long
    by_device = {place.stat().st_dev: place for place in there}
    found = {place: shutil.disk_usage(place) for place in by_device.values()}
    return {place: Usage(usage.total, usage.free) for place, usage in found.items()}


def say_if_disks_are_smaller(quota_bytes: int, *paths: str) -> None:
    """Log that a quota is more than the file systems of ``paths`` have, if it is.

    What they say may change: others make room, volumes grow, some are thin or compress.  So it is no error.
    """
    usages = _usages(paths)
    if quota_bytes <= sum(usage.free for usage in usages.values()) or not all(
        u.total for u in usages.values()
    ):
        return
    room_bytes = sum(usage.free for usage in usages.values()) + held_disk_bytes(*paths)
    if quota_bytes <= room_bytes:
        return
    have = ", ".join(
        f"that of {place} has {format_bytes(usage.free)} free of {format_bytes(usage.total)}"
        for place, usage in usages.items()
    )
    _log.warning(
        "offload_disk_size is %s, more than the file system of offload_path can take now: %s. It will be "
        "full before the quota is, and what does not fit then fails: lower offload_disk_size, leave it out "
        "to take what is free, or give an offload_path with room.",
        format_bytes(quota_bytes),
        have,
    )


def say_if_full(*paths: str) -> None:
    """Log that there will be no tier on disk, for the file systems of ``paths`` have no room."""
    _log.warning("there is no tier on disk: the file system of %s has no room", ", ".join(map(repr, paths)))


def held_disk_bytes(*paths: str) -> int:
    """Return how many bytes of their file systems the files under ``paths`` take now."""
    files = (each for path in paths for each in Path(path).rglob("*"))
    return sum(
        each.stat().st_blocks * _BLOCK_BYTES for each in files if each.is_file() and not each.is_symlink()
    )
