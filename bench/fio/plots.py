"""Pictures of results: what the jobs given can show, as PNG files.

Drawn from entries of fio's JSON, so fio's own results stand beside the store's.  Needs matplotlib, which
is imported when something is drawn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.fio import values
from bench.fio.report import Outcome
from bench.fio.tally import PERCENTILES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Point = tuple[float, float]

_SIZE_INCHES = (8.0, 5.0)
_DPI = 120
_MARKS = "osD^vP*X"


class NoMatplotlibError(Exception):
    """Nothing can be drawn: matplotlib is not installed."""


def draw(outcomes: Sequence[Outcome], directory: Path) -> list[Path]:
    """Draw every picture that has something to show; return the paths.

    Raises:
        NoMatplotlibError: matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise NoMatplotlibError("--plots needs matplotlib: python -m pip install matplotlib") from error
    mpl.use("Agg")
    directory.mkdir(parents=True, exist_ok=True)
    pictures: dict[str, Callable[[Sequence[Outcome], Path], bool]] = {
        "bandwidth-over-block-size": _bandwidth_over_block,
        "bandwidth-over-depth": _bandwidth_over_depth,
        "latency-percentiles": _percentiles,
        "hit-ratio-over-host-quota": _hit_ratio,
    }
    paths = {name: directory / f"{name}.png" for name in pictures}
    return [paths[name] for name, picture in pictures.items() if picture(outcomes, paths[name])]


def _figure(path: Path, paint: Callable[[Axes], None]) -> bool:
    from matplotlib.figure import Figure

    figure = Figure(figsize=_SIZE_INCHES, dpi=_DPI, layout="constrained")
    axes = figure.subplots()
    paint(axes)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
    return True


def _lines(axes: Axes, series: Mapping[str, Sequence[Point]]) -> None:
    for number, (name, points) in enumerate(sorted(series.items())):
        across, up = zip(*sorted(points), strict=True)
        style = "-" if name.startswith("tierstore") else "--"
        axes.plot(across, up, style, marker=_MARKS[number % len(_MARKS)], label=name)


def _several(series: Mapping[str, Sequence[Point]]) -> dict[str, Sequence[Point]]:
    """Return the series that show how something changes."""
    return {name: points for name, points in series.items() if len({across for across, _ in points}) > 1}


# ---------------------------------------------------------------------- bandwidth


def _moved(outcome: Outcome) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the directions in which something was moved, with their numbers."""
    entry: Mapping[str, Any] = outcome.entry
    return [(way, entry[way]) for way in ("read", "write") if entry[way]["io_bytes"]]


def _block_bytes(outcome: Outcome) -> int | None:
    text = outcome.planned.merged.get("bs", outcome.planned.merged.get("blocksize", "4k"))
    try:
        return values.size(text)
    except values.ValueFaultError:
        return None


def _what(outcome: Outcome, way: str) -> str:
    """Return whose work it was, and which."""
    job = outcome.planned.job
    if job is None:
        return f"fio {outcome.planned.engine}, {way}"
    step = job.step(is_read=way == "read")
    codec = f", {job.store.codec}" if job.store.codec else ""
    return f"tierstore, {way}: {step.op} {step.tier}{codec}"


def _bandwidth_over_block(outcomes: Sequence[Outcome], path: Path) -> bool:
    series = defaultdict(list)
    for outcome in outcomes:
        block_bytes = _block_bytes(outcome)
        depth = outcome.planned.merged.get("iodepth", "1")
        for way, numbers in _moved(outcome):
            if block_bytes is not None:
                series[f"{_what(outcome, way)}, depth {depth}"].append(
                    (block_bytes / 1024, numbers["bw_bytes"] / 1e9)
                )
    return _bandwidth(series, path, "KiB of one I/O", "Bandwidth over block size")


def _bandwidth_over_depth(outcomes: Sequence[Outcome], path: Path) -> bool:
    series = defaultdict(list)
    for outcome in outcomes:
        depth = float(outcome.planned.merged.get("iodepth", "1"))
        block_bytes = _block_bytes(outcome)
        for way, numbers in _moved(outcome):
            if block_bytes is not None:
                size = values.print_size(block_bytes)
                series[f"{_what(outcome, way)}, bs={size}"].append((depth, numbers["bw_bytes"] / 1e9))
    return _bandwidth(series, path, "operations in flight", "Bandwidth over depth")


def _bandwidth(series: Mapping[str, Sequence[Point]], path: Path, across: str, title: str) -> bool:
    shown = _several(series)
    if not shown:
        return False

    def paint(axes: Axes) -> None:
        _lines(axes, shown)
        axes.set(title=title, xlabel=across, ylabel="GB/s (1e9 bytes)", ylim=(0, None))
        axes.set_xscale("log", base=2)

    return _figure(path, paint)


# ---------------------------------------------------------------------- latency


def _percentiles(outcomes: Sequence[Outcome], path: Path) -> bool:
    series = {
        f"{'fio ' if outcome.planned.job is None else 'tierstore '}{outcome.planned.name}, {way}": numbers[
            "clat_ns"
        ]["percentile"]
        for outcome in outcomes
        for way, numbers in _moved(outcome)
        if "percentile" in numbers["clat_ns"]
    }
    if not series:
        return False

    def paint(axes: Axes) -> None:
        for name, found in sorted(series.items()):
            # Distance from 100 %, so that the tail is not squeezed into the last hair's breadth.
            across = [100 - float(percent) for percent in found]
            style = "-" if name.startswith("tierstore") else "--"
            axes.plot(across, [ns / 1e3 for ns in found.values()], style, label=name)
        axes.set(title="Completion latency", xlabel="percentile", ylabel="microseconds", yscale="log")
        axes.set_xscale("log")
        axes.invert_xaxis()
        marks = [percent for percent in PERCENTILES if percent in {50, 90, 95, 99, 99.5, 99.9, 99.99}]
        axes.set_xticks([100 - percent for percent in marks], [f"{percent:g} %" for percent in marks])
        axes.minorticks_off()

    return _figure(path, paint)


# ---------------------------------------------------------------------- hit ratio


def _hit_ratio(outcomes: Sequence[Outcome], path: Path) -> bool:
    series: dict[str, list[Point]] = defaultdict(list)
    for outcome in outcomes:
        ours: Any = outcome.entry.get("tierstore", {})
        job = outcome.planned.job
        if job is None or "optimum" not in ours:
            continue
        tier = job.steps.read.tier
        across = 100.0 * job.store.capacity_bytes(tier) / job.size_bytes
        series[f"tierstore {job.store.eviction}, {job.trace}"].append((across, ours["hit_ratio"]))
        series[f"optimum, {job.trace}"].append((across, ours["optimum"]["hit_ratio"]))
    if not (shown := _several(series)):
        return False

    def paint(axes: Axes) -> None:
        _lines(axes, {name: sorted(set(points)) for name, points in shown.items()})
        axes.set(title="Hit ratio by policy", xlabel="quota, % of all bytes", ylabel="hits of all accesses")
        axes.set_ylim(0, 1.02)

    return _figure(path, paint)
