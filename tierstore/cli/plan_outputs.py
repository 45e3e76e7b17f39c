"""Files that ``tierstore plan`` writes of what it found: the run's YAML, a trace, a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tierstore.cli.finding import RunWish
from tierstore.cli.page import write_page
from tierstore.cli.plan_result import PlanResult, step_bound
from tierstore.cli.plan_text import bound_text
from tierstore.cli.run_document import run_document, to_yaml
from tierstore.cli.seconds import format_seconds
from tierstore.cli.text_files import require_own, write_text
from tierstore.planning.chrome import TraceParts, trace_to_chrome

WRITTEN_BY = "written by tierstore plan"
"""What the YAML of a run begins with."""


_BEGINNINGS = {
    "write": f"# {WRITTEN_BY}".encode(),
    "trace": b'{"displayTimeUnit"',
    "page": b"<!doctype html>",
    "png": b"\x89PNG",
}


def require_ours(option: str, path: str) -> None:
    """Refuse to write an output over something else: a source file, a machine file, a configuration.

    Args:
        option: that names the file, without its dashes.
        path: of it.

    Raises:
        UsageError: the file is there, and does not begin as what is to be written does.
    """
    require_own(path, _BEGINNINGS[option], WRITTEN_BY)


def write_run(path: str, wish: RunWish, result: PlanResult) -> None:
    """Write the YAML that `tierstore.training.offload` takes; of what does not fit there is none.

    Raises:
        UsageError: it cannot be written, or a run cannot be configured so.
    """
    if result.timeline is not None and result.placement is not None:
        document = run_document(wish.settings, result.machine, result.placement, _kept_sections(wish, result))
        write_text(Path(path), to_yaml(document, _remarks(result)))


def write_trace(path: str, result: PlanResult) -> None:
    """Write what happens when as a trace of Chrome's; of what does not fit there is none.

    Its program has no seconds of the machine's in it: it can be planned for another one.

    Raises:
        UsageError: it cannot be written.
    """
    if result.timeline is not None:
        parts = TraceParts(result.timeline, result.asked or result.program, result.machine, result.placement)
        write_text(Path(path), trace_to_chrome(parts))


def write_pages(path: str, results: Sequence[PlanResult], title: str) -> None:
    """Write one page of all that fit; if none does there is none.

    Raises:
        UsageError: it cannot be written.
    """
    fitting = [each for each in results if each.timeline is not None]
    if not fitting:
        return
    machine = fitting[0].machine
    rates = {link.name: link.bytes_per_s for link in machine.links}
    capacities = {tier.name: tier.capacity_bytes for tier in machine.tiers}
    page = write_page(
        [each.timeline for each in fitting if each.timeline is not None],
        title=title,
        bound_s=fitting[0].bound_s,
        rates_bytes_per_s=rates,
        capacities_bytes=capacities,
    )
    write_text(Path(path), page)


def _kept_sections(wish: RunWish, result: PlanResult) -> Mapping[str, object] | None:
    """Return the sections that were given if they still say what happens to activations."""
    marks = () if result.placement is None else result.placement.marks
    is_kept = bool(marks) and marks == wish.marks(result.program) and bool(wish.section_values)
    return wish.section_values if is_kept else None


def _remarks(result: PlanResult) -> list[str]:
    """Return what is said at the beginning of a run's YAML."""
    assert result.timeline is not None
    bound = bound_text(step_bound(result.timeline, result.machine))
    return [
        f"{WRITTEN_BY} for {result.program.name} on {result.machine.name}",
        f"predicted: {format_seconds(result.timeline.step_s)} a step; {bound}",
        *([result.why] if result.why else []),
        *(f"assumed: {each}" for each in result.assumptions),
    ]
