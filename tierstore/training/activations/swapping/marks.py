r"""What a configuration marks in a model: a `MarkScope` for each module that is meant, and the log's lines.

1. A pattern that names submodules marks all operators that run in them, and in the submodules of these.
   What several layers share is marked only while it runs in what is.
2. ``aten\.mul`` marks an operator wherever it runs in the layer.
3. A pattern that names no submodule of a layer means, by its last level, an ATen operator in the own forward
   of the module that the levels before name: ``feed_forward\.mul``.
4. A mark on a layer comes first, then patterns in their order; of several on an operator the last counts.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tierstore.torch_private import names_of_operators
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan, SwapMatch
from tierstore.training.activations.swapping.operator_watch import (
    ATTENTION,
    MarkScope,
    Operator,
    Reach,
    names_of,
)


@dataclass(frozen=True)
class Marks:
    """What is marked in a model.

    Attributes:
        scopes: of each module that is marked, and empty ones of those that only have to be told apart.
        layers: the layers in which something is marked.
        matches: what the log says, by layer.
        idle: patterns that mean nothing in any of their layers.
    """

    scopes: Mapping[nn.Module, Sequence[MarkScope]]
    layers: frozenset[nn.Module]
    matches: Sequence[LayerMatches]
    idle: Sequence[Pattern]


def mark(layers: Sequence[nn.Module], plan: ActivationPlan) -> Marks:
    """Return what ``plan`` marks in ``layers``."""
    scopes: dict[nn.Module, list[MarkScope]] = {}
    marked: set[nn.Module] = set()
    found: list[LayerMatches] = []
    asked: dict[Pattern, bool] = {}
    owners = Counter(inner for module in layers for inner in module.modules())
    for module, each in zip(layers, plan.layers, strict=True):
        layer = _Layer(module, each)
        for pattern, _ in each.swap.operators:
            asked[pattern] = bool(layer.meant[pattern]) or asked.get(pattern, False)
        for inner, scope in layer.scopes():
            marked.add(module)
            scopes.setdefault(inner, []).append(scope)
            if scope.reach is Reach.OWN:  # what runs in submodules has to be told apart
                for below in module.modules():
                    scopes.setdefault(below, [])
                continue
            for below in inner.modules():  # whose forward may be called by others than their parent
                if below is not inner and owners[below] == 1:
                    scopes.setdefault(below, []).append(scope)
        found.append(replace(layer.matches, swap=tuple(layer.lines())))
    return Marks(
        scopes, frozenset(marked), found, [pattern for pattern, is_used in asked.items() if not is_used]
    )


class _Layer:
    """One layer with its plan."""

    def __init__(self, module: nn.Module, plan: LayerPlan) -> None:
        self._module = module
        self._plan = plan
        self._paths = {tuple(name.split(".")) if name else (): each for name, each in module.named_modules()}
        self.matches = plan.match([path for path in self._paths if path])
        self.meant = {pattern: self._meant(pattern) for pattern, _ in plan.swap.operators}

    def _meant(self, pattern: Pattern) -> list[SwapMatch]:
        """Return what a pattern means, as the log says it."""
        found = [match for match in self.matches.swap if match.pattern == pattern]
        if found or not self._holders(pattern) or not _names_operator(pattern.levels[-1]):
            return found
        prefetch = next(k for each, k in self._plan.swap.operators if each == pattern)
        return [SwapMatch((pattern.text,), pattern, prefetch)]

    def _holders(self, pattern: Pattern) -> list[nn.Module]:
        """Return the modules that all levels but the last name."""
        above = pattern.levels[:-1]
        return [
            module
            for path, module in self._paths.items()
            if len(path) == len(above)
            and all(level.fullmatch(name) for level, name in zip(above, path, strict=True))
        ]

    def lines(self) -> Iterator[SwapMatch]:
        """Yield what the log says."""
        for found in self.meant.values():
            yield from found

    def scopes(self) -> Iterator[tuple[nn.Module, MarkScope]]:
        """Yield the modules that are marked, and how."""
        number = self._plan.layer_id
        if self._plan.swap.prefetch is not None:
            yield self._module, MarkScope(number, self._plan.swap.prefetch, 0)
        for rank, (pattern, prefetch) in enumerate(self._plan.swap.operators, 1):
            if pattern.is_aten:
                yield self._module, MarkScope(number, prefetch, rank, Reach.NAMED, _by_aten_name(pattern))
                continue
            for match in self.meant[pattern]:
                if match.path in self._paths:
                    yield self._paths[match.path], MarkScope(number, prefetch, rank)
                    continue
                for holder in self._holders(pattern):
                    yield holder, MarkScope(number, prefetch, rank, Reach.OWN, _by_level(pattern.levels[-1]))


def _by_aten_name(pattern: Pattern) -> Callable[[Operator], bool]:
    return lambda operator: pattern.matches_aten(str(operator))


def _by_level(level: re.Pattern[str]) -> Callable[[Operator], bool]:
    return lambda operator: any(level.fullmatch(name) for name in names_of(operator))


def _names_operator(level: re.Pattern[str]) -> bool:
    return any(level.fullmatch(name) for name in _operator_names())


@functools.cache
def _operator_names() -> frozenset[str]:
    """Return what all ATen operators are called."""
    names = names_of_operators()
    aten = (name.removeprefix("aten::").split(".")[0] for name in names if name.startswith("aten::"))
    return frozenset((*aten, *ATTENTION))
