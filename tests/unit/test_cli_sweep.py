"""Time against memory, and two plans side by side: what they say, and what they refuse."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.timelines import GB, timeline
from tierstore.cli.comparing import compare_json, compare_table
from tierstore.cli.sweep import (
    MOST_POINTS,
    SWEPT,
    Sweep,
    parse_sweep,
    sweep_json,
    sweep_table,
    swept,
    write_sweep_png,
)
from tierstore.errors import CapacityError, UsageError
from tierstore.planning import Placement, Timeline
from tierstore.units import GIB, MIB

_QUOTA = Sweep("max_device_memory", (GIB, 2 * GIB, 4 * GIB))


@dataclass(frozen=True)
class _Plan:
    """What somebody planned."""

    timeline: Timeline | None
    placement: Placement | None = None
    bound_s: float | None = None
    why: str = ""


def _plan(quota_bytes: int) -> _Plan:
    if quota_bytes < 2 * GIB:
        raise CapacityError("'head' needs 1.5 GiB of 1.0 GiB")
    return _Plan(timeline(pace_s=0.010 * 4 * GIB / quota_bytes), Placement(), 0.05)


@given(
    name=st.sampled_from(SWEPT),
    least=st.integers(1, 2**20),
    ratio=st.integers(2, 2**12),
    points=st.integers(2, MOST_POINTS),
)
def test_points_are_geometric_with_both_ends_and_no_two_alike(
    name: str, least: int, ratio: int, points: int
) -> None:
    sweep = parse_sweep(f"{name}={least}MB..{least * ratio}MB:{points}")
    quotas = sweep.quotas_bytes
    assert sweep.name == name
    assert (quotas[0], quotas[-1], len(quotas)) == (least * MIB, least * ratio * MIB, points)
    assert list(quotas) == sorted(set(quotas))
    for number in range(points):
        assert quotas[number] == pytest.approx(least * MIB * ratio ** (number / (points - 1)), rel=1e-6)


def test_nine_points_are_usual() -> None:
    quotas = parse_sweep("max_device_memory=4GB..64GB").quotas_bytes
    assert [quotas[n] for n in (0, 2, 4, 6, 8)] == [n * GIB for n in (4, 8, 16, 32, 64)]
    assert len(quotas) == 9


def test_points_that_are_the_same_size_are_one() -> None:
    assert parse_sweep("max_device_memory=1B..3B:200").quotas_bytes == (1, 2, 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "max_device_memory",
        "max_device_memory=4GB",
        "max_device_memory=4GB..",
        "max_device_memory=80GB..4GB",
        "max_device_memory=4GB..4GB",
        "max_device_memory=0B..4GB",
        "max_device_memory=-1GB..4GB",
        "max_device_memory=4..80",
        "max_device_memory=nanGB..80GB",
        "max_device_memory=4GB..80GB:1",
        "max_device_memory=4GB..80GB:201",
        "max_device_memory=4GB..80GB:999999999999",
        "hbm_ratio=4GB..80GB",
        "max_device_memory=4GB..8GB..16GB",
    ],
)
def test_what_is_no_sweep_is_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(UsageError, match=r"(?i)--sweep .*accepted: "):
        parse_sweep(text)


@given(st.text(max_size=40))
def test_no_text_is_a_traceback(text: str) -> None:
    for each in (text, f"max_device_memory={text}", f"max_device_memory=4GB..{text}"):
        with suppress(UsageError):
            assert len(parse_sweep(each).quotas_bytes) >= 2


def test_a_quota_that_does_not_fit_is_a_point_with_its_reason() -> None:
    points = swept(_QUOTA, _plan)
    assert [point.step_s is None for point in points] == [True, False, False]
    assert points[0].why == "'head' needs 1.5 GiB of 1.0 GiB"
    assert points[1].step_s == pytest.approx(2 * points[2].step_s)  # type: ignore[operator]
    assert swept(_QUOTA, lambda quota: _Plan(None, why="too small"))[0].why == "too small"


def test_the_table_has_a_line_a_point() -> None:
    head, *lines = sweep_table(swept(_QUOTA, _plan)).splitlines()
    assert head.split() == ["quota", "step", "bound", "host->device", "peak", "of", "device"]
    assert lines[0].split() == ["1.0", "GiB", "does", "not", "fit"]
    assert lines[2].split() == ["4.0", "GiB", "105", "ms", "50", "ms", "953.7", "MiB", "1.9", "GiB"]
    assert len(lines) == 3


def test_the_table_of_what_never_fits_has_no_empty_columns() -> None:
    points = swept(_QUOTA, lambda quota: _Plan(None))
    assert sweep_table(points).splitlines()[1].split() == ["1.0", "GiB", "does", "not", "fit"]


def test_json_of_a_sweep_has_plain_numbers() -> None:
    first, _, last = json.loads(json.dumps(sweep_json(swept(_QUOTA, _plan))))
    assert (first["fits"], first["step_s"]) == (False, None)
    assert (last["quota_bytes"], last["moved_bytes"]) == (4 * GIB, {"host->device": GB})


def test_the_picture_has_the_line_and_what_does_not_fit(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    path = tmp_path / "sweep.png"
    write_sweep_png(swept(_QUOTA, _plan), path)
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    assert (pixels == (31, 119, 180)).all(axis=2).any()  # tab:blue
    assert (pixels == (214, 39, 40)).all(axis=2).any()  # tab:red
    write_sweep_png(swept(_QUOTA, lambda quota: _plan(4 * GIB)), path)
    pixels = (image.imread(path)[:, :, :3] * 255).round().astype(int)
    assert not (pixels == (214, 39, 40)).all(axis=2).any()


def test_without_matplotlib_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UsageError, match=r"pip install 'tierstore\[plan\]'"):
        write_sweep_png(swept(_QUOTA, _plan), tmp_path / "sweep.png")
    assert list(tmp_path.iterdir()) == []


def test_no_point_is_no_picture(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one point"):
        write_sweep_png([], tmp_path / "sweep.png")


def test_two_plans_stand_side_by_side_with_their_ratio() -> None:
    a = _Plan(timeline(), Placement(high={"device": 0.75}), 0.05)
    b = _Plan(timeline(pace_s=0.02), Placement(high={"device": 0.5}), 0.05)
    lines = compare_table(a, b, names=("given", "chosen")).splitlines()
    assert lines[0].split() == ["given", "chosen", "chosen", "/", "given"]
    assert lines[1].split() == ["seconds", "of", "a", "step", "105", "ms", "210", "ms", "2.000"]
    assert "-  device writes back above 0.75 of it" in lines
    assert "+  device writes back above 0.5 of it" in lines
    assert not any("gradients are stashed" in line for line in lines)


def test_the_same_placement_is_said_to_be_the_same() -> None:
    plan = _Plan(timeline(), Placement())
    assert compare_table(plan, plan).splitlines()[-1] == "the same placement"


def test_one_that_does_not_fit_is_compared_too() -> None:
    fits, unfit = _Plan(timeline(), Placement(), 0.05), _Plan(None, why="3 GiB are missing")
    text = compare_table(fits, unfit)
    assert "b does not fit: 3 GiB are missing" in text
    assert "+no placement" in text
    found = json.loads(json.dumps(compare_json(fits, unfit)))
    assert (found["a"]["fits"], found["b"]["fits"], found["ratios"]) == (True, False, {})
    assert found["b"]["placement"] is None


def test_json_of_a_comparison_reads_back_as_the_placements() -> None:
    a = _Plan(timeline(), Placement(high={"device": 0.75}))
    b = _Plan(timeline(pace_s=0.02), Placement())
    found = json.loads(json.dumps(compare_json(a, b)))
    assert Placement.from_mapping(found["a"]["placement"]) == a.placement
    assert found["ratios"]["seconds of a step"] == pytest.approx(2)
    assert found["a"]["moved_bytes"] == {"host->device": GB}
