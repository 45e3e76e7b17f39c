"""What one process gets of what a configuration gives the machine.

1. Quotas of host memory and of disk are the machine's: each of its processes has an equal share.  What is
   left open is what is there now, shared likewise.
2. The quota of device memory is each process's own.
3. Each process has a directory of its own, ``rank-N`` in each directory that is given, with N counted over
   all machines: several of them may share a file system.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path, PurePath

from tierstore.config import OffloadConfig, machine
from tierstore.errors import ConfigError
from tierstore.training.ranks.where import RankPlace
from tierstore.units import format_bytes, parse_bytes

_OF_A_RANK = re.compile(r"rank-([0-9]+)")


def roots_of(config: OffloadConfig) -> list[str]:
    """Return the directories that a configuration gives."""
    given = config.offload_path
    return [str(path) for path in ([given] if isinstance(given, str | PurePath) else given)]


def directory_of(root: str, where: RankPlace) -> str:
    """Return the process's own directory in one that is given, or that one if it is its own already.

    Raises:
        ConfigError: it is that of another process.
    """
    found = _OF_A_RANK.fullmatch(Path(root).name)
    if found is None:
        return str(Path(root) / f"rank-{where.rank}")
    if int(found[1]) != where.rank:
        raise ConfigError(
            f"offload_path={root!r}: this is {where.name}, and that is the directory of another; accepted: a "
            f"directory for all of them, in which each has its own (rank-{where.rank}), or one that ends so"
        )
    return root


def share_bytes(total_bytes: int, local: int, key: str) -> int:
    """Return what each of ``local`` processes gets of a quota.

    Raises:
        ConfigError: that would be nothing.
    """
    if total_bytes and total_bytes < local:
        raise ConfigError(
            f"{key}={total_bytes}: {format_bytes(total_bytes)} for the {local} processes of this machine "
            f"leaves none for each; accepted: at least {local}"
        )
    return total_bytes // local


def share_of(config: OffloadConfig, where: RankPlace, local: int) -> OffloadConfig:
    """Return the configuration of one process.

    Args:
        config: of the machine.
        where: which process it is.
        local: how many there are on its machine.

    Raises:
        ConfigError: see `directory_of` and `share_bytes`.
    """
    roots = roots_of(config)
    own = [directory_of(root, where) for root in roots]
    if config.offload_cpu_size is None:
        host_bytes = machine.available_host_bytes() // local
    else:
        host_bytes = share_bytes(parse_bytes(config.offload_cpu_size), local, "offload_cpu_size")
    if config.offload_disk_size is None:
        held_bytes = machine.held_disk_bytes(*own) if config.durable else 0
        disk_bytes = machine.free_disk_bytes(*roots) // local + held_bytes
    else:
        disk_bytes = share_bytes(parse_bytes(config.offload_disk_size), local, "offload_disk_size")
    return replace(
        config,
        offload_cpu_size=host_bytes,
        offload_disk_size=disk_bytes,
        offload_path=own[0] if len(own) == 1 else tuple(own),
    )
