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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from types import TracebackType
from typing import Any, Self

from torch import nn

from tierstore.training.activations.config import config_log
from tierstore.training.activations.config.geometry import Offset
from tierstore.training.activations.config.layers import Names, find_layers
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

    def add(self, layer: ChosenLayer) -> None:
        """Recompute what is meant of one layer."""
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
    _say_what_has_no_effect(layers, plan, matches)
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
) -> None:
    """Log keys that change nothing here, exclusions of modules, and patterns that mean nothing.

    Args:
        layers: of the model.
        plan: for them.
        matches: what it means, by layer.
    """
    for key in _idle_keys(layers, plan):
        log.info("%s has no effect here: see 'Recompute on PyTorch' in the documentation", key)
    for layer, found in zip(plan.layers, matches, strict=True):
        module = layers[layer.layer_id]
        for path in found.exclude:
            if submodule(module, path) is not None:
                name = ".".join(path)
                log.info("Excluding the module %s at layer %d has no effect", name, layer.layer_id)
    for text in _meaningless(plan, matches):
        log.warning("select_recompute: no layer has a submodule or an operator '%s'", text)


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


def _meaningless(plan: ActivationPlan, matches: Sequence[LayerMatches]) -> list[str]:
    """Return the patterns of operators that match nothing in any layer that they are for."""
    met: dict[str, bool] = {}
    for layer, found in zip(plan.layers, matches, strict=True):
        for pattern in layer.recompute.operators:
            is_met = pattern.is_aten or any(pattern.matches(path) for path in found.operators)
            met[pattern.text] = met.get(pattern.text, False) or is_met
    return [text for text, is_met in met.items() if not is_met]
