"""Gathers and sums in memory that processes share: the bytes that FSDP's own ways bring, or those ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import distributed

from tests.training.rank_shard_gathers import MODELS
from tests.training.test_ranks import led
from tierstore.training.sharding.shared_segments import MOST_SEGMENTS

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]
_SCENARIOS = (
    "gathers_of_any_sizes:4",
    "gathers_elsewhere:3",
    "gathers_of_models:2",
    "gathers_wait_for_nobody:2",
    "gathers_amid:2",
    "gathers_alone:4",
    "sums_of_any_sizes:2",
    "sums_of_any_sizes:3",
    "sums_of_any_sizes:5",
    "sums_in_another_order:3",
)


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("gathers"), *_SCENARIOS)
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


def test_whatever_is_gathered_is_whole_as_long_as_anybody_has_it(found: Found) -> None:
    lives = found["gathers_of_any_sizes:4"]
    assert [each["wrong"] for each in lives] == [0] * 4
    (own,) = {each["own"] for each in lives}
    assert 0 < own < lives[0]["turns"] * 2 / 3


def test_all_go_the_same_way_whoever_cannot_share(found: Found) -> None:
    (lives,) = {str(each) for each in found["gathers_elsewhere:3"]}
    each = found["gathers_elsewhere:3"][0]
    assert lives
    assert each["nothing"] == MOST_SEGMENTS  # each is made behind a gather that went FSDP's own way
    nowhere = ("no room", "no mapping", "another machine", "no such files", "another file")
    assert [each[name] for name in nowhere] == [12] * len(nowhere)
    assert [each[f"{name} the third"] for name in ("no room for", "no mapping of")] == [9] * 2


def test_no_file_of_a_segment_stays_open(found: Found) -> None:
    assert [each["open files"] for each in found["gathers_elsewhere:3"]] == [[]] * 3


@pytest.mark.parametrize("case", MODELS)
def test_a_model_s_shards_are_gathered_so_until_its_run_ends(found: Found, case: str) -> None:
    for each in found["gathers_of_models:2"]:
        differs, kinds, segments, is_own_again = each[case]
        assert differs == []
        assert kinds == ["SharedGather", "SharedReduction"]
        assert all(0 < count <= MOST_SEGMENTS for count in segments)
        assert is_own_again


def test_a_way_to_gather_that_users_have_set_stays(found: Found) -> None:
    assert [each["by hand"] for each in found["gathers_of_models:2"]] == [[[], 1, 1, True]] * 2


def test_gathers_ahead_wait_for_nobody(found: Found) -> None:
    assert found["gathers_wait_for_nobody:2"] == [[]] * 2


def test_default_devices_warnings_and_settings_of_fsdp_are_as_without_tiers(found: Found) -> None:
    assert (
        found["gathers_amid:2"]
        == [[[], ["DefaultAllGather", "DefaultReduceScatter", "SharedGather", "SharedReduction"]]] * 2
    )


def test_a_run_alone_and_groups_that_are_others_after_forward_gather_as_fsdp_does(found: Found) -> None:
    assert (
        found["gathers_alone:4"]
        == [[["DefaultAllGather", "DefaultReduceScatter"], ["DefaultAllGather", "SharedReduction"]]] * 4
    )


@pytest.mark.parametrize("processes", [2, 3, 5])
def test_sums_are_those_of_gloo_bit_for_bit(found: Found, processes: int) -> None:
    for each in found[f"sums_of_any_sizes:{processes}"]:
        assert each["differ"] == []
        assert (
            0 < each["own"] < each["turns"] * 4 / 5
        )  # two types in five and an operation in three are gloo's


def test_where_gloo_adds_in_another_order_all_reduce_as_fsdp_does(found: Found) -> None:
    assert found["sums_in_another_order:3"] == [["DefaultReduceScatter", "SharedGather"]] * 3
