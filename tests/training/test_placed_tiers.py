"""What a placement says of tiers is obeyed, bit for bit: ``high``, ``shares``, residents beside a device."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

from tests.training.test_placement import DOWN, given, observed
from tests.training.twins import (
    WIDTH,
    Trial,
    assert_same,
    build_blocks,
    config_of,
    is_on_accelerator,
    steps,
    with_device,
)
from tierstore.errors import CapacityError, ConfigError
from tierstore.planning import Plan
from tierstore.training import Offload, offload
from tierstore.units import KIB, MIB

PATIENCE_S = 60.0

pytestmark = pytest.mark.skipif(is_on_accelerator, reason="what is charged is told of emulated tiers")


def _is_above(run: Offload, tier: str, share: float) -> bool:
    stats = run.store.stats().tiers[tier]
    return stats.charged_bytes > math.floor(share * stats.capacity_bytes)


def _settles_at(run: Offload, tier: str, share: float) -> None:
    """Wait until no more than a share of a tier is charged: copies down are on their way."""
    begin_s = time.monotonic()
    while _is_above(run, tier, share):
        assert time.monotonic() - begin_s < PATIENCE_S


SHARED = [(layout, tier) for layout, tier in (("disk", "host"), ("device", "device"), ("three", "device"))]


@pytest.mark.parametrize(("layout", "tier"), SHARED)
def test_a_tier_writes_back_above_the_share_that_a_placement_says(
    layout: str, tier: str, tmp_path: Path
) -> None:
    room = with_device(layout, "768KB") or {"offload_cpu_size": "768KB"}  # for everything
    above: list[bool] = []
    assert_same(
        build_blocks,
        observed(lambda run: above.append(_is_above(run, tier, 0.25)), 4),
        layout,
        tmp_path,
        room,
    )
    assert above[2:] == [True, True]  # where nobody says so it stays
    more = {**room, **given(high={tier: 0.25})}
    assert_same(build_blocks, observed(lambda run: _settles_at(run, tier, 0.25), 4), layout, tmp_path, more)


def test_what_a_tier_writes_back_above_outlives_a_pause(tmp_path: Path) -> None:
    def loop(trial: Trial) -> None:
        for _ in range(2):
            steps(3)(trial)
            if trial.run is not None:
                _settles_at(trial.run, "device", 0.5)
                trial.run.suspend()
                trial.run.resume()

    more = {**with_device("three", "256KB"), "offload_cpu_size": "64MB", **given(high={"device": 0.5})}
    assert_same(build_blocks, loop, "three", tmp_path, more)


@pytest.mark.parametrize(("layout", "tier"), [*SHARED, ("three", "host"), ("three", "disk")])
def test_a_run_uses_the_share_of_a_tier_that_a_placement_says(layout: str, tier: str, tmp_path: Path) -> None:
    whole_bytes = 64 * MIB if tier == "disk" else 512 * KIB
    peaks: list[int] = []

    def look(run: Offload) -> None:
        stats = run.store.stats().tiers[tier]
        # Of a device the store has what the program leaves.
        assert (stats.capacity_bytes == whole_bytes // 2) != (tier == "device")
        assert stats.capacity_bytes <= whole_bytes // 2
        peaks.append(stats.peak_charged_bytes)
        assert run.placement.shares == {tier: 0.5}

    more = {**with_device(layout, "512KB"), "offload_cpu_size": "512KB", **given(shares={tier: 0.5})}
    assert_same(build_blocks, observed(look, 4), layout, tmp_path, more)
    assert max(peaks) <= whole_bytes // 2


def test_the_program_has_its_part_of_the_share_of_a_device(tmp_path: Path) -> None:
    """Half of a quota is what half the quota is, byte by byte."""

    def measured(more: Mapping[str, object]) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        trial = Trial(*build_blocks())
        with offload(trial.model, list(trial.optimizers), config_of("device", tmp_path, more)) as run:
            for _ in range(4):
                steps(1)(trial)
                stats = run.store.stats()
                found.append((stats.tiers["device"].capacity_bytes, stats.traffic["host", "device"].nbytes))
        return found

    half = measured({"max_device_memory": "300KB", **given(shares={"device": 0.5})})
    assert half == measured({"max_device_memory": "150KB"})
    assert half != measured({"max_device_memory": "300KB"})


def test_a_share_that_is_too_small_is_refused_as_a_quota_of_that_size(tmp_path: Path) -> None:
    model, optimizers = build_blocks()
    more = given(shares={"device": 0.001})
    with pytest.raises(CapacityError, match="max_device_memory is 114 B"):
        offload(model, list(optimizers), config_of("device", tmp_path, more))


def test_what_a_tier_is_used_for_decides_whether_everything_fits(tmp_path: Path) -> None:
    fits, shared, early = (
        {"offload_cpu_size": "1MB", **more}
        for more in ({}, given(shares={"host": 0.2}), given(high={"host": 0.2}))
    )
    plans = []
    for more in (fits, shared, early):
        model, optimizers = build_blocks()
        with offload(model, list(optimizers), config_of("disk", tmp_path, more)) as run:
            plans.append((dict(run.placement.ahead), run.placement.residents))
    assert plans == [({}, frozenset()), ({"host": 0.25}, None), ({"host": 0.25}, None)]


def test_the_share_of_a_quota_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizers = build_blocks()
    more = {"offload_cpu_size": "1MiB", **given(shares={"host": 0.5})}
    with (
        caplog.at_level(logging.INFO, "tierstore"),
        offload(model, list(optimizers), config_of("disk", tmp_path, more)),
    ):
        pass
    assert "of 0.5 of offload_cpu_size, 512.0 KiB" in caplog.text


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        ({"high": {"disk": 0.5}}, "high: disk: no tier is below it"),
        ({"high": {"tape": 0.5}}, "high: tape: this run has device, host, disk"),
        ({"shares": {"tape": 0.5}}, "shares: tape: this run has device, host, disk"),
        ({"shares": {"host": 0}}, r"shares\[host\]=0: accepted"),
        ({"high": {"host": 1.5}}, r"high\[host\]=1\.5: accepted"),
    ],
)
def test_tiers_and_shares_that_are_none_are_refused_by_name(
    placement: Mapping[str, object], said: str, tmp_path: Path
) -> None:
    model, optimizers = build_blocks()
    with pytest.raises(ConfigError, match=said):
        offload(model, list(optimizers), config_of("three", tmp_path, {"placement": placement}))
    assert all(type(each) is torch.nn.Parameter for each in model.parameters())


# ---------------------------------------------------------------------- residents


@pytest.mark.parametrize("layout", ["device", "three"])
def test_residents_stay_on_the_device_as_long_as_anything_else_can_go(layout: str, tmp_path: Path) -> None:
    found: dict[bool, list[bool]] = {True: [], False: []}
    for is_resident in (False, True):

        def look(run: Offload, seen: list[bool] = found[is_resident]) -> None:
            seen.append(run.store.where(DOWN)[0] == "device")

        more = {**with_device(layout, "160KB"), **(given(residents=[DOWN]) if is_resident else {})}
        assert_same(build_blocks, observed(look, 6), layout, tmp_path, more)
    assert found[True][2:] == [True] * 4
    assert found[False][2:] != [True] * 4


def test_a_buffer_may_be_a_resident(tmp_path: Path) -> None:
    class Masked(nn.Module):
        """Computes with a large buffer."""

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("mask", torch.ones(WIDTH, WIDTH))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            product: torch.Tensor = self.linear(values) @ self.mask
            return product

    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    more = {"buffer_min_size": 0, "offload_cpu_size": "112KB", **given(residents=["buffer/mask"])}
    plans: list[Plan | None] = []
    with (
        offload(model, optimizer, config_of("disk", tmp_path, more)) as run,
        mock.patch.object(run.store, "follow", plans.append),
    ):
        for _ in range(2):
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert [set(plan.residents) for plan in plans if plan is not None] == [{"buffer/mask"}]


def test_what_fits_beside_its_program_stays_on_a_device_above_two_tiers(tmp_path: Path) -> None:
    def went_down(rows: int) -> bool:
        """Train on so many rows; return whether the last step wrote anything back."""
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(12)])
        optimizer = torch.optim.Adam(model.parameters())
        more = {**with_device("three", "1300KB"), "offload_cpu_size": "64MB"}  # 800 KB are trained
        with offload(model, optimizer, config_of("three", tmp_path / str(rows), more)) as run:
            down = [0]
            for _ in range(5):
                model(torch.ones(rows, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                traffic = run.store.stats().traffic
                down.append(sum(each.nbytes for (source, _), each in traffic.items() if source == "device"))
            return down[-1] > down[-2]

    assert not went_down(rows=2), "all of it fits"
    assert went_down(rows=256)
