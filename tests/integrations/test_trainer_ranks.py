"""A Trainer in several processes is offloaded in each, to the bits of the plain one under torchrun."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from torch import distributed

from tests.forked_programs import run_program
from tests.integrations.trainer_ranks import CASES, PROCESSES

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = list[Mapping[str, Any]]
"""By rank: of each case what was found."""


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("ranks")
    done = run_program("tests.integrations.trainer_ranks", str(folder), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads((folder / "found.json").read_text())
    failed = [each for each in found if isinstance(each, str)]
    assert not failed, failed[0]
    assert len(found) == PROCESSES
    return found


@pytest.mark.parametrize("case", CASES)
def test_losses_parameters_state_and_files_are_those_of_the_trainer_in_as_many_processes(
    found: Found, case: str
) -> None:
    assert [each[case]["differs"] for each in found] == [[]] * PROCESSES
    assert [each[case]["kinds"] for each in found] == [["GuardedParameter"]] * PROCESSES


@pytest.mark.parametrize("case", CASES)
def test_all_processes_end_with_the_same_losses_and_parameters(found: Found, case: str) -> None:
    assert len({each[case]["digest"] for each in found}) == 1
    first, *others = (_of_losses(each[case]["logged"]) for each in found)
    assert all("loss" in " ".join(each) for each in first)
    assert others == [first] * len(others)


def _of_losses(logged: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [each for each in logged if any("loss" in name for name in each)]


def test_a_callback_is_refused_where_the_trainer_has_wrapped_the_model(found: Found) -> None:
    for each in found:
        assert "Trainer = offloading(Trainer, config)" in each["refused"]["callback"]


def test_gradients_that_do_not_fit_together_are_refused_with_what_a_trainer_can_change(found: Found) -> None:
    for each in found:
        assert each["refused"]["small"].startswith("DistributedDataParallel needs ")
        assert "gradient_as_bucket_view" not in each["refused"]["small"]
        assert "The Trainer puts the model into DistributedDataParallel" in each["refused"]["small"]


def test_fsdp_of_the_trainers_is_refused_with_the_argument_to_leave_out(found: Found) -> None:
    for each in found:
        assert each["refused"]["fsdp"].startswith("TrainingArguments(fsdp=...) has parameters moved by fsdp")
