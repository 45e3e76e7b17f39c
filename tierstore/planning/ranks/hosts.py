"""A host that several ranks share, as one of them has it.

All ranks of a host do the same, so each has an equal part of what they share: that is how the product
divides quotas between processes, and what a fair drive gives to equal requests.  So one ledger stands for
all.  Host memory, drives, `Machine.shares` and the host's cores are shared; a device and its links are not.
"""

from __future__ import annotations

from dataclasses import replace

from tierstore.errors import ConfigError
from tierstore.planning.machine import ComputeFigures, LinkFigures, Machine, TierMedium, is_rate
from tierstore.quoting import quoted


def rank_machine(machine: Machine, *, hosts: int = 1, storage_bytes_per_s: float | None = None) -> Machine:
    """Return what one rank has of a host.

    Args:
        machine: the host, with `Machine.ranks_per_host` ranks; capacity of the first tier is each rank's own.
        hosts: that share storage.
        storage_bytes_per_s: what storage that all hosts share reads or writes a second; ``None``: each has
            its own drives.

    Raises:
        ConfigError: ``storage_bytes_per_s`` is no rate, or nothing in the machine is storage.
    """
    ranks = machine.ranks_per_host
    storage = {tier.name for tier in machine.tiers if tier.medium is TierMedium.STORAGE}
    if storage_bytes_per_s is not None and not (is_rate(storage_bytes_per_s) and storage):
        raise ConfigError(
            f"storage_bytes_per_s={storage_bytes_per_s!r} of machine {quoted(machine.name)} with tiers "
            f"{[tier.name for tier in machine.tiers]!r}; accepted: a number greater than 0, of a machine "
            "that has storage"
        )
    most = None if storage_bytes_per_s is None else storage_bytes_per_s / hosts
    tiers = (
        *machine.tiers[:1],
        *(replace(tier, capacity_bytes=tier.capacity_bytes // ranks) for tier in machine.tiers[1:]),
    )
    first = machine.tiers[0].name
    return replace(
        machine,
        tiers=tiers,
        links=tuple(_link(each, ranks, first, storage, most) for each in machine.links),
        shares={name: rate / ranks for name, rate in machine.shares.items()},
        host=_divided(machine.host, ranks),
        ranks_per_host=1,
        hosts=1,
    )


def _link(
    link: LinkFigures, ranks: int, first: str, storage: set[str], most_bytes_per_s: float | None
) -> LinkFigures:
    rate = link.bytes_per_s
    if most_bytes_per_s is not None and {link.source, link.target} & storage:
        rate = min(rate, most_bytes_per_s)
    is_own = first in (link.source, link.target) and not {link.source, link.target} & storage
    return replace(link, bytes_per_s=rate if is_own else rate / ranks)


def _divided(figures: ComputeFigures, ranks: int) -> ComputeFigures:
    return replace(
        figures,
        flops_per_s={dtype: rate / ranks for dtype, rate in figures.flops_per_s.items()},
        memory_bytes_per_s=figures.memory_bytes_per_s / ranks,
    )
