"""Collectives of ranks are predicted exactly: which, their bytes and their order, as gloo processes show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import distributed

from tests.training.test_ranks import led
from tierstore.planning import LinkFigures, Machine, NetworkFigures, TierFigures, TierMedium
from tierstore.planning.machine import ComputeFigures
from tierstore.planning.ranks import RankGroup, Sharding, one_rank
from tierstore.training.tracing import Grouping, trace_model

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

PROCESSES = 4
_SCENARIOS = tuple(f"{each}:{PROCESSES}" for each in ("fully_sharded", "in_buckets", "one_at_a_time"))
_COMPUTE = ComputeFigures({"float32": 1e11}, 1e10)
_MACHINE = Machine(
    "processes",
    (TierFigures("device", 2**30, TierMedium.DEVICE), TierFigures("host", 2**30, TierMedium.HOST)),
    (LinkFigures("device", "host", 1e10), LinkFigures("host", "device", 1e10)),
    _COMPUTE,
    _COMPUTE,
    network=(NetworkFigures("peer", 1e9, 1e-5),),
    ranks_per_host=PROCESSES,
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, list[Any]]:
    found = led(tmp_path_factory.mktemp("collectives"), *_SCENARIOS)
    failed = [each for led in found.values() for each in led if isinstance(each, str)]
    assert not failed, failed[0]
    return {name.partition(":")[0]: each for name, each in found.items()}


def _predicted(shard: Sharding, *, passes: int = 1, bucket_bytes: int | None = None) -> list[list[object]]:
    from tests.training.rank_collectives import Stack

    program = trace_model(
        lambda: (Stack(), torch.zeros(4, 7)),
        optimizer=torch.optim.Adam,
        accumulations=passes,
        grouping=Grouping(0, None),
    )
    rows = {f"grad/{name}": each.shape[0] for name, each in Stack().named_parameters()}
    rank = one_rank(program, _MACHINE, RankGroup(PROCESSES, shard, rows, bucket_bytes))
    return [[each.kind.value, each.nbytes] for each in rank.collectives]


@pytest.mark.parametrize("passes", [1, 2])
def test_fully_sharded_ranks_gather_and_scatter_as_predicted(
    found: Mapping[str, list[Any]], passes: int
) -> None:
    expected = _predicted(Sharding.FULL, passes=passes)
    for rank in found["fully_sharded"]:
        for step in rank[str(passes)]:
            assert step == expected


def test_buckets_are_as_large_as_predicted_and_in_that_order(found: Mapping[str, list[Any]]) -> None:
    from tests.training.rank_collectives import BUCKET_BYTES

    expected = _predicted(Sharding.NONE, bucket_bytes=BUCKET_BYTES)
    assert len(expected) > 2
    for rank in found["in_buckets"]:
        assert rank[-1] == expected  # buckets of the first step are not yet in the order of gradients


def test_gradients_that_are_averaged_alone_are_sent_as_predicted(found: Mapping[str, list[Any]]) -> None:
    expected = _predicted(Sharding.NONE)
    for rank in found["one_at_a_time"]:
        assert rank[-1] == expected  # in the first step the order is still that of the parameters
