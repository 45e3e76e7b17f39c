"""Many ranks in ``tierstore plan``: what a call says of them.

A plan is that of one rank; the others do the same.  A run of several processes is not written:
`RankGroup` is no part of a configuration.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

from tierstore.errors import UsageError
from tierstore.planning import Machine
from tierstore.planning.accelerators import SHEET, accelerator
from tierstore.planning.ranks import RankGroup, Sharding

SHARDS = tuple(each.value for each in Sharding)


def add_ranks(parser: argparse.ArgumentParser, count: Callable[[str], int]) -> None:
    """Add the options of ranks.

    Args:
        parser: of the verb.
        count: reads a whole number of at least 1.
    """
    parser.add_argument(
        "--world-size", type=count, metavar="N", help="processes that train together: plan for one of them"
    )
    parser.add_argument(
        "--ranks-per-host",
        type=count,
        metavar="N",
        help="of them on each host, whose memory and drives they share (default: as the machine says)",
    )
    parser.add_argument(
        "--shard",
        choices=SHARDS,
        help="what they divide: nothing, gradients and state, or parameters as well (default: none)",
    )


def ranks_of(options: argparse.Namespace) -> RankGroup | None:
    """Return how many ranks are meant; ``None``: one process alone.

    Raises:
        UsageError: what is said of ranks goes with none, or something else goes with no ranks.
    """
    if options.world_size is None:
        beside = [
            option
            for option, value in (("--ranks-per-host", options.ranks_per_host), ("--shard", options.shard))
            if value is not None
        ]
        if beside:
            raise UsageError(
                f"{' and '.join(beside)}: how many ranks there are is not said; give --world-size"
            )
        return None
    if options.write is not None:
        raise UsageError("--world-size: no run of several processes is written; leave --write out")
    return RankGroup(options.world_size, Sharding(options.shard or Sharding.NONE.value))


def host_of(given: str | None, machine: Machine, options: argparse.Namespace) -> Machine:
    """Return the host of a call's ranks.

    Args:
        given: what the call says of the machine.
        machine: that it means.
        options: of the call.
    """
    if options.world_size is None:
        return machine
    ranks = min(options.ranks_per_host or machine.ranks_per_host, options.world_size)
    hosts = -(-options.world_size // ranks)
    if given is None or given not in SHEET:
        return replace(machine, ranks_per_host=ranks, hosts=hosts)
    return accelerator(given, hosts=hosts, ranks_per_host=ranks)
