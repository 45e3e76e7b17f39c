"""One of many ranks: what it has, what it sends, and when it waits for others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planned import Layer, program_of
from tierstore.errors import CapacityError, ConfigError
from tierstore.planning import (
    ByteKind,
    ComputeFigures,
    LinkFigures,
    Machine,
    NetworkFigures,
    Placement,
    Program,
    StallCause,
    TierFigures,
    TierMedium,
    Timeline,
)
from tierstore.planning.ranks import (
    Collective,
    CollectiveKind,
    RankGroup,
    Sharding,
    network_of,
    one_rank,
    rank_machine,
    shard_bytes,
    simulate_ranks,
)
from tierstore.planning.simulating import simulate
from tierstore.planning.timeline import WAITING

GATHER, SCATTER, REDUCE = CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_REDUCE
_KIND_OF = {each.value: each for each in CollectiveKind}
_COMPUTE = ComputeFigures({"float32": 1e9}, 1e9)


def _machine(
    *, ranks: int = 4, peer: float = 1000.0, fabric: float = 100.0, device_bytes: int = 10_000
) -> Machine:
    return Machine(
        "hosts",
        (
            TierFigures("device", device_bytes, TierMedium.DEVICE),
            TierFigures("host", 80_000, TierMedium.HOST),
            TierFigures("disk", 800_000, TierMedium.STORAGE),
        ),
        (
            LinkFigures("device", "host", 4000.0),
            LinkFigures("host", "device", 4000.0, shares=("bus",)),
            LinkFigures("disk", "host", 800.0),
            LinkFigures("host", "disk", 400.0),
        ),
        _COMPUTE,
        _COMPUTE,
        {"bus": 12_000.0},
        network=(NetworkFigures("peer", peer, 0.5), NetworkFigures("fabric", fabric, 2.0)),
        ranks_per_host=ranks,
        has_streams=True,
    )


def _program(layers: int = 4, seconds: float = 1.0) -> Program:
    layer = Layer(
        parameter_bytes=400,
        state_bytes=800,
        gradient_bytes=(400,),
        activation_bytes=100,
        forward_s=seconds,
        backward_s=2 * seconds,
        step_s=0.125,
    )
    return program_of([layer] * layers)


def _lanes(timeline: Timeline, lane: str) -> list[str]:
    step = timeline.steady[0]
    return [
        each.name
        for each in timeline.intervals
        if each.lane == lane and step.begin_s <= each.begin_s < step.end_s
    ]


# ------------------------------------------------------------------------------ collectives


@pytest.mark.parametrize(
    ("kind", "world_size", "expected"),
    [
        (GATHER, 4, [("peer", 3 / 4 * 1200 / 1000 + 3 * 0.5, 900)]),
        (SCATTER, 4, [("peer", 3 / 4 * 1200 / 1000 + 3 * 0.5, 900)]),
        (REDUCE, 4, [("peer", 3 / 4 * 1200 / 1000 + 3 * 0.5, 900)] * 2),
        (
            GATHER,
            12,
            [("fabric", 2 / 3 * 1200 / 100 + 2 * 2.0, 200), ("peer", 3 / 4 * 1200 / 1000 + 3 * 0.5, 900)],
        ),
        (GATHER, 1, []),
    ],
)
def test_a_ring_inside_a_host_and_one_between_hosts(
    kind: CollectiveKind, world_size: int, expected: list[tuple[str, float, int]]
) -> None:
    passages = network_of(_machine(), world_size).passages(Collective(kind, "it", 1200))
    assert [each.lane for each in passages] == [lane for lane, _, _ in expected]
    assert [each.nbytes for each in passages] == [nbytes for _, _, nbytes in expected]
    assert [each.seconds for each in passages] == pytest.approx([seconds for _, seconds, _ in expected])


def test_peers_that_send_over_the_host_have_a_part_of_it_each() -> None:
    machine = _machine()
    over_bus = replace(machine, network=(NetworkFigures("peer", 1e6, 0.0, ("bus",)),))
    peer = network_of(over_bus, 4).peer
    assert peer is not None
    assert peer.bytes_per_s == 3000.0


@pytest.mark.parametrize(
    ("machine", "world_size", "says"),
    [
        (_machine(), 6, "world_size=6: 4 ranks on each host"),
        (replace(_machine(), network=()), 4, "has no network 'peer'"),
        (replace(_machine(), network=(NetworkFigures("peer", 1.0),)), 8, "has no network 'fabric'"),
    ],
)
def test_what_cannot_be_ranks_is_refused_by_name(machine: Machine, world_size: int, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        simulate_ranks(_program(), machine, Placement(), RankGroup(world_size))


def test_wrong_values_are_listed_together() -> None:
    with pytest.raises(ConfigError) as caught:
        RankGroup(0, Sharding.FULL, {"grad/0.0": -1}, 0, math.nan)
    for name in ("world_size", "grad/0.0", "bucket_bytes", "storage_bytes_per_s"):
        assert name in str(caught.value)


# ------------------------------------------------------------------------------ shards


@given(rows=st.integers(1, 60), row_bytes=st.integers(1, 64), world_size=st.integers(1, 16))
def test_shards_by_rows_are_torchs_chunks_and_padded_alike(
    rows: int, row_bytes: int, world_size: int
) -> None:
    import torch

    first = torch.empty(rows, row_bytes, dtype=torch.uint8).chunk(world_size)[0]
    assert shard_bytes(rows * row_bytes, world_size, rows) == first.nbytes


def test_what_a_rank_has_is_its_shard_of_parameters_gradients_and_state() -> None:
    def sizes(shard: Sharding) -> dict[ByteKind, set[int]]:
        rank = one_rank(_program(), _machine(), RankGroup(4, shard))
        kinds = (ByteKind.PARAMETERS, ByteKind.GRADIENT, ByteKind.STATE)
        return {
            kind: {each.nbytes for each in rank.program.data.values() if each.kind is kind} for kind in kinds
        }

    assert list(sizes(Sharding.NONE).values()) == [{400}, {400}, {800}]
    assert list(sizes(Sharding.OPTIMIZER).values()) == [{400}, {100}, {200}]
    assert list(sizes(Sharding.FULL).values()) == [{100}, {100}, {200}]


def test_one_rank_alone_is_the_program_itself() -> None:
    machine = _machine(ranks=1)
    alone = simulate(_program(), machine, Placement())
    for shard in Sharding:
        assert simulate_ranks(_program(), machine, Placement(), RankGroup(1, shard)) == alone


# ------------------------------------------------------------------------------ a host's ranks


def test_ranks_of_a_host_share_its_memory_drives_buses_and_cores_and_not_their_devices() -> None:
    rank = rank_machine(_machine(), hosts=2, storage_bytes_per_s=1000.0)
    assert [tier.capacity_bytes for tier in rank.tiers] == [10_000, 20_000, 200_000]
    rates = {link.name: link.bytes_per_s for link in rank.links}
    assert rates == {
        "device->host": 4000.0,
        "host->device": 4000.0,
        "disk->host": 125.0,  # of storage that two hosts of four ranks share
        "host->disk": 100.0,
    }
    assert rank.shares == {"bus": 3000.0}
    assert rank.host.memory_bytes_per_s == 0.25e9


# ------------------------------------------------------------------------------ steps


def test_collectives_go_beside_computing_and_what_is_late_is_waited_for() -> None:
    def step(peer: float) -> Timeline:
        machine = _machine(peer=peer)
        network = tuple(replace(each, latency_s=0.0) for each in machine.network)
        return simulate_ranks(
            _program(), replace(machine, network=network), Placement(), RankGroup(4, Sharding.FULL)
        )

    fast, slow = step(1e9), step(100.0)
    assert fast.stall_s.get(StallCause.COLLECTIVE, 0.0) < 1e-3
    # Seven gathers and four scatters of 400 bytes, at 3 seconds each, are more than what is computed.
    busy = sum(each.seconds for each in slow.steady) / len(slow.steady)
    assert busy > 12 * 3.0 - 3.0
    assert slow.stall_s[StallCause.COLLECTIVE] == pytest.approx(busy - fast.step_s, rel=0.2)
    assert {each.cause for each in slow.intervals if each.lane == WAITING} >= {StallCause.COLLECTIVE}


def test_the_network_carries_one_collective_after_another() -> None:
    timeline = simulate_ranks(_program(), _machine(), Placement(), RankGroup(8, Sharding.FULL))
    found = [each for each in timeline.intervals if each.lane in ("peer", "fabric")]
    found.sort(key=lambda each: each.begin_s)
    assert all(former.end_s <= each.begin_s + 1e-9 for former, each in itertools.pairwise(found))


@pytest.mark.parametrize("shard", list(Sharding))
@pytest.mark.parametrize("passes", [1, 2])
def test_a_step_sends_what_its_collectives_have_in_their_order(shard: Sharding, passes: int) -> None:
    layers = [Layer(400, 800, (300, 100), 100, forward_s=1.0, backward_s=1.0)] * 3
    program = program_of(layers, accumulations=passes)
    machine = _machine()
    rank = one_rank(program, machine, RankGroup(8, shard))
    timeline = simulate_ranks(program, machine, Placement(), RankGroup(8, shard))
    network = network_of(machine, 8)
    sent = [each for collective in rank.collectives for each in network.passages(collective)]
    for lane in ("peer", "fabric"):
        assert timeline.moved_bytes[lane] == sum(each.nbytes for each in sent if each.lane == lane)
    expected = [each.name for each in rank.collectives for _ in range(1 + (each.kind is REDUCE))]
    assert _lanes(timeline, "peer") == expected


def test_buckets_are_filled_in_the_order_of_gradients() -> None:
    program = _program(5)
    rank = one_rank(program, _machine(), RankGroup(4, Sharding.NONE, bucket_bytes=800))
    assert [each.nbytes for each in rank.collectives] == [800, 800, 400]
    assert rank.program.standing_bytes == 5 * 400  # all buckets


def test_full_shards_fit_where_whole_parameters_do_not() -> None:
    program, machine = _program(8), _machine(device_bytes=6_000)
    with pytest.raises(CapacityError):
        _on_the_device_alone(program, machine, Sharding.NONE)
    assert _on_the_device_alone(program, machine, Sharding.FULL).peak_bytes["device"] <= 6_000


def _on_the_device_alone(program: Program, machine: Machine, shard: Sharding) -> Timeline:
    alone = replace(machine, tiers=machine.tiers[:1], links=())
    return simulate_ranks(program, alone, Placement(), RankGroup(4, shard))


@given(rates=st.lists(st.sampled_from([50.0, 200.0, 1e3, 1e5]), min_size=2, max_size=2, unique=True))
def test_a_faster_network_never_makes_a_step_longer(rates: Sequence[float]) -> None:
    slow, fast = sorted(rates)
    steps = [
        simulate_ranks(
            _program(3), _machine(peer=rate), Placement(), RankGroup(4, Sharding.FULL), steps=2
        ).step_s
        for rate in (slow, fast)
    ]
    assert steps[1] <= steps[0] * (1 + 1e-9)
