"""Where swap and recompute are both said of the same: recompute wins, and a warning says so.

Rule 1: what is computed again is not swapped, because it is not kept.
Rule 2: patterns are compared by their text; `overlaps` compares what they matched in a model.

With swap on, exclusions are not applied; that is a warning, too, and so is a layer that there is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from tierstore.training.activations.config.patterns import Path, Pattern
from tierstore.training.activations.config.recompute_config import LayerRecompute, RecomputeConfig
from tierstore.training.activations.config.swap_config import LayerSwap, SwapConfig

Layers = Sequence[tuple[LayerRecompute, LayerSwap]]
Swapped = tuple[Path, Pattern]
"""What a pattern marks: a submodule, or an operator, for which the pattern's text stands."""


def conflicts(recompute: RecomputeConfig, swap: SwapConfig, layers: Layers) -> tuple[str, ...]:
    """Return what of two configurations cannot have an effect, a sentence each.

    Args:
        recompute: what is computed again.
        swap: what is swapped.
        layers: what both decided, by layer.
    """
    if not swap.swap:
        return ()
    return (
        *_both(recompute, layers),
        *_not_excluded(recompute),
        *_beyond(recompute, swap, len(layers)),
    )


def overlaps(plan: Layers, found: Sequence[tuple[Sequence[Path], Sequence[Swapped]]]) -> tuple[str, ...]:
    """Return which operators of a model are swapped in vain, a sentence each.

    They, or submodules that they are part of, are computed again.  What `conflicts` says is not said again.

    Args:
        plan: what both decided, by layer.
        found: paths of what is computed again, and what is swapped, by layer.
    """
    ids_by_name: dict[str, list[int]] = {}
    for (again, _), (again_paths, swapped) in zip(plan, found, strict=True):
        said = {pattern.text for pattern in again.operators}
        within = [
            ".".join(path)
            for path, pattern in swapped
            if pattern.text not in said and any(_is_within(path, pattern, each) for each in again_paths)
        ]
        for name in dict.fromkeys(within):
            ids_by_name.setdefault(name, []).append(again.layer_id)
    return tuple(
        f"{_layers(ids)}: '{name}' is swapped and recomputed; recompute wins, the swap has no effect there"
        for name, ids in ids_by_name.items()
    )


def _is_within(path: Path, pattern: Pattern, again: Path) -> bool:
    """Say whether what is swapped is part of what is computed again.

    An operator of a module's own forward has no path, and its pattern's text stands for it.
    """
    if path == (pattern.text,) and not pattern.is_aten:
        near = zip(pattern.levels, again, strict=False)
        return len(again) <= len(pattern.levels) and all(level.fullmatch(name) for level, name in near)
    return path[: len(again)] == again


def _both(recompute: RecomputeConfig, layers: Layers) -> Iterator[str]:
    if recompute.recompute is True:
        yield "recompute is true: every layer is computed again, and no swap has an effect"
        return
    found: dict[str, list[int]] = {}
    for again, swapped in layers:
        for what in _in_layer(again, swapped):
            found.setdefault(what, []).append(again.layer_id)
    for what, ids in found.items():
        yield f"{_layers(ids)}: {what}; recompute wins, the swap has no effect there"


def _in_layer(again: LayerRecompute, swapped: LayerSwap) -> Iterator[str]:
    """Say what of a layer is in both."""
    names = [pattern.text for pattern, _ in swapped.operators]
    if again.is_whole:
        if swapped.prefetch is not None:
            yield "in recompute and in layer_swap"
        yield from (f"op_swap names '{name}', and recompute has the whole layer" for name in names)
        return
    for pattern in again.operators:
        if pattern.text in names:
            yield f"'{pattern.text}' is in select_recompute and in op_swap"
        if swapped.prefetch is not None:
            yield f"'{pattern.text}' is in select_recompute, and layer_swap has the whole layer"


def _not_excluded(recompute: RecomputeConfig) -> Iterator[str]:
    for key in ("select_recompute_exclude", "select_comm_recompute_exclude"):
        if getattr(recompute, key):
            yield f"{key} is given and swap is on: nothing is excluded then"


def _beyond(recompute: RecomputeConfig, swap: SwapConfig, num_layers: int) -> Iterator[str]:
    """Name the layers that there are not."""
    for what, ids in _named(recompute, swap):
        there_are_not = [each for each in dict.fromkeys(ids) if each >= num_layers]
        if there_are_not:
            yield f"{what} names {_layers(there_are_not)}, and the model has {num_layers}: no effect"


def _named(recompute: RecomputeConfig, swap: SwapConfig) -> Iterator[tuple[str, list[int]]]:
    yield "recompute", _ids(recompute.recompute)
    for key in ("select_recompute", "select_comm_recompute"):
        given = getattr(recompute, key)
        values = given.values() if isinstance(given, Mapping) else [given]
        yield key, [each for value in values for each in _ids(value)]
    yield "layer_swap", [each for mark in swap.layer_marks for each in _ids(mark.layers)]
    marks = [mark for each in swap.operator_marks.values() for mark in each]
    yield "op_swap", [each for mark in marks for each in _ids(mark.layers)]


def _ids(value: object) -> list[int]:
    return list(value) if isinstance(value, tuple) else []


def _layers(ids: Sequence[int]) -> str:
    return f"layer{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"
