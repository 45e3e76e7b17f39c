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
    names = ("between", "of_kinds", "in_lists", "on_local_tensors")
    scenarios = [f"shard_steps_{name}:2" for name in names]
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


def test_steps_are_made_on_local_tensors_where_all_lies_alike(found: Found) -> None:
    for each in found["shard_steps_on_local_tensors:2"]:
        local, whole = each["alike"]
        assert local > 8
        assert whole == 0
        assert 0 < each["elsewhere"][1] < each["elsewhere"][0]


def test_the_optimizers_are_all_that_are_accepted() -> None:
    assert {kind.partition("-")[0] for kind in BY_ELEMENT} >= {
        *("sgd", "adam", "adamw", "nadam", "radam", "adadelta", "adagrad", "rmsprop")
    }
