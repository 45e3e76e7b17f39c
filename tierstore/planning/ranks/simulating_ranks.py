"""One of many ranks under a virtual clock: `simulate_ranks`."""

from __future__ import annotations

from dataclasses import dataclass, replace

from tierstore.planning.homes import Treatment
from tierstore.planning.machine import Machine
from tierstore.planning.placement import Placement
from tierstore.planning.program import Program
from tierstore.planning.ranks.collectives import Collective, network_of
from tierstore.planning.ranks.hosts import rank_machine
from tierstore.planning.ranks.rank_program import rank_program
from tierstore.planning.ranks.shards import RankGroup
from tierstore.planning.roofline import roofline
from tierstore.planning.simulating import Conditions, simulate, with_recomputation
from tierstore.planning.timeline import Timeline


@dataclass(frozen=True)
class OneRank:
    """One of many ranks, for `simulate` and `search`.

    Attributes:
        program: of it.
        machine: what it has of its host.
        conditions: of its run, with its collectives.
        collectives: of one step, in the order in which they are begun.
    """

    program: Program
    machine: Machine
    conditions: Conditions
    collectives: tuple[Collective, ...]


def one_rank(
    program: Program,
    machine: Machine,
    ranks: RankGroup,
    *,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
) -> OneRank:
    """Return what one of many ranks does and has; the others do the same.

    `simulate` and `search` take its program, machine and conditions.

    Args:
        program: of one process alone, with the batch of one rank.
        machine: one host: its first tier is each rank's, all others are of all its ranks.
        ranks: how many there are, and what they share.
        conditions: what else the run does.

    Raises:
        ConfigError: hosts would have different numbers of ranks, or the machine has not the network that is
            needed.
    """
    network = network_of(machine, ranks.world_size)
    host = replace(machine, ranks_per_host=network.ranks_per_host)
    of_one = rank_program(roofline(program, machine), network, ranks)
    return OneRank(
        of_one.program,
        rank_machine(host, hosts=network.hosts, storage_bytes_per_s=ranks.storage_bytes_per_s),
        replace(conditions, exchanges=of_one.exchanges),
        of_one.collectives,
    )


def simulate_ranks(
    program: Program,
    machine: Machine,
    placement: Placement,
    ranks: RankGroup,
    *,
    conditions: Conditions = Conditions(),  # noqa: B008 - it is frozen
    steps: int | None = None,
) -> Timeline:
    """Return what one of many ranks does when; the others do the same.

    Networks are lanes of their own, ``"peer"`` inside a host and ``"fabric"`` between hosts; the bytes there
    are those that the rank sends.  Waits for them are `StallCause.COLLECTIVE`.

    Args:
        program: as of `one_rank`.
        machine: as of `one_rank`.
        placement: of each rank.
        ranks: as of `one_rank`.
        conditions: as of `one_rank`.
        steps: as of `simulate`.

    Raises:
        CapacityError: it does not fit; the text says who holds what of the first tier then.
        ConfigError: as `one_rank`.
    """
    recomputed = [mark for mark in placement.marks if mark.treatment is Treatment.RECOMPUTE]
    rank = one_rank(with_recomputation(program, recomputed), machine, ranks, conditions=conditions)
    return simulate(rank.program, rank.machine, placement, conditions=rank.conditions, steps=steps)
