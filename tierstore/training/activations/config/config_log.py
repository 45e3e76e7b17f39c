"""The lines of the log: what was normalised and what was marked, as the reference documents print it.

A line has one space between words, patterns with single backslashes, and goes to the logger ``tierstore`` at
INFO.  A line that would name nothing is not made.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from tierstore.training.activations.config.geometry import Geometry
from tierstore.training.activations.config.patterns import Path
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan, SwapMatch
from tierstore.training.activations.config.swap_config import SwapConfig

log = logging.getLogger("tierstore")

_FORMATIVE = {"recompute": "layer_recompute"}  # what a table is called; the others have their key's name


class Action(enum.Enum):
    """What is done with operators: the words between "recompute" and "at layer"."""

    BY_INDEX = ""
    ON = " on"
    EXCLUDE = " exclude"


def say(plan: ActivationPlan, matches: Sequence[LayerMatches]) -> None:
    """Log everything about a plan: tables and warnings first, then each layer in turn.

    Args:
        plan: of all layers.
        matches: what `LayerPlan.match` found, by layer.
    """
    for line in plan_lines(plan):
        log.info("%s", line)
    for warning in plan.warnings:
        log.warning("%s", warning)
    for layer, found in zip(plan.layers, matches, strict=True):
        for line in layer_lines(layer, found, by_index=plan.swap.swap):
            log.info("%s", line)


def plan_lines(plan: ActivationPlan) -> list[str]:
    """Return what was normalised: where layers are, then the tables."""
    lines = geometry_lines(plan.geometry)
    lines += table_lines(plan.recompute.tables_on(plan.geometry))
    return [*lines, *swap_lines(plan.swap)]


def geometry_lines(geometry: Geometry) -> list[str]:
    """Return where layers are."""
    cells = [geometry.cell_of(layer_id) for layer_id in range(geometry.num_layers)]
    return [
        f"num_layers per stage: {[list(row) for row in geometry.layers]}",
        f"Accumulated num_layers per stage: {geometry.ends}",
        f"Pipeline id list with start_stage: {[stage for _, stage in cells]}",
        f"Interleave id list: {[interleave for interleave, _ in cells]}",
    ]


def table_lines(tables: Mapping[str, object]) -> list[str]:
    """Return what ``recompute_config`` became: `RecomputeConfig.tables`, a line each."""
    return [f"Formative {_FORMATIVE.get(key, key)}: {_shown(table)}" for key, table in tables.items()]


def swap_lines(swap: SwapConfig) -> list[str]:
    """Return what ``swap_config`` became; nothing if swap is off."""
    if not swap.swap:
        return []
    layers = [mark.to_mapping() for mark in swap.layer_marks]
    operators = {text: [mark.to_mapping() for mark in marks] for text, marks in swap.operator_marks.items()}
    return [f"Formative layer swap: {_shown(layers)}", f"Formative op swap: {_shown(operators)}"]


def layer_lines(layer: LayerPlan, found: LayerMatches, *, by_index: bool) -> list[str]:
    """Return what was marked in a layer.

    Args:
        layer: its plan.
        found: what the plan means there.
        by_index: whether swap is on, and selections name layers.
    """
    number = layer.layer_id
    on = Action.BY_INDEX if by_index else Action.ON
    lines = [f"Set full recompute at layer {number}"] if layer.recompute.is_whole else []
    lines += select_line(number, found.operators, on)
    lines += select_line(number, found.comm, on, what="select comm")
    lines += select_line(number, found.exclude, Action.EXCLUDE)
    lines += select_line(number, found.comm_exclude, Action.EXCLUDE, what="select comm")
    if layer.swap.prefetch is not None:
        lines.append(f"Set layer swap at layer {number} and value is: {layer.swap.prefetch}")
    return lines + op_swap_line(number, found.swap)


def select_line(layer_id: int, paths: Iterable[Path], action: Action, what: str = "select") -> Iterator[str]:
    """Yield the line that says which operators were selected; nothing if none were.

    Args:
        layer_id: the layer's number.
        paths: of the operators.
        action: what is done with them.
        what: ``"select"`` or ``"select comm"``.
    """
    names = ", ".join(".".join(path) for path in paths)
    if names:
        yield f"Set {what} recompute{action.value} at layer {layer_id}: {names}"


def op_swap_line(layer_id: int, found: Iterable[SwapMatch]) -> list[str]:
    """Return the line that says which operators are swapped; nothing if none are."""
    items = [f"{_swap_name(match)}, value={match.prefetch}" for match in found]
    return [f"Set op_swap at layer {layer_id}: {', '.join(items)}"] if items else []


def _swap_name(match: SwapMatch) -> str:
    """Return an operator's path; a child of the layer itself has a point before it."""
    return f"{'.' if match.pattern.is_single_level else ''}{'.'.join(match.path)}"


def _shown(value: object) -> str:
    """Print plain data with backslashes as they are."""
    match value:
        case Mapping():
            return f"{{{', '.join(f'{_shown(key)}: {_shown(each)}' for key, each in value.items())}}}"
        case list():
            return f"[{', '.join(map(_shown, value))}]"
        case str():
            return f"'{value}'"
        case _:
            return str(value)
