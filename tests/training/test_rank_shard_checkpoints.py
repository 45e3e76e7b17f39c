"""Distributed checkpoints of sharded runs, read by fewer processes than made them, and by one alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import distributed

from tests.training.test_ranks import led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]
_SCENARIOS = ("shards_left:4", "shards_reread:2", "alone_reread:1", "shards_saved_aside:2")


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("checkpoints"), *_SCENARIOS)
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize("readers", ["shards_reread:2", "alone_reread:1"])
def test_what_four_processes_have_written_is_read_bit_for_bit_and_gone_on_with(
    found: Found, readers: str
) -> None:
    whole = found["shards_left:4"][0]
    assert len(whole) > 90
    for each in found[readers]:
        assert each["read"] == whole
        assert each.get("saved", True)
        assert each["goes on"]


@pytest.mark.parametrize(("readers", "processes"), [("shards_reread:2", 2), ("alone_reread:1", 1)])
def test_it_is_read_some_at_a_time(found: Found, readers: str, processes: int) -> None:
    whole_bytes = sum(len(each) for each in found["shards_left:4"][0].values()) // 2
    for each in found[readers]:
        assert 0 < each["peak"] < whole_bytes / processes / 4
        assert not each["here"]


@pytest.mark.parametrize("how", ["writer disk", "default host"])
def test_what_async_save_writes_is_what_there_was_though_training_went_on(found: Found, how: str) -> None:
    for each in found["shards_saved_aside:2"]:
        assert each[f"saved {how}"]
        assert not each[f"differs {how}"]


def test_a_stager_that_holds_all_shards_is_refused_with_what_works_where_they_do_not_fit(
    found: Found,
) -> None:
    for each in found["shards_saved_aside:2"]:
        assert (
            "storage_writer=FileSystemWriter(path, single_file_per_rank=False)"
            in each["refused default disk"]
        )
        assert not each["differs default disk"]
