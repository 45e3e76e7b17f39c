"""What this machine has: its accelerator, and how much room there is on it.

Asked only for what a configuration leaves open.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tierstore.config.host_memory import host_rooms
from tierstore.errors import ConfigError

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
    places = [Path(path).absolute() for path in paths]
    there = [next(place for place in (path, *path.parents) if place.exists()) for path in places]
    by_device = {place.stat().st_dev: place for place in there}
    return sum(shutil.disk_usage(place).free for place in by_device.values())


def held_disk_bytes(*paths: str) -> int:
    """Return how many bytes of their file systems the files under ``paths`` take now."""
    files = (each for path in paths for each in Path(path).rglob("*"))
    return sum(
        each.stat().st_blocks * _BLOCK_BYTES for each in files if each.is_file() and not each.is_symlink()
    )
