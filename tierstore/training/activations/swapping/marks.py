r"""What a configuration marks in a model: a `MarkScope` for each module that is meant, and the log's lines.

1. A pattern that names submodules marks all operators that run in them, and in the submodules of these.
   What several layers share is marked only while it runs in what is.
2. ``aten\.mul`` marks an operator wherever it runs in the layer.
3. A pattern that names no submodule of a layer means, by its last level, an ATen operator in the own forward
   of the module that the levels before name: ``feed_forward\.mul``.
4. A mark on a layer comes first, then patterns in their order; of several on an operator the last counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from tierstore.training.activations.config.operator_names import is_named, means_aten, names_of, why_idle
from tierstore.training.activations.config.patterns import Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan, SwapMatch
from tierstore.training.activations.swapping.operator_watch import MarkScope, Operator, Reach


@dataclass(frozen=True)
class Marks:
    """What is marked in a model.

    Attributes:
        scopes: of each module that is marked, and empty ones of those that only have to be told apart.
        layers: the layers in which something is marked.
        matches: what the log says, by layer.
        idle: patterns that mean nothing in any of their layers.
        named: patterns that mean operators, and no submodule.
        met: those of them whose operators have run.
    """

    scopes: Mapping[nn.Module, Sequence[MarkScope]]
    layers: frozenset[nn.Module]
    matches: Sequence[LayerMatches]
    idle: Sequence[Pattern]
    named: Sequence[Pattern]
    met: set[Pattern]


def mark(layers: Sequence[nn.Module], plan: ActivationPlan) -> Marks:
    """Return what ``plan`` marks in ``layers``."""
    scopes: dict[nn.Module, list[MarkScope]] = {}
    marked: set[nn.Module] = set()
    found: list[LayerMatches] = []
    asked: dict[Pattern, set[bool]] = {}
    met: set[Pattern] = set()
    owners = Counter(inner for module in layers for inner in module.modules())
    for module, each in zip(layers, plan.layers, strict=True):
        layer = _Layer(module, each)
        for pattern, _ in each.swap.operators:
            asked.setdefault(pattern, set()).update(layer.names_operators(pattern))
        for inner, scope in layer.scopes(met):
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
        scopes,
        frozenset(marked),
        found,
        idle=[pattern for pattern, what in asked.items() if not what],
        named=[pattern for pattern, what in asked.items() if what == {True}],
        met=met,
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
        if found and not pattern.is_aten:
            return found
        if why_idle(pattern, in_place=True) is not None:
            return []
        if found or not self._holders(pattern) or not is_named(pattern.levels[-1]):
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

    def names_operators(self, pattern: Pattern) -> set[bool]:
        """Say of all that a pattern means whether it is an operator, not a submodule."""
        return {match.path not in self._paths for match in self.meant[pattern]}

    def lines(self) -> Iterator[SwapMatch]:
        """Yield what the log says."""
        for found in self.meant.values():
            yield from found

    def scopes(self, met: set[Pattern]) -> Iterator[tuple[nn.Module, MarkScope]]:
        """Yield the modules that are marked, and how.

        Args:
            met: gets the patterns whose operators run.
        """
        number = self._plan.layer_id
        if self._plan.swap.prefetch is not None:
            yield self._module, MarkScope(number, self._plan.swap.prefetch, 0)
        for rank, (pattern, prefetch) in enumerate(self._plan.swap.operators, 1):
            matches = _noting(pattern, met)
            for match in self.meant[pattern]:
                if pattern.is_aten:
                    yield self._module, MarkScope(number, prefetch, rank, Reach.NAMED, matches)
                    continue
                if match.path in self._paths:
                    yield self._paths[match.path], MarkScope(number, prefetch, rank)
                    continue
                for holder in self._holders(pattern):
                    yield holder, MarkScope(number, prefetch, rank, Reach.OWN, matches)


def _means(pattern: Pattern, operator: Operator) -> bool:
    if pattern.is_aten:
        return means_aten(pattern, operator)
    return any(pattern.levels[-1].fullmatch(name) for name in names_of(operator))


def _noting(pattern: Pattern, met: set[Pattern]) -> Callable[[Operator], bool]:
    """Return what says whether a pattern means an operator, and puts it into ``met`` then."""

    def matches(operator: Operator) -> bool:
        is_meant = _means(pattern, operator)
        if is_meant:
            met.add(pattern)
        return is_meant

    return matches
