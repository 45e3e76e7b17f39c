"""``recompute(model, config)``: what is computed again in backward instead of being kept.

1. A whole layer, and a submodule that has submodules, is recomputed as a region (`CheckpointedModule`): what
   it is given is kept, or taken by a policy, and what it returns is kept by whoever saves that.
2. A submodule without submodules and an ATen operator are operators (`RecomputedOperators`): what they return
   is made again too, wherever the layer saves it.
3. What is excluded is kept, inside a region too.
4. Losses, gradients, buffers and random numbers are the same bits as without.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Self

from torch import nn

from tierstore.training.activations.config import config_log
from tierstore.training.activations.config.geometry import Offset
from tierstore.training.activations.config.layers import Names, find_layers
from tierstore.training.activations.config.operator_names import NOT_RUN, why_idle
from tierstore.training.activations.config.patterns import Path, Pattern
from tierstore.training.activations.config.plan import ActivationPlan, LayerMatches, plan_layers
from tierstore.training.activations.config.recompute_config import RecomputeConfig
from tierstore.training.activations.config.sections import (
    RECOMPUTE,
    SWAP,
    Sections,
    read_sections,
    sections_of,
)
from tierstore.training.activations.config.swap_config import SwapConfig
from tierstore.training.activations.recomputation.checkpointed_modules import (
    CheckpointedModule,
    InputPolicies,
    is_idle,
)
from tierstore.training.activations.recomputation.chosen_layers import ChosenLayer, match_layers, submodule
from tierstore.training.activations.recomputation.recomputed_operators import RecomputedOperators
from tierstore.training.activations.recomputation.recorded_ops import InputIndex, RecomputeCounts
from tierstore.training.activations.recomputation.scopes import ScopeHooks
from tierstore.training.activations.recomputation.sliced_inputs import groups_of, is_distributed
from tierstore.training.activations.runtime.activation_runtime import ActivationRuntime
from tierstore.training.activations.runtime.module_calls import QuietHook

log = logging.getLogger("tierstore")

Config = RecomputeConfig | Mapping[str, object] | str | FilePath


@dataclass(frozen=True, slots=True)
class RecomputeStats:
    """What recomputing did so far.

    Attributes:
        forwards: of layers and submodules that are recomputed as a whole.
        repetitions: of those, in backward.
        replaced: how many tensors that autograd would have kept are made again by an operator instead.
        operators: how many operators were run again for that.
    """

    forwards: int
    repetitions: int
    replaced: int
    operators: int


class Recompute:
    """What is recomputed in a model.  A context manager; `close` does the same.

    Made by `recompute`.
    """

    def __init__(
        self, model: nn.Module, runtime: ActivationRuntime, inputs: InputPolicies | None = None
    ) -> None:
        self._runtime = runtime
        self._inputs = inputs
        self._regions: list[CheckpointedModule] = []
        self._counts = RecomputeCounts()
        self._givens = InputIndex()
        self._handles = [
            model.register_forward_pre_hook(QuietHook(self._discard), prepend=True, with_kwargs=True)
        ]
        self._layers: list[ChosenLayer] = []
        self._awaited: tuple[Pattern, ...] = ()

    @property
    def has_regions(self) -> bool:
        """Whether anything is recomputed as a whole."""
        return bool(self._regions)

    def stats(self) -> RecomputeStats:
        """Return what it did so far."""
        return RecomputeStats(
            sum(region.forwards for region in self._regions),
            sum(region.repetitions for region in self._regions),
            self._counts.saved,
            self._counts.made,
        )

    def close(self) -> None:
        """Remove all hooks; nothing more is recomputed, but by the graphs that there are.  Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._runtime.discard_interrupted()

    def _discard(self, *_: object) -> None:
        """End what an interrupt left open, before the model runs again."""
        self._runtime.discard_interrupted()

    def await_operators(self, model: nn.Module, patterns: Iterable[Pattern]) -> None:
        """Log the patterns whose operators run in no layer when the model runs first."""
        self._awaited = tuple(pattern for pattern in patterns if self._has_met(pattern) is False)
        if self._awaited:
            self._handles.append(model.register_forward_hook(QuietHook(self._look_back)))

    def _look_back(self, *_: object) -> None:
        """The model has run: say which of the operators that are to be recomputed did not."""
        if is_idle():
            return
        for pattern in self._awaited:
            if self._has_met(pattern) is False:
                log.warning("select_recompute '%s' recomputes nothing: %s", pattern.text, NOT_RUN)
        self._awaited = ()

    def _has_met(self, pattern: Pattern) -> bool | None:
        """Say of all layers what `ChosenLayer.has_met` says of one."""
        met = [layer.has_met(pattern) for layer in self._layers]
        return True in met if any(each is not None for each in met) else None

    def add(self, layer: ChosenLayer) -> None:
        """Recompute what is meant of one layer."""
        self._layers.append(layer)
        for module in layer.regions:
            begin = None if self._inputs is None else functools.partial(self._inputs, len(self._regions))
            region = CheckpointedModule(module, self._runtime, layer.contexts(), layer.groups, begin)
            self._regions.append(region)
            self._handles += region.register()
        if layer.has_operators:
            operators = RecomputedOperators(
                layer.module, self._runtime, layer.selection, self._givens, self._counts
            )
            self._handles += operators.register()
        for module, scope in layer.scopes():
            self._handles += ScopeHooks(module, self._runtime.calls, scope).register()

    def __enter__(self) -> Self:
        """Return the object itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it."""
        self.close()


def recompute(
    model: nn.Module,
    config: Config,
    *,
    layers: Names = None,
    pipeline_stage: int = 1,
    pp_interleave_num: int = 1,
    offset: Offset = 0,
) -> Recompute:
    """Compute layers or operators of ``model`` again in backward instead of keeping what they made.

    Nothing is set on the model but hooks, which `Recompute.close` removes.

    Args:
        model: any module with repeated layers.
        config: what is recomputed: the keys of ``recompute_config``, a mapping or a YAML file that has it as
            a section, or a `RecomputeConfig`.
        layers: names of the containers of the model's layers, such as ``"model.layers"``; ``None``: the
            only ``nn.ModuleList`` or ``nn.Sequential`` of like modules.
        pipeline_stage: how many pipeline stages the layers are in; a document may say it, too.
        pp_interleave_num: how many interleaves; likewise.
        offset: how many layers cells have more than the even share; likewise.

    Raises:
        ConfigError: the configuration is wrong, or does not fit the number of layers.
        UsageError: no layers were found; the message says what there is.
    """
    sections = _read(config)
    given = {"pipeline_stage": pipeline_stage, "pp_interleave_num": pp_interleave_num, "offset": offset}
    layout: dict[str, Any] = given | {k: v for k, v in sections.layout.items() if given[k] == _UNSAID[k]}
    found = list(find_layers(model, layers).values())
    plan = plan_layers(sections.recompute, sections.swap, num_layers=len(found), **layout)
    _say(plan, match_layers(found, plan))
    return apply(model, found, plan, ActivationRuntime.new())


_UNSAID: Mapping[str, object] = {"pipeline_stage": 1, "pp_interleave_num": 1, "offset": 0}


def apply(
    model: nn.Module,
    layers: Sequence[nn.Module],
    plan: ActivationPlan,
    runtime: ActivationRuntime,
    inputs: InputPolicies | None = None,
) -> Recompute:
    """Do what a plan says about recomputing; log only what of it has no effect.

    Args:
        model: that has the layers.
        layers: of the model.
        plan: for them.
        runtime: of the model.
        inputs: of what is recomputed as a whole; ``None``: they are kept.
    """
    matches = match_layers(layers, plan)
    run = Recompute(model, runtime, inputs)
    try:
        for layer, found in zip(plan.layers, matches, strict=True):
            run.add(ChosenLayer.of(layers[layer.layer_id], runtime.calls, plan.recompute, layer, found))
    except BaseException:
        run.close()
        raise
    idle = _say_what_has_no_effect(layers, plan, matches)
    patterns = dict.fromkeys(each for layer in plan.layers for each in layer.recompute.operators)
    run.await_operators(model, (pattern for pattern in patterns if pattern not in idle))
    return run


def _read(config: Config) -> Sections:
    if isinstance(config, RecomputeConfig):
        return Sections(config, SwapConfig(swap=config.swap))
    if isinstance(config, str | FilePath):
        return read_sections(config)
    if RECOMPUTE in config or SWAP in config:
        return sections_of(config)
    return Sections(RecomputeConfig.from_mapping(config))


# ---------------------------------------------------------------------- what is said


def _say(plan: ActivationPlan, matches: Sequence[LayerMatches]) -> None:
    """Log what is recomputed; `lines.say` says what is swapped as well.

    Args:
        plan: of all layers.
        matches: what it means, by layer.
    """
    tables = config_log.table_lines(plan.recompute.tables_on(plan.geometry))
    for line in [*config_log.geometry_lines(plan.geometry), *tables]:
        log.info("%s", line)
    for warning in plan.warnings:
        log.warning("%s", warning)
    for layer, found in zip(plan.layers, matches, strict=True):
        alone = replace(layer, swap=SwapConfig().decide(layer.layer_id))
        for line in config_log.layer_lines(alone, replace(found, swap=()), by_index=plan.swap.swap):
            log.info("%s", line)


def _say_what_has_no_effect(
    layers: Sequence[nn.Module], plan: ActivationPlan, matches: Sequence[LayerMatches]
) -> list[Pattern]:
    """Log keys that change nothing here and patterns that mean nothing; return those of what is selected.

    Args:
        layers: of the model.
        plan: for them.
        matches: what it means, by layer.
    """
    for key in _idle_keys(layers, plan):
        log.info("%s has no effect here: see 'Recompute on PyTorch' in the documentation", key)
    pairs = list(zip(plan.layers, matches, strict=True))
    for layer, found in pairs:
        module = layers[layer.layer_id]
        for path in found.exclude:
            if submodule(module, path) is not None:
                name = ".".join(path)
                log.info("Excluding the module %s at layer %d has no effect", name, layer.layer_id)
    excluded = [(layer.recompute.exclude, found.exclude) for layer, found in pairs]
    for pattern in _unmatched(excluded):
        _warn_of("select_recompute_exclude", pattern, "keeps nothing", in_place=True)
    idle = _unmatched([(layer.recompute.operators, found.operators) for layer, found in pairs])
    for pattern in idle:
        _warn_of("select_recompute", pattern, "recomputes nothing", in_place=False)
    return idle


def _idle_keys(layers: Sequence[nn.Module], plan: ActivationPlan) -> list[str]:
    config = plan.recompute
    is_sliced = any(
        each.recompute.slice_activation and groups_of(layers[each.layer_id]) for each in plan.layers
    )
    asked = {
        "recompute_slice_activation": config.recompute_slice_activation and not is_sliced,
        "parallel_optimizer_comm_recompute": config.parallel_optimizer_comm_recompute,
        "mp_comm_recompute": not config.mp_comm_recompute and not is_distributed(),
        "select_comm_recompute": bool(config.select_comm_recompute),
    }
    return [key for key, is_asked in asked.items() if is_asked]


def _unmatched(asked: Iterable[tuple[Iterable[Pattern], Sequence[Path]]]) -> list[Pattern]:
    """Return the patterns that match nothing in any layer that they are for.

    Args:
        asked: patterns for a layer, and what of it was found for them.
    """
    met: dict[Pattern, bool] = {}
    for patterns, paths in asked:
        for pattern in patterns:
            is_met = (pattern.text,) in paths if pattern.is_aten else any(map(pattern.matches, paths))
            met[pattern] = met.get(pattern, False) or is_met
    return [pattern for pattern, is_met in met.items() if not is_met]


def _warn_of(key: str, pattern: Pattern, what: str, *, in_place: bool) -> None:
    why = why_idle(pattern, in_place=in_place)
    if why is None:
        log.warning("%s: no layer has a submodule or an operator '%s'", key, pattern.text)
    else:
        log.warning("%s '%s' %s: %s", key, pattern.text, what, why)
