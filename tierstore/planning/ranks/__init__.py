"""Many ranks, by one of them: data parallel and fully sharded training, and what its collectives cost.

All ranks do the same, so one stands for all: it has its shards, its device, and its part of what the ranks
of a host share.  What goes over networks is exact by bytes and order; how long it takes is a formula's.
"""

from tierstore.planning.ranks.collectives import Collective, CollectiveKind, RankNetwork, network_of
from tierstore.planning.ranks.hosts import rank_machine
from tierstore.planning.ranks.rank_program import RankProgram, rank_program
from tierstore.planning.ranks.shards import RankGroup, Sharding, shard_bytes
from tierstore.planning.ranks.simulating_ranks import OneRank, one_rank, simulate_ranks

__all__ = [
    "Collective",
    "CollectiveKind",
    "OneRank",
    "RankGroup",
    "RankNetwork",
    "RankProgram",
    "Sharding",
    "network_of",
    "one_rank",
    "rank_machine",
    "rank_program",
    "shard_bytes",
    "simulate_ranks",
]
