"""Which of the processes this is, and on which machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tierstore.errors import ConfigError
from tierstore.training import processes

_BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One process among others.

    Attributes:
        rank: which one it is, from 0, of all machines.
        world_size: how many there are.
        machine: what tells the machine from others.
        told_local: how many torchrun says that there are on the machine; ``None``: it did not start them.
    """

    rank: int
    world_size: int
    machine: str
    told_local: int | None

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"rank {self.rank} of {self.world_size}"


def here(environment: Mapping[str, str] = os.environ) -> RankPlace:
    """Return which process this is.

    With a process group its numbers count.  torchrun's are taken for what the group does not know, how many
    processes there are on this machine, where they speak of the same processes.

    Raises:
        ConfigError: there is no group, and torchrun's variables are no numbers, or cannot be true.
    """
    told = _told(environment)
    machine = f"{platform.node()} {_boot()}"
    if processes.has_group():
        rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
        is_of_them = told is not None and (told.rank, told.world_size) == (rank, world_size)
        return RankPlace(rank, world_size, machine, told.local if told is not None and is_of_them else None)
    if told is None:
        given = ", ".join(f"{name}={environment.get(name)!r}" for name in _Told.NAMES)
        raise ConfigError(
            f"torchrun's variables cannot be true: {given}; accepted: whole numbers with RANK < WORLD_SIZE "
            "and LOCAL_RANK < LOCAL_WORLD_SIZE <= WORLD_SIZE. Unset them, or call init_process_group before "
            "offload(...)."
        )
    return RankPlace(told.rank, told.world_size, machine, told.local)


@dataclass(frozen=True, slots=True)
class _Told:
    """What torchrun told the process."""

    rank: int
    world_size: int
    local: int

    NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def _told(environment: Mapping[str, str]) -> _Told | None:
    try:
        rank, world_size, local_rank, local = (int(environment[name]) for name in _Told.NAMES)
    except (KeyError, ValueError):
        return None
    if not (0 <= rank < world_size and 0 <= local_rank < local <= world_size):
        return None
    return _Told(rank, world_size, local)


def _boot() -> str:
    """Return what tells this machine from others of its name; empty where the system does not say."""
    try:
        return _BOOT.read_text(encoding="ascii").strip()
    except OSError:
        return ""
