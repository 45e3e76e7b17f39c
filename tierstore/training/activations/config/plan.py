"""What happens to each layer's activations: one plan a layer, made of both configurations.

A plan knows numbers and patterns.  Whoever knows the model gives the paths of a layer's submodules to
`LayerPlan.match`, and gets those that are meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tierstore.training.activations.config.conflicts import conflicts
from tierstore.training.activations.config.geometry import Geometry, Offset, lay_out
from tierstore.training.activations.config.patterns import Path, Pattern
from tierstore.training.activations.config.recompute_config import LayerRecompute, RecomputeConfig
from tierstore.training.activations.config.swap_config import LayerSwap, SwapConfig


@dataclass(frozen=True, slots=True)
class SwapMatch:
    """An operator that a mark means.

    Attributes:
        path: where it is in the layer; of a pattern of ATen operators, the pattern's text alone.
        pattern: what it was matched by.
        prefetch: how far ahead it comes back.
    """

    path: Path
    pattern: Pattern
    prefetch: int


@dataclass(frozen=True, slots=True)
class LayerMatches:
    """The operators of one layer that its plan means, in the order of the patterns, then of the layer.

    Attributes:
        operators: computed again.
        comm: whose communication is done again.
        exclude: kept after all.
        comm_exclude: whose communication is not done again.
        swap: swapped.
    """

    operators: tuple[Path, ...] = ()
    comm: tuple[Path, ...] = ()
    exclude: tuple[Path, ...] = ()
    comm_exclude: tuple[Path, ...] = ()
    swap: tuple[SwapMatch, ...] = ()


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What happens to one layer's activations.

    Attributes:
        layer_id: its number.
        recompute: what is computed again.
        swap: what is swapped.
    """

    layer_id: int
    recompute: LayerRecompute
    swap: LayerSwap

    def match(self, paths: Iterable[Sequence[str]]) -> LayerMatches:
        """Return what is meant of a layer.

        A pattern of ATen operators has no path: its text stands for it, because what it matches shows
        only when the layer runs (`Pattern.matches_aten`).

        Args:
            paths: of every submodule of the layer, names counted from it, such as
                ``name.split(".")`` of ``layer.named_modules()``.
        """
        known = [tuple(path) for path in paths]
        again = self.recompute

        def meant(patterns: Iterable[Pattern]) -> tuple[Path, ...]:
            return tuple(dict.fromkeys(path for each in patterns for path in _meant(each, known)))

        return LayerMatches(
            operators=meant(again.operators),
            comm=meant(again.comm),
            exclude=meant(again.exclude),
            comm_exclude=meant(again.comm_exclude),
            swap=tuple(
                SwapMatch(path, pattern, prefetch)
                for pattern, prefetch in self.swap.operators
                for path in _meant(pattern, known)
            ),
        )


@dataclass(frozen=True, slots=True)
class ActivationPlan:
    """What happens to all activations.  Made by `plan_layers`.

    Attributes:
        recompute: what is computed again; read as swap says.
        swap: what is swapped.
        geometry: which layer is in which stage.
        layers: one plan a layer.
        warnings: what of the two cannot have an effect, as text.
    """

    recompute: RecomputeConfig
    swap: SwapConfig
    geometry: Geometry
    layers: tuple[LayerPlan, ...]
    warnings: tuple[str, ...]


def plan_layers(
    recompute: RecomputeConfig | None = None,
    swap: SwapConfig | None = None,
    *,
    num_layers: int,
    pipeline_stage: int = 1,
    pp_interleave_num: int = 1,
    offset: Offset = 0,
) -> ActivationPlan:
    """Return what happens to each layer's activations.

    Args:
        recompute: what is computed again; ``None``: nothing.  Read with swap on if ``swap`` is.
        swap: what is swapped; ``None``: nothing.
        num_layers: of the model.
        pipeline_stage: how many stages there are.
        pp_interleave_num: how many interleaves there are.
        offset: as `lay_out` takes it.

    Raises:
        ConfigError: the layers cannot be laid out so, a list is longer than there are stages, or
            ``recompute`` counts layers of stages although swap is on.
    """
    chosen = swap or SwapConfig()
    again = (recompute or RecomputeConfig()).with_swap(on=chosen.swap)
    geometry = lay_out(num_layers, pipeline_stage, pp_interleave_num, offset)
    whole = again.decide_all(geometry)
    layers = tuple(LayerPlan(each.layer_id, each, chosen.decide(each.layer_id)) for each in whole)
    found = conflicts(again, chosen, [(layer.recompute, layer.swap) for layer in layers])
    return ActivationPlan(again, chosen, geometry, layers, found)


def _meant(pattern: Pattern, paths: Sequence[Path]) -> list[Path]:
    return [(pattern.text,)] if pattern.is_aten else [path for path in paths if pattern.matches(path)]
