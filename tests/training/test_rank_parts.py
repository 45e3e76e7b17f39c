"""Models that `parallelize_module` alone divides: bit for bit as without tiers, with each part in tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from torch import distributed

from tests.training.rank_parts import OF_PARTS
from tests.training.test_ranks import led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]
_SCENARIOS = ("parts:2", "parts_saved:2", "parts_of_files:2", "parts_refused:2")


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("parts"), *_SCENARIOS)
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


def test_losses_parts_and_state_are_those_without_tiers_and_so_is_training_afterwards(found: Found) -> None:
    assert found["parts:2"] == [{name: [] for name in OF_PARTS}] * 2


def test_what_a_run_saves_with_distributed_checkpoint_a_model_without_tiers_reads(found: Found) -> None:
    assert found["parts_saved:2"] == [[], []]


def test_each_process_reads_its_parts_of_files_of_the_whole_model(found: Found) -> None:
    assert found["parts_of_files:2"] == [[], []]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("averaged", "sharded by parallelize_module: run.average_gradients() cannot be used"),
        ("saved", "torch.distributed.checkpoint"),
        ("durable", "durable keeps no parts of it"),
        ("summed", "accepted are parts and replicas"),
        ("on meta", "the parameter 'layers.1.wide.weight' cannot be offloaded: it is a DTensor on the meta"),
        (
            "optimizer",
            "sharded by parallelize_module: Adafactor is not known to treat each element by itself",
        ),
        ("in backward", "optimizer_in_backward cannot be used with it"),
    ],
)
def test_what_cannot_be_is_refused_by_name(found: Found, what: str, says: str) -> None:
    for each in found["parts_refused:2"]:
        assert says in each[what]
