"""Checkpoints of several processes: the last one that all have made is what all go on from."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed

from tests.forked_programs import run_program
from tests.sampling import IS_CI
from tests.training.rank_victim import OUTCOME, PROCESSES
from tests.training.test_durable_kills import assert_same
from tests.training.test_ranks import Found, led
from tierstore.errors import UsageError
from tierstore.training.ranks.decision import HeldCheckpoints, Stamp, decide

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

_SCENARIOS = (
    "one_cannot:2",
    "checkpoints_for_two:2",
    "one_of_two:1",
    "others_than_before:3",
    "others_than_before:2",
    "group_beside:2",
)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    found = led(tmp_path_factory.mktemp("ranks"), *_SCENARIOS)
    failed = [each for led in found.values() for each in led if isinstance(each, str) and each != "ended"]
    assert not failed, failed[0]
    return found


def test_one_that_cannot_make_a_checkpoint_keeps_all_from_it(found: Found) -> None:
    first, second = found["one_cannot:2"]
    for name, kind in (("wrong extra", "UsageError"), ("in use", "UsageError"), ("broken", "BackendError")):
        assert first[name].startswith(
            f"TierStoreError: rank 1 {'could not make' if name == 'broken' else 'is not ready'}"
        )
        assert kind in first[name]
        assert "The former checkpoint is still the one" in first[name]
        assert second[name].startswith(f"{kind}: ")


def test_the_former_one_is_what_all_go_on_from_then(found: Found) -> None:
    for each in found["one_cannot:2"]:
        assert each["resumed"] == [1, 0]
        assert each["after"] == each["before"]
        assert each["last"] == [3, 4]


def test_nothing_is_kept_when_all_have_it(found: Found) -> None:
    for each in found["one_cannot:2"]:
        assert each["keys"] == [["training/agreed", "training/checkpoint"]] * 2


def test_another_number_of_processes_is_refused_with_both(found: Found) -> None:
    for each in found["others_than_before:3"]:
        assert each["size"].startswith(
            "UsageError: the checkpoints in offload_path were made by 2 processes, "
        )
        assert "and these are 3" in each["size"]


def test_one_process_is_told_of_them_and_may_go_on_in_the_directory_of_one(found: Found) -> None:
    (only,) = found["one_of_two:1"]
    assert "holds the checkpoints of 2 processes (rank-0, rank-1)" in only["beside"]
    assert only["within"] == 2
    assert only["total"] == found["checkpoints_for_two:2"][0]


def test_directories_that_are_lost_or_another_s_are_named_by_all(found: Found) -> None:
    for each in found["others_than_before:2"]:
        assert "no checkpoint that all 2 processes have: rank 0: number 2 (" in each["lost"]
        assert "rank 1: none (rank 1 may have been on another machine)" in each["lost"]
        assert "rank 0: the directory is that of rank 1, and this is rank 0 of 2" in each["swapped"]
        assert (each["anew"], each["after"]) == (True, 3)


def test_a_group_beside_one_that_works_on_devices_alone_ends_with_the_run(found: Found) -> None:
    assert found["group_beside:2"] == ["ended"] * 2


# ---------------------------------------------------------------------- kills


def kill(folder: Path, stride: int, subject: str) -> list[dict[str, Any]]:
    """Kill one process at every so many operations; check what each training came to."""
    done = run_program("tests.training.rank_victim", str(folder), str(stride), subject, timeout_s=3600)
    assert done.returncode == 0, done.stdout
    lives: list[dict[str, Any]] = json.loads((folder / "kills.json").read_text())
    for each in lives:
        assert all(isinstance(end, str) for end in each["first"]) == bool(each["at"]), (each, done.stdout)
        for rank in each["at"]:
            assert each["first"][int(rank)] == "ended with -9"
    for training in (folder / "whole", *folder.glob("training-*")):
        assert len(list((training / "files").glob("rank-*"))) == PROCESSES
        for rank in range(PROCESSES):
            outcome = f"{OUTCOME}-{rank}.pt"
            expected, found = torch.load(folder / "expected" / outcome), torch.load(training / outcome)
            assert_same(expected, found, f"{training.name}, rank {rank}")
    return lives


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "stride", "lives"),
    [("dense", 51, 2), ("tables", 111, 2)] if IS_CI else [("dense", 17, 8), ("tables", 37, 6)],
)
def test_a_process_that_is_killed_leaves_no_trace(
    tmp_path: Path, subject: str, stride: int, lives: int
) -> None:
    assert len(kill(tmp_path, stride, subject)) >= lives


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("subject", ["dense", "tables"])
def test_a_process_that_is_killed_at_any_operation_of_a_checkpoint_leaves_no_trace(
    tmp_path: Path, subject: str
) -> None:
    lives = kill(tmp_path, 1, subject)
    hit = {at.split()[-1] for each in lives for at in each["at"].values()}
    assert hit >= {"put", "flush", "commit", "sync", "write"}


# ---------------------------------------------------------------------- the decision


@dataclass
class Disk:
    """What one process has left, as the rules say it."""

    last: Stamp | None = None
    kept: Stamp | None = None
    agreed: int = 0
    is_agreed: bool = True

    def held(self) -> HeldCheckpoints:
        stamps = tuple(each for each in (self.last, self.kept) if each is not None)
        return HeldCheckpoints(stamps, self.agreed)

    def make(self, stamp: Stamp) -> None:
        if self.is_agreed or self.kept is None:
            self.kept = self.last
        self.last, self.is_agreed = stamp, False

    def let_go(self) -> None:
        assert self.last is not None
        self.kept, self.is_agreed, self.agreed = None, True, self.last.number

    def settle(self, stamp: Stamp | None) -> None:
        if stamp is None:
            self.last = self.kept = None
            self.agreed = 0
        elif self.last != stamp:
            assert self.kept == stamp
            self.last = stamp
        self.kept, self.is_agreed = None, True


@dataclass
class Processes:
    """Processes that make checkpoints, each of which may stop anywhere."""

    disks: list[Disk]
    tokens: int = 0
    made: list[int] = field(default_factory=list)  # by each, as it knows

    def attempt(self, ends: list[int]) -> tuple[Stamp, bool]:
        """Try once; each ends before it makes one (0), after that (1), before it lets go (2), or not (3)."""
        self.tokens += 1
        stamp = Stamp(max(self.made) + 1, str(self.tokens), len(self.disks))
        for disk, end in zip(self.disks, ends, strict=True):
            if end > 0:
                disk.make(stamp)
        is_made = min(ends) > 0
        for rank, (disk, end) in enumerate(zip(self.disks, ends, strict=True)):
            if is_made:
                disk.is_agreed, self.made[rank] = True, stamp.number
                if end > 2:
                    disk.let_go()
        return stamp, is_made


@given(
    attempts=st.lists(
        st.tuples(
            st.lists(st.integers(0, 3), min_size=3, max_size=3), st.sampled_from(["go on", "restart", "torn"])
        ),
        max_size=12,
    )
)
def test_the_last_checkpoint_that_all_have_made_is_found_after_any_of_them_ended(
    attempts: list[tuple[list[int], str]],
) -> None:
    world = Processes([Disk() for _ in range(3)], made=[0] * 3)
    last: Stamp | None = None
    for ends, then in attempts:
        stamp, is_made = world.attempt(ends)
        last = stamp if is_made else last
        if then == "go on":
            continue
        found = decide([disk.held() for disk in world.disks])
        assert found == last
        settled = (
            world.disks if then == "restart" else world.disks[:1]
        )  # the others are killed before they settle
        for disk in settled:
            disk.settle(found)
        assert decide([disk.held() for disk in world.disks]) == last
        for disk in world.disks:
            disk.settle(found)
        world.made = [0 if found is None else found.number] * 3


def test_checkpoints_that_do_not_belong_together_are_refused() -> None:
    one, other = (HeldCheckpoints((Stamp(4, token, 2), Stamp(3, token, 2)), 3) for token in "ab")
    with pytest.raises(
        UsageError, match=r"rank 0: number 3 \(a\) and number 4 \(a\); rank 1: number 3 \(b\)"
    ):
        decide([one, other])
    with pytest.raises(UsageError, match=r"rank 1: none \(rank 1 may have been on another machine\)"):
        decide([HeldCheckpoints((Stamp(1, "a", 2),), 1), HeldCheckpoints()])
    with pytest.raises(UsageError, match=r"rank 1: it is damaged"):
        decide([one, HeldCheckpoints(fault="it is damaged")])
