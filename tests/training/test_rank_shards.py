"""Models that ``fully_shard`` has sharded: bit for bit as FSDP2 trains them, with each shard in tiers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.fsdp import FSDPModule

from tests.sampling import IS_CI
from tests.training.rank_shards import CASES, CASES_OF_FOUR, OF_EIGHT, OF_FOUR, OF_TWO, TRIED_MESHES, Deep
from tests.training.test_ranks import led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]
_KEEPING = [2] if IS_CI else [2, 4]
_KEPT = [f"{what}:{processes}" for what in ("shards_resumed", "shards_saved") for processes in _KEEPING]
_FORGETS_PASSES = hasattr(FSDPModule, "reset_iter_state")  # since PyTorch 2.12
_SCENARIOS = (
    "shards:2",
    "shards:4",
    "shards_seen:2",
    "shards_refused:4",
    *(["shards_ended:2"] if _FORGETS_PASSES else []),
    "shards_of_meshes:4",
    *_KEPT,
)


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    folder = tmp_path_factory.mktemp("shards")
    found = led(folder, *_SCENARIOS)
    found["folder"] = [folder]
    failed = [each for lives in found.values() for each in lives if isinstance(each, str)]
    assert not failed, failed[0]
    return found


def _each(found: Found) -> list[tuple[str, Mapping[str, Any]]]:
    both = (found["shards:2"], found["shards:4"])
    return [(name, each) for lives in both for life in lives for name, each in life.items()]


def test_losses_norms_shards_and_state_are_those_of_fsdp_and_so_is_training_afterwards(found: Found) -> None:
    assert len(_each(found)) == 2 * len(OF_TWO) + 4 * len(OF_FOUR)
    assert 2 * len(CASES) + 4 * len(CASES_OF_FOUR) > 50
    assert not {name: each["differs"] for name, each in _each(found) if each["differs"]}


@pytest.mark.long
def test_eight_processes_of_which_some_have_no_row_of_a_layer_train_as_fsdp_does(tmp_path: Path) -> None:
    lives = led(tmp_path, "shards:8")["shards:8"]
    assert len(lives) == 8
    for life in lives:
        assert not isinstance(life, str), life
        assert [each["differs"] for each in life.values()] == [[]] * len(OF_EIGHT)


def test_no_shard_is_in_memory_of_its_own_while_the_run_lasts(found: Found) -> None:
    assert not {name: each["here"] for name, each in _each(found) if each["here"]}


def test_shards_live_in_the_tiers_below_and_are_gathered_from_there(found: Found) -> None:
    for name, each in _each(found):
        if each["tiers"] != "host":
            assert min(each["to disk"], each["from disk"]) > each["whole"], name
        if each["tiers"] == "disk":  # where a device is, there is as much room as activations leave
            assert 0 < each["peak"] < each["whole"], name


def test_what_is_read_and_written_of_shards_gradients_and_state_is_as_without_tiers(found: Found) -> None:
    for each in found["shards_seen:2"]:
        assert each == {"seen": True, "here": 0, "differs": []}


@pytest.mark.skipif(not _FORGETS_PASSES, reason="here FSDP itself cannot go on after a pass that ended early")
def test_a_run_that_an_error_ends_gives_the_shards_back_and_the_next_one_takes_them(found: Found) -> None:
    assert found["shards_ended:2"] == [{"differs": []}] * 2


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("policy", "fully_shard was given CPUOffloadPolicy"),
        (
            "meta",
            "it is on the meta device and has no values. Pass weights=..., files of the whole model",
        ),
        ("beside others", "it is a DTensor that fully_shard did not make"),
        ("Muon", "Muon is not known to treat each element by itself"),
        ("Adafactor", "Adafactor is not known to treat each element by itself"),
        ("in backward", "optimizer_in_backward cannot be used with it"),
        ("released", "on_close='release' cannot be used with it"),
        ("initial values", "InitialValues(...) cannot be used with it"),
        ("placed", "a placement of modules cannot be used with it"),
        ("averages", "run.average_gradients() cannot be used with it: it reduces gradients by itself"),
        ("assigned", "the parameter 'bias' of a sharded module was replaced while it is offloaded"),
        ("let go", "releasing it cannot be used with it"),
        ("other parts", "the part at "),
    ],
)
def test_what_would_not_be_right_is_refused_by_name(found: Found, what: str, said: str) -> None:
    for each in found["shards_refused:4"]:
        assert said in each[what]
        assert "another model is left" not in each[what]


def test_a_process_that_has_its_part_still_is_not_refused_where_others_are(found: Found) -> None:
    said = [each["other parts of some"] for each in found["shards_refused:4"]]
    assert said[:2] == ["not refused"] * 2
    assert all("the checkpoint does not fit" in each and "the part at " in each for each in said[2:])


@pytest.mark.parametrize("mesh", TRIED_MESHES)
def test_replicas_and_parts_of_what_tensor_parallel_has_split_are_seen_saved_and_resumed_likewise(
    found: Found, mesh: str
) -> None:
    lives = found["shards_of_meshes:4"]
    assert len(lives) == 4
    for each in lives:
        saved = each[f"{mesh}: shards_saved"]
        assert (saved["here"], saved["saved"], saved["differs"]) == (0, [], [])
        if not IS_CI:
            assert each[f"{mesh}: shards_seen"] == {"seen": True, "here": 0, "differs": []}
            assert each[f"{mesh}: shards_resumed"] == {"step": 2, "differs": []}


@pytest.mark.parametrize("processes", _KEEPING)
def test_a_run_goes_on_from_the_checkpoint_that_all_processes_have(found: Found, processes: int) -> None:
    assert found[f"shards_resumed:{processes}"] == [{"step": 2, "differs": []}] * processes


@pytest.mark.parametrize("processes", _KEEPING)
def test_distributed_checkpoints_are_written_and_read_within_the_quotas(found: Found, processes: int) -> None:
    for each in found[f"shards_saved:{processes}"]:
        assert (each["here"], each["saved"], each["differs"]) == (0, [], [])
        assert "run.save and run.load know the parts of one process alone" in each["refused"]


@pytest.mark.filterwarnings("ignore:torch.distributed is")
@pytest.mark.parametrize("processes", _KEEPING)
def test_a_distributed_checkpoint_is_read_by_one_process_without_fsdp(found: Found, processes: int) -> None:
    state = {"model": Deep().state_dict()}
    saved: Any = found["folder"][0] / f"shards_saved-{processes}" / "saved"
    load(state, checkpoint_id=saved)
    read = {name: each.tolist() for name, each in state["model"].items()}
    assert read == found[f"shards_saved:{processes}"][0]["whole"]
