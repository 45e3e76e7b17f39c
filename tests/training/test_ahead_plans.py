"""What a plan has of steps that are made ahead: no step that comes out otherwise changes the next ones."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import pytest

import tierstore as ts
from tests.training.recorded_machines import BEFORE_STEADY, mlp, opened, step
from tierstore.leases import Lease
from tierstore.planning.program import Does, Phase
from tierstore.training.budgets.prefetcher import Prefetcher

QUOTA = "640KB"
"""Of a device that holds two thirds of the model, its gradients and its state."""


def test_a_use_is_noted_when_new_values_have_their_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plan has passed is pushed out first: the only other replica of the old values, too."""
    told: list[object] = []
    split, note = Lease.split, Prefetcher.note

    def splits(lease: Lease, names: Mapping[str, str]) -> bool:
        is_split = split(lease, names)
        told.append(tuple(names) if is_split else ())
        return is_split

    def notes(prefetcher: Prefetcher, *keys: str) -> None:
        told.extend(keys)
        note(prefetcher, *keys)

    monkeypatch.setattr(Lease, "split", splits)
    monkeypatch.setattr(Prefetcher, "note", notes)
    trained = mlp()
    with opened(trained, tmp_path, QUOTA):
        for _ in range(BEFORE_STEADY):
            step(trained)
    made = [number for number, each in enumerate(told) if isinstance(each, tuple) and each]
    assert len(made) > 6, "hardly a step was made ahead: the test shows nothing"
    for number in made:
        keys = told[number]
        assert isinstance(keys, tuple)
        assert tuple(told[number + 1 : number + 1 + len(keys)]) == keys


def test_steps_in_place_for_want_of_a_second_replica_leave_the_plan_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int] = []
    followed: list[int] = []
    failed: list[str] = []
    split, follow = Lease.split, ts.Store.follow

    def splits(lease: Lease, names: Mapping[str, str]) -> bool:
        if begun[-1] == BEFORE_STEADY:
            failed.extend(names)
            return False
        return split(lease, names)

    def follows(store: ts.Store, plan: object) -> None:
        followed.append(begun[-1])
        follow(store, plan)  # type: ignore[arg-type]

    monkeypatch.setattr(Lease, "split", splits)
    monkeypatch.setattr(ts.Store, "follow", follows)
    trained = mlp()
    with opened(trained, tmp_path, QUOTA):
        for number in range(BEFORE_STEADY + 4):
            begun.append(number)
            step(trained)
    assert len(failed) > 4, "no step was to be made ahead: the test shows nothing"
    assert max(followed) < BEFORE_STEADY - 1, "every step is as the one before"


def test_no_old_values_come_to_the_device_that_new_ones_are_about_to_replace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: dict[str, float] = {}  # when new values of a key were made
    replaced: dict[str, float] = {}
    split, rename = Lease.split, ts.Store.rename

    def splits(lease: Lease, names: Mapping[str, str]) -> bool:
        is_split = split(lease, names)
        made.update(dict.fromkeys(names if is_split else (), time.perf_counter()))
        return is_split

    def renames(store: ts.Store, names: Mapping[str, str], *, replace: bool = False) -> None:
        replaced.update(dict.fromkeys(names.values(), time.perf_counter()))
        rename(store, names, replace=replace)

    trained = mlp()
    with opened(trained, tmp_path, QUOTA) as run:
        for _ in range(BEFORE_STEADY):
            step(trained)
        monkeypatch.setattr(Lease, "split", splits)
        monkeypatch.setattr(ts.Store, "rename", renames)
        with run.store.recorded() as recording:
            step(trained)
    assert len(made) > 4, "hardly a step was made ahead: the test shows nothing"
    in_vain = [
        copy.key
        for copy in recording.copies
        if copy.target == "device"
        and copy.key in replaced
        and made[copy.key] < copy.begin_s < replaced[copy.key]
    ]
    assert in_vain == []


def test_a_program_has_the_host_s_time_for_steps_that_are_made_ahead(tmp_path: Path) -> None:
    trained = mlp()
    with opened(trained, tmp_path, QUOTA) as run:
        for _ in range(4):
            step(trained)
        program = run.program()
    ahead = [
        moment
        for moment in program.moments
        if moment.phase is Phase.OPTIMIZER and moment.uses and moment.uses[-1].does is not Does.END
    ]
    assert len(ahead) == 6
    assert all(moment.host_s > 0 for moment in ahead)
