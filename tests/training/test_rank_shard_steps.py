"""Steps of shards that are made during backward: bit for bit as FSDP2's, whatever comes between."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from tests.training.rank_shard_steps import BY_ELEMENT, TRIED_ACTS, TRIED_KINDS
from tests.training.test_ranks import led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = dict[str, list[Any]]


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    scenarios = ("shard_steps_between:2", "shard_steps_of_kinds:2", "shard_steps_in_lists:2")
    found: Found = led(tmp_path_factory.mktemp("steps"), *scenarios)
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize("layout", ["disk", "three"])
@pytest.mark.parametrize("act", TRIED_ACTS, ids=lambda act: act.__name__)
def test_whatever_comes_between(found: Found, act: Any, layout: str) -> None:  # noqa: ANN401
    for each in found["shard_steps_between:2"]:
        assert each[f"{act.__name__}, {layout}"]["differs"] == []
        assert each[f"{act.__name__}, {layout}"]["taken"], "no step was made ahead: the test shows nothing"


@pytest.mark.parametrize("kind", TRIED_KINDS)
def test_every_optimizer_that_may_step_shards_can_step_them_ahead(found: Found, kind: str) -> None:
    for each in found["shard_steps_of_kinds:2"]:
        assert each[kind]["differs"] == []
        assert each[kind]["taken"]


def test_what_stands_for_a_shard_is_stepped_in_lists_where_the_shard_would_be(found: Found) -> None:
    assert found["shard_steps_in_lists:2"] == [{"": True, "foreach": False, "fused": False}] * 2


def test_the_optimizers_are_all_that_are_accepted() -> None:
    assert {kind.partition("-")[0] for kind in BY_ELEMENT} >= {
        *("sgd", "adam", "adamw", "nadam", "radam", "adadelta", "adagrad", "rmsprop")
    }
