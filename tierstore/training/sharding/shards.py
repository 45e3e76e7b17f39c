"""The shards of one model: taken over from FSDP for a run, and given back."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.training.autograd.gradients import Gradients
from tierstore.training.bundles.grouping import Group
from tierstore.training.bundles.working_sets import ForwardSet, bundle_bytes
from tierstore.training.modules.hooks import GradientHook
from tierstore.training.pytorch.global_hooks import Removable
from tierstore.training.sharding.found import GatheredGroup, groups_in, is_sharded
from tierstore.training.sharding.refusals import (
    FULLY_SHARD,
    TENSOR_PARALLEL,
    parts_alone,
    refuse_parameters,
    refuse_settings,
)


class ShardTrainer(Protocol):
    """What gradients of shards need of the session that they come to."""

    @property
    def gradients(self) -> Gradients:
        """Of the model."""
        ...

    def begin_accumulation(self) -> None:
        """A gradient is about to come to the store."""
        ...

    def landed(self, parameter: torch.Tensor) -> None:
        """A gradient waits for the optimizer."""
        ...

    def hold(self, handle: Removable) -> None:
        """Let a hook be removed in the end."""
        ...


class ModelShards:
    """The shards of one model.

    Args:
        model: that ``fully_shard`` was applied to.
        ignored: parameters that stay with FSDP.

    Attributes:
        group_of: of each parameter, the number of the group that FSDP gathers it with.
        parts: parameters of which this process has a part, all of which are offloaded.
        has_ignored: whether some stay with FSDP.
    """

    def __init__(self, model: nn.Module, ignored: Container[torch.Tensor]) -> None:
        self.groups: Sequence[GatheredGroup] = groups_in(model)
        self._params = [
            each for group in self.groups for each in group.params if each.sharded_param not in ignored
        ]
        self._collectives = contextlib.ExitStack()
        self.has_ignored = len(self._params) < sum(len(group.params) for group in self.groups)
        taken = {each.sharded_param for each in self._params}
        self.group_of: Mapping[torch.Tensor, int] = {
            parameter: number
            for number, group in enumerate(self.groups)
            for parameter in group.parameters
            if parameter in taken
        }
        self.parts: Collection[torch.Tensor] = self.group_of.keys()

    def take_over(self) -> None:
        """Let FSDP ask for shards when it gathers them, from now on."""
        from tierstore.training.sharding.tiered_params import put_on

        for param in self._params:
            put_on(param)

    def share_collectives(self, model: nn.Module, machine: str) -> None:
        """Let FSDP gather and reduce in memory that processes share; all of them call it.

        Args:
            model: theirs.
            machine: what tells this process's machine from others.
        """
        from tierstore.training.sharding.shared_collectives import SharedCollectives

        self._collectives.callback(SharedCollectives(model, machine).remove)

    def remove(self) -> None:
        """Let FSDP have the shards itself again.  Idempotent."""
        from tierstore.training.sharding.tiered_params import take_off

        self._collectives.close()
        while self._params:
            take_off(self._params.pop())

    def watch(self, trainer: ShardTrainer) -> None:
        """Bring gradients to the store when they are reduced: FSDP calls hooks after accumulation then."""

        def reduced(parameter: torch.Tensor) -> None:
            trainer.begin_accumulation()
            trainer.gradients.take_reduced(parameter)
            trainer.landed(parameter)

        for parameter in self.group_of:
            if parameter.requires_grad:
                hook = GradientHook(parameter, reduced)
                trainer.hold(parameter.register_post_accumulate_grad_hook(hook))

    def gathered_together(self, groups: Sequence[Group]) -> Iterator[ForwardSet]:
        """Yield what has to be there together while FSDP gathers one of its groups.

        Args:
            groups: of what travels together.
        """
        travelling: dict[int, list[Group]] = {}
        for group in groups:
            if group.gathered is not None and not group.is_pinned:
                travelling.setdefault(group.gathered, []).append(group)
        for number, parts in travelling.items():
            names = tuple(part.names[0] for part in parts)
            yield ForwardSet(self.groups[number].name, names, (), tuple(map(bundle_bytes, parts)), ())


class NoShards:
    """A model that nobody gathers: its parameters are ordinary ones, or parts that modules compute with.

    Args:
        parts: parameters of which this process has a part: ``DTensor``s that tensor parallel has made.
    """

    group_of: Mapping[torch.Tensor, int] = MappingProxyType({})

    def __init__(self, parts: frozenset[torch.Tensor] = frozenset()) -> None:
        self.parts: Collection[torch.Tensor] = parts

    def take_over(self) -> None:
        """See `ModelShards.take_over`."""

    def share_collectives(self, model: nn.Module, machine: str) -> None:
        """See `ModelShards.share_collectives`."""

    def remove(self) -> None:
        """See `ModelShards.remove`."""

    def watch(self, trainer: ShardTrainer) -> None:
        """See `ModelShards.watch`."""

    def gathered_together(self, groups: Sequence[Group]) -> Iterator[ForwardSet]:
        """See `ModelShards.gathered_together`."""
        del groups
        return iter(())


AnyShards = ModelShards | NoShards


@contextlib.contextmanager
def taken_over(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    ignored: Container[torch.Tensor],
    given: Mapping[str, object],
    *,
    has_values: bool,
) -> Iterator[AnyShards]:
    """Yield the shards of a model, which FSDP asks for from now on; it has them again if the context fails.

    Args:
        model: that is offloaded.
        optimizers: that train it.
        config: of the run.
        ignored: parameters that stay ordinary.
        given: see `refusals.refuse_settings`.
        has_values: see `refusals.refuse_parameters`.

    Raises:
        UsageError: something of it cannot be: see `tierstore.training.sharding.refusals`.
    """
    if not is_sharded(model):
        parts = parts_alone(model, ignored)
        if parts:
            refuse_settings(optimizers, config, given, made_by=TENSOR_PARALLEL, has_ignored=False)
        yield NoShards(parts)
        return
    shards = ModelShards(model, ignored)
    refuse_parameters(model, shards.groups, ignored, has_values=has_values)
    refuse_settings(optimizers, config, given, made_by=FULLY_SHARD, has_ignored=shards.has_ignored)
    try:
        shards.take_over()
        yield shards
    except BaseException:
        shards.remove()
        raise
