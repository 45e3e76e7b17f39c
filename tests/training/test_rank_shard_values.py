"""Sharded models that are built on the meta device, and two jobs that train sharded models on one machine."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import distributed

from tests.training.rank_shard_values import TRIED
from tests.training.test_ranks import led
from tierstore.units import KIB, MIB

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]
_SCENARIOS = ("shards_valued:2", "shards_of_two_jobs:4", "shards_programmed:2")
PROCESSES = pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.long)])


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _led(tmp_path_factory, *_SCENARIOS)


@pytest.fixture(scope="module", name="of_four")
def _of_four(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return _led(tmp_path_factory, "shards_valued:4")


def _led(tmp_path_factory: pytest.TempPathFactory, *scenarios: str) -> Found:
    found = led(tmp_path_factory.mktemp("values"), *scenarios)
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


@pytest.fixture(name="lives")
def _lives(request: pytest.FixtureRequest, processes: int) -> list[Any]:
    found: Found = request.getfixturevalue("found" if processes == 2 else "of_four")
    return found[f"shards_valued:{processes}"]


@PROCESSES
@pytest.mark.parametrize("name", [*TRIED, *(f"{name} afterwards" for name in TRIED)])
def test_a_model_without_values_trains_with_those_of_files_as_one_that_had_them(
    lives: list[Any], name: str, processes: int
) -> None:
    assert [each[name]["differs"] for each in lives] == [[]] * processes


@PROCESSES
@pytest.mark.parametrize("name", TRIED)
def test_each_process_reads_its_part_straight_into_its_tiers(
    lives: list[Any], name: str, processes: int
) -> None:
    assert len(lives) == processes
    for each in lives:
        assert each[name]["here"] == 0
        # Beside what is read there is what processes share, for gathers and reductions of one layer.
        assert 0 < each[name]["peak"] < each[name]["whole"] / 3


@PROCESSES
@pytest.mark.parametrize("name", ["to_empty", "off", "resumed"])
def test_other_ways_to_values_work_too(lives: list[Any], name: str, processes: int) -> None:
    assert [each[name]["differs"] for each in lives] == [[]] * processes


@PROCESSES
def test_a_model_whose_values_are_nowhere_is_refused_and_left_as_it_was(
    lives: list[Any], processes: int
) -> None:
    assert len(lives) == processes
    for each in lives:
        assert "does not fit the model: missing: layers.2.back.weight" in each["torn"]
        assert "'into.weight' cannot be offloaded: it is on the meta device" in each["anew"]
        assert each["still on meta"]


# ---------------------------------------------------------------------- two jobs on one machine


def test_each_job_divides_its_quotas_over_its_processes_and_trains_as_without_tiers(found: Found) -> None:
    for each in found["shards_of_two_jobs:4"]:
        assert each["differs"] == []
        assert each["quotas"] == {"host": 96 * KIB, "disk": 16 * MIB}  # of 192 KiB and 32 MiB
        assert each["directories"] == ["rank-0", "rank-1"]


def test_a_job_does_not_take_the_directory_of_another_one_and_its_model_is_left(found: Found) -> None:
    for each in found["shards_of_two_jobs:4"][2:]:
        assert "is in use by a live backend of" in each["said"]
        assert each["is left"]


# ---------------------------------------------------------------------- programs


@pytest.mark.parametrize("tiers", ["host", "disk"])
def test_the_program_of_a_sharded_run_has_the_bytes_of_one_process(found: Found, tiers: str) -> None:
    for each in found["shards_programmed:2"]:
        for kind, times in (("parameters", 1), ("gradient", 1), ("state", 2)):
            assert times * each["parameters"] <= each[tiers][kind] < times * (each["parameters"] + KIB), kind
