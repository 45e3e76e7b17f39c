"""What of a model that is sharded over processes cannot live in tiers: known by name before a run begins."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import UsageError
from tierstore.training.bundles.tensor_slots import is_sharded_kind, memory_of
from tierstore.training.optimizers.registered import is_known
from tierstore.training.sharding.found import GatheredGroup, is_sharded

FULLY_SHARD = "fully_shard"
TENSOR_PARALLEL = "parallelize_module"

_BY_ELEMENT = frozenset(
    {
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
        *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam),
    }
)
"""Optimizers that treat each element by itself: a step of a shard sends no message."""


def refuse_parameters(
    model: nn.Module,
    groups: Sequence[GatheredGroup],
    ignored: Container[torch.Tensor],
    *,
    has_values: bool,
) -> None:
    """Raise if a sharded parameter cannot live in tiers.

    Args:
        model: whose.
        groups: that FSDP has made of it.
        ignored: parameters that stay where they are.
        has_values: whether values may come from elsewhere: from weights, or a checkpoint.

    Raises:
        UsageError: it names the parameter, and says why.
    """
    known = {each.sharded_param: each for group in groups for each in group.params}
    for name, parameter in model.named_parameters():
        if parameter in ignored or not is_sharded_kind(type(parameter)):
            continue
        reason = _NOT_FSDPS if parameter not in known else _why_not(known[parameter], has_values=has_values)
        if reason is not None:
            raise UsageError(f"the parameter {name!r} cannot be offloaded: {reason}.", key=name)


_NOT_FSDPS = (
    "it is a DTensor that fully_shard did not make (parallelize_module, distribute_tensor), beside others "
    "that it did. Apply fully_shard to its module, too, over another dimension of the mesh"
)


def parts_alone(model: nn.Module, ignored: Container[torch.Tensor]) -> frozenset[torch.Tensor]:
    """Return the parameters of a model without FSDP that are ``DTensor``s, as tensor parallel makes them.

    Raises:
        UsageError: one cannot live in tiers; it says why.
    """
    found: set[torch.Tensor] = set()
    for name, parameter in model.named_parameters():
        if parameter in ignored or not is_sharded_kind(type(parameter)):
            continue
        reason = _why_no_part(parameter)
        if reason is not None:
            raise UsageError(f"the parameter {name!r} cannot be offloaded: {reason}.", key=name)
        found.add(parameter)
    return frozenset(found)


def _why_no_part(parameter: Any) -> str | None:  # noqa: ANN401 - a DTensor
    placements = tuple(parameter.placements)
    if not all(each.is_replicate() or hasattr(each, "dim") for each in placements):
        return _lies_otherwise(placements)
    if parameter.is_meta:
        return "it is a DTensor on the meta device. Give it values before offload(...)"
    kind = type(memory_of(parameter))
    if kind not in (torch.Tensor, nn.Parameter):
        return f"its local tensor is a {kind.__name__}, and accepted are plain ones"
    return None


def _lies_otherwise(placements: object) -> str:
    return f"it lies as {placements}, and accepted are parts and replicas: Shard and Replicate"


def _why_not(param: Any, *, has_values: bool) -> str | None:  # noqa: ANN401 - what FSDP knows of it
    local = memory_of(param.sharded_param)
    placements = tuple(param.sharded_param.placements)
    reasons = {
        _lies_otherwise(placements): not all(
            each.is_replicate() or hasattr(each, "dim") for each in placements
        ),
        "its local tensor has fsdp_pre_all_gather, as quantised ones have: another tensor than its bytes is "
        "gathered": hasattr(local, "fsdp_pre_all_gather"),
        "fully_shard was given CPUOffloadPolicy, which moves shards itself, as tiers do: leave out "
        "offload_policy": param.offload_to_cpu,
        "it is on the meta device and has no values. Pass weights=..., files of the whole model, of which "
        "each process reads its part; or give it some before offload(...): model.to_empty(device='cpu'), "
        "then its initialisation or a state dict": param.sharded_param.is_meta and not has_values,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def refuse_settings(
    optimizers: Sequence[torch.optim.Optimizer],
    config: OffloadConfig,
    given: Mapping[str, object],
    *,
    made_by: str,
    has_ignored: bool,
) -> None:
    """Raise if a run cannot be as it is asked for.

    Args:
        optimizers: that train the model.
        config: of the run.
        given: what else was asked for, by what messages call it: refused if it is true.
        made_by: `FULLY_SHARD` or `TENSOR_PARALLEL`.
        has_ignored: whether some shards stay with FSDP.

    Raises:
        UsageError: it says what, and what to do instead.
    """
    if made_by == TENSOR_PARALLEL and config.durable:
        raise UsageError(
            f"the model is sharded by {made_by}: durable keeps no parts of it. Leave durable out, and save "
            "with torch.distributed.checkpoint."
        )
    for reason in (*_of_optimizers(optimizers), *_of_config(config, has_ignored=has_ignored)):
        raise UsageError(f"the model is sharded by {made_by}: {reason}")
    for name, value in given.items():
        if value:
            raise UsageError(
                f"the model is sharded by {made_by}: {name} cannot be used with it. Leave it out."
            )


def refuse_for_shards(model: nn.Module, what: str, why: str) -> None:
    """Raise if a model is sharded.

    Args:
        model: that may be.
        what: cannot be done with it then.
        why: not.

    Raises:
        UsageError: it is.
    """
    made_by = FULLY_SHARD if is_sharded(model) else TENSOR_PARALLEL
    if made_by == FULLY_SHARD or any(is_sharded_kind(type(each)) for each in model.parameters()):
        raise UsageError(f"the model is sharded by {made_by}: {what} cannot be used with it: {why}.")


def _of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> Iterator[str]:
    for optimizer in optimizers:
        if type(optimizer) not in _BY_ELEMENT or not is_known(optimizer):
            accepted = ", ".join(sorted(kind.__name__ for kind in _BY_ELEMENT))
            yield (
                f"{type(optimizer).__name__} is not known to treat each element by itself, and processes may "
                f"step in different orders. Accepted are those of torch.optim: {accepted}."
            )


def _of_config(config: OffloadConfig, *, has_ignored: bool) -> Iterator[str]:
    if config.durable and has_ignored:
        yield "durable keeps no shards of ignored parameters. Leave ignored or durable out."
    if config.optimizer_in_backward:
        yield "optimizer_in_backward cannot be used with it. Leave it out."
    if config.optimizer_target == "cpu" and config.device != "cpu":
        yield "its optimizer steps where the model computes. Leave optimizer_target='cpu' out."
