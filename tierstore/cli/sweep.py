"""``--sweep max_device_memory=4GB..80GB``: how long a step takes with how much memory.

Points lie geometrically, both ends among them: doubling the memory is as far everywhere.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tierstore.cli.comparing import Planned
from tierstore.cli.seconds import format_seconds
from tierstore.errors import CapacityError, ConfigError, UsageError
from tierstore.quoting import quoted
from tierstore.units import GIB, format_bytes, parse_bytes

SWEPT = ("max_device_memory", "offload_cpu_size", "offload_disk_size")
"""The quotas that can be swept."""

MOST_POINTS = 200

_USUAL_POINTS = 9
_ACCEPTED = (
    f"NAME=LEAST..MOST or NAME=LEAST..MOST:POINTS, as max_device_memory=4GB..80GB:12; NAME one of "
    f"{', '.join(SWEPT)}; two sizes above 0, the smaller one first; 2 to {MOST_POINTS} points"
)
_TEXT = re.compile(
    r"(?P<name>\w+)=(?P<least>[^:]+?)\.\.(?P<most>[^:]+?)(?::(?P<points>[0-9]{1,6}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """One quota at several sizes.

    Attributes:
        name: of the quota, one of `SWEPT`.
        quotas_bytes: ascending.
    """

    name: str
    quotas_bytes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SweepPoint:
    """What a quota comes to.

    Attributes:
        quota_bytes: the quota.
        step_s: predicted seconds of a step; ``None``: it does not fit.
        bound_s: seconds that no placement's step is shorter than; ``None``: unknown.
        peak_bytes: by tier, the most that is held there.
        moved_bytes: by link, of one step.
        why: it does not fit.
    """

    quota_bytes: int
    step_s: float | None
    bound_s: float | None = None
    peak_bytes: tuple[tuple[str, int], ...] = ()
    moved_bytes: tuple[tuple[str, float], ...] = ()
    why: str = ""


def parse_sweep(text: str) -> Sweep:
    """Read what is to be swept, as ``"max_device_memory=4GB..80GB"``, or with ``":12"`` for 12 points.

    Sizes are powers of 1024.  Two points of the same size are one.

    Raises:
        UsageError: the text says something else; what is accepted is named.
    """
    match = _TEXT.fullmatch(text.strip())
    if match is None or match["name"] not in SWEPT:
        raise UsageError(f"--sweep {quoted(text)}: accepted: {_ACCEPTED}")
    try:
        least, most = parse_bytes(match["least"].strip()), parse_bytes(match["most"].strip())
    except ConfigError as error:
        raise UsageError(f"--sweep {quoted(text)}: {error}") from error
    points = int(match["points"] or _USUAL_POINTS)
    if not (0 < least < most and 2 <= points <= MOST_POINTS):
        raise UsageError(f"--sweep {quoted(text)}: accepted: {_ACCEPTED}")
    between = [round(least * (most / least) ** (number / (points - 1))) for number in range(1, points - 1)]
    return Sweep(match["name"], tuple(sorted({least, *between, most})))


def swept(sweep: Sweep, plan: Callable[[int], Planned]) -> list[SweepPoint]:
    """Return what each quota comes to, as ``plan`` finds it.

    Args:
        sweep: the quotas.
        plan: plans with a quota in bytes; where nothing fits it raises `tierstore.CapacityError`, or what it
            returns has no timeline.
    """
    return [_point(quota_bytes, plan) for quota_bytes in sweep.quotas_bytes]


def sweep_table(points: Sequence[SweepPoint]) -> str:
    """Return a table of the points, one a line, with what is moved by each link and held in each tier."""
    links = list(dict.fromkeys(link for point in points for link, _ in point.moved_bytes))
    tiers = list(dict.fromkeys(tier for point in points for tier, _ in point.peak_bytes))
    head = ["quota", "step", "bound", *links, *(f"peak of {tier}" for tier in tiers)]
    rows = [head, *(_cells(point, links, tiers) for point in points)]
    widths = [max(len(row[number]) for row in rows if number < len(row)) for number in range(len(head))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=False)) for row in rows
    )


def sweep_json(points: Sequence[SweepPoint]) -> list[dict[str, object]]:
    """Return the points as plain values; sizes in bytes, times in seconds."""
    return [
        {
            "quota_bytes": point.quota_bytes,
            "fits": point.step_s is not None,
            "step_s": point.step_s,
            "bound_s": point.bound_s,
            "moved_bytes": dict(point.moved_bytes),
            "peak_bytes": dict(point.peak_bytes),
            "why": point.why,
        }
        for point in points
    ]


def write_sweep_png(
    points: Sequence[SweepPoint], path: Path | str, *, name: str = "max_device_memory"
) -> None:
    """Write a picture of time against memory; what does not fit is shaded.

    Args:
        points: at least one.
        path: of the file, which is replaced.
        name: of the quota, below the picture.

    Raises:
        UsageError: matplotlib, of the extra ``plan``, is not installed, or there is no point.
        OSError: the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UsageError("a picture of a sweep needs matplotlib: pip install 'tierstore[plan]'") from error
    if not points:
        raise UsageError("a picture of a sweep needs at least one point; there is none")
    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    fits = [(point.quota_bytes / GIB, point.step_s) for point in points if point.step_s is not None]
    bounds = [(point.quota_bytes / GIB, point.bound_s) for point in points if point.bound_s is not None]
    unfit = [point.quota_bytes / GIB for point in points if point.step_s is None]
    axes.set_xscale("log", base=2)
    if fits:
        axes.plot(*zip(*fits, strict=True), marker="o", label="predicted step")
    if bounds:
        axes.plot(*zip(*bounds, strict=True), linestyle="--", color="gray", label="no placement is faster")
    if unfit:
        axes.axvspan(min(unfit), max(unfit), color="tab:red", alpha=0.12)
        axes.plot(unfit, [0.0] * len(unfit), "x", color="tab:red", clip_on=False, label="does not fit")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda gib, _: format_bytes(round(gib * GIB)))
    axes.set_xlabel(name)
    axes.set_ylabel("seconds of a step")
    axes.grid(alpha=0.3)
    axes.legend()
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    Path(path).write_bytes(picture.getvalue())


def _point(quota_bytes: int, plan: Callable[[int], Planned]) -> SweepPoint:
    try:
        planned = plan(quota_bytes)
    except CapacityError as error:
        return SweepPoint(quota_bytes, None, why=str(error))
    timeline = planned.timeline
    if timeline is None:
        return SweepPoint(quota_bytes, None, planned.bound_s, why=planned.why)
    peaks, moved = tuple(timeline.peak_bytes.items()), tuple(timeline.moved_bytes.items())
    return SweepPoint(quota_bytes, timeline.step_s, planned.bound_s, peaks, moved)


def _cells(point: SweepPoint, links: Sequence[str], tiers: Sequence[str]) -> list[str]:
    quota = format_bytes(point.quota_bytes)
    if point.step_s is None:
        return [quota, "does not fit"]
    moved, peaks = dict(point.moved_bytes), dict(point.peak_bytes)
    bound = "-" if point.bound_s is None else format_seconds(point.bound_s)
    sizes = [*(moved.get(link, 0) for link in links), *(peaks.get(tier, 0) for tier in tiers)]
    return [quota, format_seconds(point.step_s), bound, *(format_bytes(round(each)) for each in sizes)]
