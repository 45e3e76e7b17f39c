"""What is recomputed in one layer: which modules, which operators, and what of those is kept after all."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from tierstore.training.activations.config.operator_names import (
    is_operator,
    means_aten,
    running_as,
    why_idle,
)
from tierstore.training.activations.config.patterns import Path, Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, LayerPlan
from tierstore.training.activations.config.recompute_config import RecomputeConfig
from tierstore.training.activations.recomputation.checkpointed_modules import Contexts
from tierstore.training.activations.recomputation.kept_outputs import keeping
from tierstore.training.activations.recomputation.scopes import OperatorScope, OperatorSelection
from tierstore.training.activations.recomputation.sliced_inputs import Group, groups_of, is_distributed
from tierstore.training.activations.runtime.module_calls import CallStack


def match_layers(layers: Sequence[nn.Module], plan: ActivationPlan) -> list[LayerMatches]:
    """Return what a plan means of each layer: submodules, and operators that are none.

    An operator has a path as if it were a submodule: that of the submodule that runs it, and its name.
    """
    found = []
    for module, layer in zip(layers, plan.layers, strict=True):
        named = module.named_modules(remove_duplicate=False)
        paths = [tuple(name.split(".")) for name, _ in named if name]
        again = layer.recompute
        chosen = [pattern for pattern in again.operators if not _is_idle(pattern)]
        excluded = [pattern for pattern in again.exclude if why_idle(pattern, in_place=True) is None]
        matches = layer.match([*paths, *_operator_paths((*chosen, *excluded), paths)])
        found.append(
            replace(
                matches,
                operators=_without_idle(matches.operators, again.operators, chosen),
                exclude=_without_idle(matches.exclude, again.exclude, excluded),
            )
        )
    return found


def _without_idle(
    paths: Iterable[Path], patterns: Iterable[Pattern], used: Sequence[Pattern]
) -> tuple[Path, ...]:
    """Return paths without those that stand for patterns of ATen operators that are not used."""
    idle = {(pattern.text,) for pattern in patterns if pattern.is_aten and pattern not in used}
    return tuple(path for path in paths if path not in idle)


def _is_idle(pattern: Pattern) -> bool:
    """Say whether no operator that a pattern names can be recomputed."""
    return why_idle(pattern, in_place=False) is not None


def _operator_paths(patterns: Iterable[Pattern], paths: Sequence[Path]) -> list[Path]:
    """Return the paths of the ATen operators that patterns name, in the submodules that they name."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        name = pattern.levels[-1].pattern
        if pattern.is_aten or not name.isidentifier() or not is_operator(name):
            continue
        owners = [(), *paths]
        candidates = ((*owner, name) for owner in owners if len(owner) == len(pattern.levels) - 1)
        found |= dict.fromkeys(path for path in candidates if path not in paths and pattern.matches(path))
    return list(found)


@dataclass
class ChosenLayer:
    """What is recomputed in one layer.

    Attributes:
        module: the layer.
        selection: of its operators.
        regions: modules that are recomputed as a whole.
        has_operators: whether operators are made again.
        groups: processes that keep a slice each of what the layer is given.
    """

    module: nn.Module
    selection: OperatorSelection
    regions: list[nn.Module] = field(default_factory=list)
    has_operators: bool = False
    groups: Sequence[Group] = ()
    _scopes: dict[nn.Module, OperatorScope] = field(default_factory=dict)
    _submodules: list[Path] = field(default_factory=list)
    _named: list[Path] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        module: nn.Module,
        calls: CallStack,
        config: RecomputeConfig,
        plan: LayerPlan,
        matches: LayerMatches,
    ) -> ChosenLayer:
        """Return what a plan means."""
        again = plan.recompute
        selection = OperatorSelection(
            calls,
            tuple(pattern for pattern in again.operators if pattern.is_aten and not _is_idle(pattern)),
            tuple(pattern for pattern in again.exclude if pattern.is_aten),
            keeps_collectives=is_distributed() and not config.mp_comm_recompute,
        )
        groups = groups_of(module) if again.slice_activation else ()
        regions = [module] if again.is_whole else []
        layer = cls(module, selection, regions, bool(selection.chosen), groups)
        for path in matches.operators:
            layer._choose(path)
        for path in matches.exclude:
            layer._exclude(path)
        if is_distributed():
            for path in matches.comm_exclude:
                layer._mark(path, OperatorScope(without_collectives=True))
        return layer

    def _choose(self, path: Path) -> None:
        module = submodule(self.module, path)
        if module is not None:
            self._submodules.append(path)
        if module is not None and not _is_operator(module):
            self.regions.append(module)
            return
        self.has_operators = True
        if module is not None:
            self._mark(path, OperatorScope(is_whole=True))
        elif is_operator(path[-1]):  # else it is a pattern, which the selection knows
            self._mark(path[:-1], OperatorScope(names=running_as(path[-1])))
            self._named.append(path)

    def _exclude(self, path: Path) -> None:
        if submodule(self.module, path) is None and is_operator(path[-1]):
            self._mark(path[:-1], OperatorScope(excluded=running_as(path[-1])))

    def _mark(self, path: Path, scope: OperatorScope) -> None:
        module = submodule(self.module, path)
        if module is not None:
            self._scopes[module] = self._scopes.get(module, OperatorScope()) | scope

    def has_met(self, pattern: Pattern) -> bool | None:
        """Say whether an operator that a pattern names ran in the layer, or it names a submodule, too.

        ``None``: it names no operator there.
        """
        if any(map(pattern.matches, self._submodules)):
            return True
        if pattern.is_aten:
            named = pattern in self.selection.chosen
            return any(means_aten(pattern, each) for each in self.selection.met) if named else None
        met = [self._has_met(path) for path in self._named if pattern.matches(path)]
        return any(met) if met else None

    def _has_met(self, path: Path) -> bool:
        module = submodule(self.module, path[:-1])
        return module is not None and not self._scopes[module].met.isdisjoint(running_as(path[-1]))

    def scopes(self) -> list[tuple[nn.Module, OperatorScope]]:
        """Return the scope of each module that has one, or would otherwise be taken for its parent's."""
        found = dict(self._scopes)
        for module, scope in self._scopes.items():
            if scope.names or scope.excluded:
                found = dict.fromkeys(module.children(), OperatorScope()) | found
        return list(found.items())

    def contexts(self) -> Contexts | None:
        """Return what regions run in, so that what is excluded is kept; ``None``: nothing is."""
        excludes = self.selection.excluded or self.selection.keeps_collectives
        if not excludes and not any(
            each.excluded or each.without_collectives for each in self._scopes.values()
        ):
            return None
        return functools.partial(keeping, self.selection.excludes)


def submodule(module: nn.Module, path: Path) -> nn.Module | None:
    """Return the submodule at a path; ``None`` if there is none, as where the path is an operator's."""
    try:
        return module.get_submodule(".".join(path))
    except AttributeError:
        return None


def _is_operator(module: nn.Module) -> bool:
    """Whether a submodule is what the reference calls an operator: nothing is below it."""
    return not isinstance(module, nn.RNNBase) and next(module.children(), None) is None
