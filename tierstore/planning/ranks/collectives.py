"""How long collectives of ranks take, and what each rank sends: rings inside a host and between hosts.

1. Inside a host of ``r`` ranks a ring gathers or scatters ``B`` bytes in ``(r-1)/r * B / rate`` seconds and
   ``r-1`` latencies.
2. Between ``h`` hosts the ranks of one number in their hosts make a ring: all rings of a host together move
   ``(h-1)/h * B`` bytes over its network.  The rings inside follow, or come before: not at the same time.
3. An all-reduce is a reduce-scatter, then an all-gather.

The formulas are the textbook's.  They know neither congestion nor ranks that are late.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from tierstore.errors import ConfigError
from tierstore.planning.machine import Machine, NetworkFigures
from tierstore.planning.simulating.exchanges import Passage
from tierstore.quoting import quoted

PEER = "peer"
FABRIC = "fabric"


class CollectiveKind(enum.Enum):
    """What ranks do together."""

    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective.

    Attributes:
        kind: what is done.
        what: is exchanged, for people.
        nbytes: of the whole: what an all-gather returns, what a reduce-scatter or an all-reduce is given,
            with padding.
    """

    kind: CollectiveKind
    what: str
    nbytes: int

    @property
    def name(self) -> str:
        """Its kind and what is exchanged."""
        return f"{self.kind.value} {self.what}"


@dataclass(frozen=True)
class RankNetwork:
    """What ranks exchange bytes over.

    Attributes:
        ranks_per_host: that take part.
        hosts: that take part.
        peer: between the ranks of a host; ``None``: there is one alone.
        fabric: between hosts; ``None``: there is one alone.
    """

    ranks_per_host: int
    hosts: int
    peer: NetworkFigures | None
    fabric: NetworkFigures | None

    def passages(self, collective: Collective) -> tuple[Passage, ...]:
        """Return the way of a collective, network by network; of one rank alone it is empty."""
        inside = self._passage(self.peer, self.ranks_per_host, collective.nbytes, 1)
        between = self._passage(self.fabric, self.hosts, collective.nbytes, self.ranks_per_host)
        match collective.kind:
            case CollectiveKind.ALL_GATHER:
                return (*between, *inside)
            case CollectiveKind.REDUCE_SCATTER:
                return (*inside, *between)
            case CollectiveKind.ALL_REDUCE:
                return (*inside, *between, *between, *inside)

    @staticmethod
    def _passage(
        figures: NetworkFigures | None, members: int, nbytes: int, rings: int
    ) -> tuple[Passage, ...]:
        if figures is None:
            return ()
        moved = nbytes * (members - 1)
        seconds = moved / members / figures.bytes_per_s + (members - 1) * figures.latency_s
        return (Passage(figures.name, seconds, -(-moved // (members * rings))),)


def network_of(machine: Machine, world_size: int) -> RankNetwork:
    """Return what ranks of a machine's kind exchange bytes over.

    Args:
        machine: one host, with `Machine.ranks_per_host` ranks.
        world_size: ranks altogether.

    Raises:
        ConfigError: hosts would have different numbers of ranks, or a network is not in the machine.
    """
    local = min(machine.ranks_per_host, world_size)
    if world_size < 1 or world_size % local:
        raise ConfigError(
            f"world_size={world_size!r}: {local} ranks on each host; accepted: a multiple of them, 1 or more"
        )
    hosts = world_size // local
    peer = _figures(machine, PEER, local) if local > 1 else None
    fabric = _figures(machine, FABRIC, local) if hosts > 1 else None
    return RankNetwork(local, hosts, peer, fabric)


def _figures(machine: Machine, name: str, local: int) -> NetworkFigures:
    """Return a network as fast as what it shares with the host's other ranks lets it be."""
    found = next((each for each in machine.network if each.name == name), None)
    if found is None:
        between = "the ranks of a host" if name == PEER else "hosts"
        raise ConfigError(
            f"machine {quoted(machine.name)} has no network {name!r}, between {between}: add it to "
            "'network' of the machine, with bandwidth and latency_s"
        )
    ranks = local if name == PEER else 1  # of the fabric it is the host's rate
    rate = min([found.bytes_per_s, *(machine.shares.get(each, math.inf) / ranks for each in found.shares)])
    return NetworkFigures(name, rate, found.latency_s)
