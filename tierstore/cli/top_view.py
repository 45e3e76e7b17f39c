"""What ``tierstore top`` draws, with rich, in 80 columns: tiers, links, where time goes, what moves."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from tierstore.live import LiveProcess, LiveRun
from tierstore.metrics import parsed
from tierstore.units import format_bytes

_BAR_WIDTH: Final = 10
_MOST_MOVING: Final = 8
_MOST_ROWS: Final = 32
_PARTS: Final = {
    "forward": "tierstore_run_forward_seconds_total",
    "backward": "tierstore_run_backward_seconds_total",
    "optimizer": "tierstore_run_optimizer_seconds_total",
    "stall": "tierstore_run_stall_seconds_total",
}
"""Where the time of a step goes; the last one is a part of the others."""

Look = Callable[[], LiveProcess | None]


def show(first: LiveProcess, look: Look) -> None:
    """Draw what is looked at, over and over, until interrupted or the process has ended.

    Where no terminal is drawn on, each look is printed.
    """
    console = Console()
    before, now = first, first
    with (
        Live(drawn(first, first), console=console, auto_refresh=False)
        if console.is_terminal
        else _Printing(console) as drawing
    ):
        while (found := look()) is not None:
            before, now = now, found
            drawing.update(drawn(now, before), refresh=True)
    console.print(Text(f"process {now.pid} has ended, or shows no run any more"))


class _Printing(contextlib.AbstractContextManager["_Printing"]):
    """What is used of rich's `Live`, where everything is to be printed."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def update(self, renderable: RenderableType, *, refresh: bool) -> None:
        """Print what is to be seen now."""
        del refresh
        self._console.print(renderable)

    def __exit__(self, *exception: object) -> None: ...


def show_once(first: LiveProcess, look: Look) -> None:
    """Print what one interval was like."""
    now = look()
    Console().print(drawn(first if now is None else now, first))


def drawn(now: LiveProcess, before: LiveProcess) -> RenderableType:
    """Return what is to be seen of a process, with what has changed since it was looked at before."""
    parts: list[RenderableType] = [Text(f"process {now.pid}: {len(now.runs)} open", style="bold")]
    for number, run in enumerate(now.runs):
        former = before.runs[number] if len(before.runs) == len(now.runs) else run
        parts += _run(_Seen(run, former, now.at_s - before.at_s))
    return Group(*parts)


@dataclass(frozen=True)
class _Seen:
    """One run now and before.

    Attributes:
        run, former: those.
        seconds: between them; 0: it was looked at once.
    """

    run: LiveRun
    former: LiveRun
    seconds: float

    def now(self, name: str, **labels: str) -> float:
        """Return a metric."""
        return _value(self.run.metrics, name, labels)

    def grown(self, name: str, **labels: str) -> float:
        """Return how much a counter grew; all of it, where it was counted anew or looked at once."""
        now, before = self.now(name, **labels), _value(self.former.metrics, name, labels)
        return now - before if self.seconds > 0 and now >= before else now

    def rate(self, name: str, **labels: str) -> float | None:
        """Return how fast a counter grew; ``None``: it was looked at once."""
        return self.grown(name, **labels) / self.seconds if self.seconds > 0 else None

    def values_of(self, name: str) -> list[dict[str, str]]:
        """Return the labels that a metric has."""
        found = (parsed(text) for text in self.run.metrics)
        return [labels for each, labels in found if each == name][:_MOST_ROWS]


def _value(metrics: Mapping[str, float], name: str, labels: Mapping[str, str]) -> float:
    for text, value in metrics.items():
        if text.startswith(name) and parsed(text) == (name, dict(labels)):
            return value
    return 0.0


def _run(seen: _Seen) -> Iterator[RenderableType]:
    run = seen.run
    if run.fault:
        yield Text(f"cannot be looked at: {run.fault}", style="red")
        return
    yield Text(f"{run.name or 'a model'}, opened by {run.opened_by or '?'}")
    yield _tiers(seen)
    if seen.values_of("tierstore_traffic_bytes_total"):
        yield _links(seen)
    yield _time(seen)
    yield from _moving(run)


def _tiers(seen: _Seen) -> Table:
    table = _table("tier", "quota", "", "held/of", "peak", "hits", "faults/s", "evicts/s", "refused")
    for labels in seen.values_of("tierstore_tier_capacity_bytes"):
        capacity = seen.now("tierstore_tier_capacity_bytes", **labels)
        charged = seen.now("tierstore_tier_charged_bytes", **labels)
        hits = seen.grown("tierstore_tier_hits_total", **labels)
        faults = seen.grown("tierstore_tier_faults_total", **labels)
        table.add_row(
            Text(labels.get("tier", "?")),
            ProgressBar(total=max(capacity, 1), completed=min(charged, capacity), width=_BAR_WIDTH),
            Text(f"{100 * charged / capacity:.0f} %" if capacity else "-"),
            Text(f"{_short(charged)}/{_short(capacity)}"),
            Text(_short(seen.now("tierstore_tier_peak_charged_bytes", **labels))),
            Text(f"{100 * hits / (hits + faults):.1f} %" if hits + faults else "-"),
            Text(_rate(seen.rate("tierstore_tier_faults_total", **labels))),
            Text(_rate(seen.rate("tierstore_tier_evictions_total", **labels))),
            Text(f"{seen.now('tierstore_tier_refusals_total', **labels):.0f}"),
        )
    return table


def _links(seen: _Seen) -> Table:
    table = _table("link", "now", "copies/s", "in all")
    for labels in seen.values_of("tierstore_traffic_bytes_total"):
        speed = seen.rate("tierstore_traffic_bytes_total", **labels)
        table.add_row(
            Text(f"{labels.get('source', '?')} to {labels.get('target', '?')}"),
            Text("-" if speed is None else f"{format_bytes(int(speed))}/s"),
            Text(_rate(seen.rate("tierstore_traffic_copies_total", **labels))),
            Text(format_bytes(int(seen.now("tierstore_traffic_bytes_total", **labels)))),
        )
    return table


def _time(seen: _Seen) -> Text:
    """Return steps, and the share of the time since the last look that each part had."""
    spent = {part: seen.grown(name) for part, name in _PARTS.items()}
    whole = seen.seconds or sum(spent.values()) - spent["stall"]
    shares = [f"{part} {100 * taken / whole:.0f} %" for part, taken in spent.items()] if whole else ["none"]
    steps = seen.rate("tierstore_run_steps_total")
    speed = "" if steps is None else f", {steps:.3g} a second"
    return Text(f"steps {seen.now('tierstore_run_steps_total'):.0f}{speed}; of the time: {', '.join(shares)}")


def _moving(run: LiveRun) -> Iterator[Text]:
    for each in run.moving[:_MOST_MOVING]:
        yield Text(f"moving  {each.source} to {each.target}  {format_bytes(each.nbytes)}  {each.key}")
    if len(run.moving) > _MOST_MOVING:
        yield Text(f"moving  {len(run.moving) - _MOST_MOVING} more")


def _table(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for head in heads:
        table.add_column(head, no_wrap=True)
    return table


def _short(nbytes: float) -> str:
    """Print bytes as people do who have no room: ``1.5M``."""
    return format_bytes(int(nbytes)).replace(" ", "").replace("iB", "")


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def lines(process: LiveProcess, before: LiveProcess, width: int = 120) -> Sequence[str]:
    """Return what would be drawn as lines of text without colours."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as caught:
        console.print(drawn(process, before))
    return caught.get().splitlines()
