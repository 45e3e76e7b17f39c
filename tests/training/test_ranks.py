"""Processes that train together: what each gets of a machine's quotas, and what they refuse together."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.forked_programs import run_program
from tierstore.config import OffloadConfig
from tierstore.errors import ConfigError, UsageError
from tierstore.training import processes
from tierstore.training.ranks.introductions import Introduction, judge, locals_of
from tierstore.training.ranks.partings import Parting, Partings
from tierstore.training.ranks.shares import share_of
from tierstore.training.ranks.where import RankPlace, here
from tierstore.units import GIB, MIB

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = Mapping[str, list[Any]]

_SCENARIOS = ("shares:2", "faults:2", "before_the_group:2", "nothing_with_one:1")


def led(folder: Path, *scenarios: str) -> dict[str, list[Any]]:
    """Lead scenarios; return what each process of each found."""
    done = run_program("tests.training.rank_lives", str(folder), *scenarios)
    assert done.returncode == 0, done.stderr
    return {each: json.loads((folder / f"{each.replace(':', '-')}.json").read_text()) for each in scenarios}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("ranks"), *_SCENARIOS)
    failed = [each for led in found.values() for each in led if isinstance(each, str)]
    assert not failed, failed[0]
    return found


@pytest.mark.parametrize("how", ["told", "counted"])
def test_quotas_of_host_and_disk_are_shared_and_each_has_a_directory(found: Found, how: str) -> None:
    for each in found["shares:2"]:
        assert each[how] == {"host": 4 * MIB, "disk": 16 * MIB}
        assert each[f"{how} directories"] == ["rank-0", "rank-1"]


def test_what_is_left_open_is_shared_too(found: Found) -> None:
    import psutil

    for each in found["shares:2"]:
        assert 0 < each["free"]["host"] <= psutil.virtual_memory().total // 2
        assert each["free"]["disk"] > 0


def test_the_quota_of_a_device_is_each_process_s_own(found: Found) -> None:
    assert [each["device"]["device"] for each in found["shares:2"]] == [MIB] * 2


def test_a_directory_that_is_the_process_s_own_already_is_taken_as_it_is(found: Found) -> None:
    assert [each["own directories"] for each in found["shares:2"]] == [["rank-0", "rank-1"]] * 2


def test_a_run_alone_shares_nothing(found: Found) -> None:
    assert [each["alone"] for each in found["shares:2"]] == [8 * MIB] * 2


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("quotas", "offload_cpu_size is 8388608 on rank 0; 9437184 on rank 1; accepted: the same"),
        ("device", "max_device_memory is 1048576 on rank 0; 2097152 on rank 1"),
        ("settings", "eviction is 'lru' on rank 0; 'next-use' on rank 1"),
        ("settings", "checksum is True on rank 0; False on rank 1"),
        ("resume", "resume is True on rank 0; False on rank 1"),
        ("ignored", "ignored tensors is ['0.bias', '0.weight'] on rank 0; ['2.bias', '2.weight'] on rank 1"),
        ("another's directory", "rank 1: offload_path="),
        (
            "nothing",
            "offload_cpu_size=1: shared by the 2 processes of its machine it leaves nothing for rank 0",
        ),
        ("more than there is", "ranks 0, 1 are on one machine and may have"),
    ],
)
def test_what_is_wrong_is_said_by_all_of_them_in_the_same_words(found: Found, fault: str, said: str) -> None:
    first, second = (each[fault] for each in found["faults:2"])
    assert first == second
    assert first.startswith("ConfigError: the 2 processes cannot train together:")
    assert said in first


def test_a_share_that_is_too_small_is_told_from_the_whole(found: Found) -> None:
    for rank, each in enumerate(found["faults:2"]):
        assert each["too small"].startswith("CapacityError")
        assert (
            f"rank {rank} of 2, one of 2 on this machine, has 2.0 KiB of host memory of 4.0 KiB"
            in (each["too small"])
        )


def test_torchrun_says_which_process_it_is_where_there_is_no_group_yet(found: Found) -> None:
    for rank, each in enumerate(found["before_the_group:2"]):
        assert each["host"] == 4 * MIB
        assert any("was not compared" in message for message in each["messages"])
        assert f"UsageError: this is rank {rank} of 2, and durable is set" in each["durable"]
        assert "ConfigError: torchrun's variables cannot be true: RANK='two'" in each["wrong"]
        assert each["single"] == 8 * MIB


def test_with_one_process_nothing_is_imported(found: Found) -> None:
    (only,) = found["nothing_with_one:1"]
    assert only["imported"] == []
    assert not [name for name in only["files"] if name.startswith("rank")]


def test_a_process_that_ends_instead_of_coming_is_noticed(tmp_path: Path) -> None:
    led(tmp_path, "one_that_does_not_come:2")
    said = (tmp_path / "one_that_does_not_come-2" / "said").read_text()
    assert "rank 0 of 2 waited for the others in offload(...), and one of them has ended" in said


# ---------------------------------------------------------------------- what is decided


def introduction(
    rank: int, machine: str, quota_bytes: int | None = None, told: int | None = None
) -> Introduction:
    quotas = {} if quota_bytes is None else {"offload_cpu_size": quota_bytes}
    return Introduction(RankPlace(rank, 4, machine, told), {"eviction": "'lru'"}, quotas, 8 * GIB)


def test_processes_of_a_machine_are_counted_where_torchrun_did_not_start_them() -> None:
    assert locals_of([introduction(rank, "ab"[rank > 2]) for rank in range(4)]) == [3, 3, 3, 1]


def test_two_groups_of_processes_on_one_machine_are_added_up() -> None:
    judge([introduction(rank, "ab"[rank // 2], 6 * GIB, told=2) for rank in range(4)])
    with pytest.raises(ConfigError, match=r"ranks 0, 1, 2, 3 are on one machine and may have 12\.0 GiB"):
        judge([introduction(rank, "a", 6 * GIB, told=2) for rank in range(4)])


def test_a_share_is_of_each_directory(tmp_path: Path) -> None:
    given = OffloadConfig(
        device="cpu",
        offload_cpu_size="8MiB",
        offload_disk_size="64MiB",
        offload_path=[str(tmp_path / "a"), str(tmp_path / "b")],
    )
    share = share_of(given, RankPlace(5, 8, "a", 4), 4)
    assert share.offload_path == (str(tmp_path / "a" / "rank-5"), str(tmp_path / "b" / "rank-5"))
    assert (share.offload_cpu_size, share.offload_disk_size) == (2 * MIB, 16 * MIB)
    with pytest.raises(ConfigError, match=r"is the directory of another"):
        share_of(OffloadConfig(offload_path=str(tmp_path / "rank-4")), RankPlace(5, 8, "a", 4), 4)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, (3, 4, 2)),
        ({"RANK": "4", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None),
        ({"RANK": "1", "WORLD_SIZE": "", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, None),
    ],
)
def test_torchrun_s_variables_are_numbers_that_can_be_true(
    variables: dict[str, str], expected: tuple[int, int, int] | None
) -> None:
    if expected is None:
        with pytest.raises(ConfigError, match="cannot be true: RANK="):
            here(variables)
    else:
        found = here(variables)
        assert (found.rank, found.world_size, found.told_local) == expected


class Group:
    """A process group of which only the store is asked for."""

    def __init__(self, store: Any) -> None:  # noqa: ANN401 - one of PyTorch's, or what fails as one
        self.get_group_store = lambda: store


class GoneStore:
    """A store whose process has ended: every call fails, and is counted."""

    def __init__(self) -> None:
        self.calls = 0

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever a store has
        self.calls += 1
        raise distributed.DistNetworkError(f"{name}: connection reset by peer")


def test_who_leaves_is_heard_of_by_others_and_those_first_who_left_by_themselves() -> None:
    group = Group(distributed.HashStore())  # type: ignore[attr-defined]
    first, second, third = (Partings(RankPlace(rank, 3, "a", None), group) for rank in range(3))  # type: ignore[arg-type]
    assert third.others() == []
    first.say(Parting(0, "has waited in vain, too", is_by_error=True, is_first=False))
    second.say(Parting(1, "has closed its run"))
    assert [(each.rank, each.is_first, each.is_by_error) for each in third.others()] == [
        (1, True, False),
        (0, False, True),
    ]
    assert [each.why for each in first.others()] == ["has closed its run"]
    again = Partings(RankPlace(1, 3, "a", None), group)  # type: ignore[arg-type]
    assert [each.rank for each in third.others()] == [0]
    assert [each.rank for each in again.others()] == [0]


def test_a_store_that_is_gone_is_done_without_and_asked_once() -> None:
    store = GoneStore()
    partings = Partings(RankPlace(0, 8, "a", None), Group(store))  # type: ignore[arg-type]
    partings.say(Parting(0, "has closed its run"))
    assert (partings.others(), store.calls) == ([], 2)  # the first one was to forget


def test_a_world_size_alone_is_no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not processes.are_several()


def test_one_process_does_not_begin_anew_beside_the_checkpoints_of_several(tmp_path: Path) -> None:
    processes.refuse_directories_of_several(str(tmp_path))
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
        (tmp_path / f"rank-{rank}" / "tierstore.db").touch()
    with pytest.raises(UsageError, match=r"holds the checkpoints of 2 processes \(rank-0, rank-1\)"):
        processes.refuse_directories_of_several([str(tmp_path)])
    (tmp_path / "tierstore.db").touch()
    processes.refuse_directories_of_several(tmp_path)
