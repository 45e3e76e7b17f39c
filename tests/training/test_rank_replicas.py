"""Replicas in several processes: the same bits in all of them, and those without offloading."""

from __future__ import annotations

import pytest
from torch import distributed

from tests.training.test_ranks import Found, led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(
        tmp_path_factory.mktemp("ranks"), "averaged:2", "averaged:3", "many_steps:2", "first_passes:3"
    )
    failed = [each for led in found.values() for each in led if isinstance(each, str)]
    assert not failed, failed[0]
    return found


def test_after_many_steps_replicas_are_alike_and_as_without_offloading(found: Found) -> None:
    assert found["many_steps:2"] == [{"plain": True, "swapped": [[], True]}] * 2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("processes", [4, 8])
def test_after_many_steps_many_replicas_are_alike(
    tmp_path_factory: pytest.TempPathFactory, processes: int
) -> None:
    found = led(tmp_path_factory.mktemp("ranks"), f"many_steps:{processes}", f"averaged:{processes}")
    for each in found[f"many_steps:{processes}"]:
        assert each["plain"]
        assert each["swapped"][1]
    for each in found[f"averaged:{processes}"]:
        assert each == {name: [[], True] for name in each}


@pytest.mark.parametrize(
    ("how", "processes"),
    [
        *((how, 2) for how in ("three, False", "three, True", "disk, False", "disk, True", "swapped")),
        *((how, 3) for how in ("three, True", "disk, False", "swapped")),
    ],
)
def test_gradients_averaged_one_at_a_time_are_those_of_buckets_of_one(
    found: Found, how: str, processes: int
) -> None:
    assert [each[how] for each in found[f"averaged:{processes}"]] == [[[], True]] * processes


def test_ddp_adds_up_otherwise_in_the_first_pass_after_a_start_unless_it_keeps_its_buckets(
    found: Found,
) -> None:
    """The how-to says what a restart needs; where PyTorch has changed, it has to be written again."""
    for each in found["first_passes:3"]:
        assert each == {
            "as it is": [False, False],
            "find_unused_parameters": [True, True],
            "average_gradients": [True, True],
        }


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("wrapper", "CapacityError: DistributedDataParallel needs"),
        ("wrapper", "call run.average_gradients()"),
        ("twice", "UsageError: gradients are averaged already"),
        ("wrapped", "UsageError: gradients are averaged already"),
        ("shapes", "UsageError: the processes train different parameters: ('weight'"),
        ("alone", "UsageError: the run knows of no other processes"),
        ("sparse", "UsageError: the gradient of '0.weight' is sparse"),
    ],
)
def test_what_cannot_be_averaged_is_refused_by_name(found: Found, what: str, said: str) -> None:
    for each in found["averaged:2"]:
        assert said in each["refused"][what]
