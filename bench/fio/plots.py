"""Pictures of results: what the jobs given can show, as PNG files.

Drawn from entries of fio's JSON, so fio's own results stand beside the store's.  Needs matplotlib, which
is imported when something is drawn.
"""

from __future__ import annotations

import functools
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

_SIZE_INCHES = (10.0, 5.0)
_DPI = 120
_MARKS = "osD^vP*X"
_BAND: dict[str, Any] = {"linewidth": 8, "alpha": 0.3, "solid_capstyle": "round"}
_COLOURS = 10  # of matplotlib's cycle; after them another dash


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
        "latency-percentiles-read": functools.partial(_percentiles, way="read"),
        "latency-percentiles-write": functools.partial(_percentiles, way="write"),
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
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(path)
    return True


def _ticks(axes: Axes, across: Sequence[float], names: Sequence[str]) -> None:
    """Mark what was measured, and nothing between."""
    axes.set_xticks(across, names)
    axes.minorticks_off()


def _lines(axes: Axes, series: Mapping[str, Sequence[Point]]) -> None:
    for number, (name, points) in enumerate(sorted(series.items())):
        across, up = zip(*sorted(points), strict=True)
        # The optimum is a broad band, so that a policy that reaches it does not cover it.
        look = _BAND if name.startswith("optimum") else {"marker": _MARKS[number % len(_MARKS)]}
        axes.plot(across, up, _style(name, number), label=name, **look)


def _style(name: str, number: int) -> str:
    """Return how a line is dashed: the store's is whole, or dotted after every colour was used."""
    is_ours = name.startswith("tierstore")
    return ("-" if is_ours else "--") if number < _COLOURS else (":" if is_ours else "-.")


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
                    (block_bytes, numbers["bw_bytes"] / 1e9)
                )
    return _bandwidth(series, path, "bytes of one I/O", "Bandwidth over block size")


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
        marks = sorted({x for points in shown.values() for x, _ in points})
        _ticks(axes, marks, [values.print_size(int(mark)) for mark in marks])

    return _figure(path, paint)


# ---------------------------------------------------------------------- latency


def _percentiles(outcomes: Sequence[Outcome], path: Path, way: str) -> bool:
    series = {
        f"{'fio' if outcome.planned.job is None else 'tierstore'} {outcome.planned.name}": numbers["clat_ns"]
        for outcome in outcomes
        for moved, numbers in _moved(outcome)
        if moved == way and "percentile" in numbers["clat_ns"]
    }
    if not series:
        return False

    def paint(axes: Axes) -> None:
        for number, (name, clat) in enumerate(sorted(series.items())):
            # Distance from 100 %, so that the tail is not squeezed into the last hair's breadth.
            across = [100 - float(percent) for percent in clat["percentile"]]
            up = [ns / 1e3 for ns in clat["percentile"].values()]
            axes.plot(across, up, _style(name, number), label=name)
        axes.set(
            title=f"Completion latency, {way}s", xlabel="percentile", ylabel="microseconds", yscale="log"
        )
        axes.set_xscale("log")
        axes.invert_xaxis()
        marks = [percent for percent in PERCENTILES if percent in {50, 90, 95, 99, 99.9, 99.99}]
        _ticks(axes, [100 - percent for percent in marks], [f"{percent:g} %" for percent in marks])

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
