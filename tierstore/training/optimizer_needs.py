"""What training with an optimizer needs at once, and what cannot be met: known before the first step."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from tierstore.config import OffloadConfig
from tierstore.errors import CapacityError, UsageError
from tierstore.planning import Placement
from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.planning.homes import CPU, DEVICE
from tierstore.planning.rules import HOST
from tierstore.quoting import quoted
from tierstore.training.bundles.grouping import Content, Group
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.bundles.working_sets import (
    ForwardSet,
    Needs,
    WorkingSet,
    bundle_bytes,
    largest_needs,
    too_large,
)
from tierstore.training.checkpoints.resumed import ResumedCheckpoint
from tierstore.training.optimizers import registered
from tierstore.training.optimizers.adapters import Options, adapter_of
from tierstore.units import KIB, align_up, format_bytes

PAGE_BYTES = 4 * KIB
PAGED_FROM_BYTES = 64 * KIB
"""What takes as many bytes of host memory begins on a page."""


def working_sets(
    groups: Sequence[Group], optimizers: Sequence[torch.optim.Optimizer], former: ResumedCheckpoint | None
) -> list[WorkingSet]:
    """Return what is needed together to train each bundle.

    Args:
        groups: of parameters and buffers.
        optimizers: that train them.
        former: a checkpoint that knows how large their state is.
    """
    options = [
        {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in optimizers
    ]
    return [
        _working_set(group, optimizers, options, former)
        if group.content is Content.PARAMETERS
        else _of_buffers(group)
        for group in groups
    ]


def _of_buffers(group: Group) -> WorkingSet:
    nbytes = bundle_bytes(group)
    return WorkingSet(group.names[0], nbytes, 0, (), nbytes if group.is_pinned else 0, is_buffer=True)


def _working_set(
    group: Group,
    optimizers: Sequence[torch.optim.Optimizer],
    options: Sequence[Mapping[torch.Tensor, Options]],
    former: ResumedCheckpoint | None,
) -> WorkingSet:
    own_bytes = bundle_bytes(group)
    pinned_bytes = own_bytes if group.is_pinned else 0
    if group.optimizer is None:
        return WorkingSet(group.names[0], own_bytes, 0, (), pinned_bytes)
    trained = [p for p in group.tensors if p.requires_grad]
    memories = map(memory_of, trained)
    gradients = tuple(align_up(m.numel() * m.element_size(), ALIGNMENT_BYTES) for m in memories)
    known_bytes = 0 if former is None else former.state_bytes(group.optimizer, group.names)
    made_bytes = sum(_made_bytes(optimizers, options, group.optimizer, p) for p in trained)
    state_bytes = align_up(known_bytes or made_bytes, ALIGNMENT_BYTES)
    return WorkingSet(group.names[0], own_bytes, state_bytes, gradients, pinned_bytes)


def _made_bytes(
    optimizers: Sequence[torch.optim.Optimizer],
    options: Sequence[Mapping[torch.Tensor, Options]],
    usual: int,
    parameter: torch.Tensor,
) -> int:
    """Return the bytes of a parameter's state; what shares its memory may be another optimizer's."""
    for index in (usual, *range(len(optimizers))):
        if parameter in options[index]:
            optimizer = optimizers[index]
            return adapter_of(optimizer).state_bytes(optimizer, parameter, options[index][parameter])
    return 0


_TARGETS = {"cpu": CPU, "device": DEVICE, "gpu": DEVICE, "cuda": DEVICE, "ascend": DEVICE, "npu": DEVICE}
"""What a group of parameters may say of where it is stepped, in any case: the original's words, too."""


def targets_of(
    optimizers: Sequence[torch.optim.Optimizer],
    names: Mapping[nn.Parameter, str],
    on_host: Container[torch.Tensor],
) -> dict[torch.Tensor, str]:
    """Return where parameters are stepped, of those whose group has a ``target``.

    Args:
        optimizers: that train.
        names: of the model's parameters.
        on_host: parameters that are used on the host, beside a device.

    Raises:
        UsageError: a target is none, or contradicts where the parameter's module computes.
    """
    found: dict[torch.Tensor, str] = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            given = group.get("target")
            if given is None:
                continue
            target = _TARGETS.get(given.lower()) if isinstance(given, str) else None
            if target is None:
                kind = type(optimizer).__name__
                raise UsageError(f"a group of {kind} has target={quoted(given)}: accepted: 'cpu', 'device'.")
            for parameter in group["params"]:
                if parameter in on_host and target != CPU:
                    raise UsageError(
                        f"the group of {names.get(parameter)!r} has target={quoted(given)}, and its module "
                        "computes on the host: its optimizer steps there. Leave the target out.",
                        key=names.get(parameter),
                    )
                found[parameter] = target
    return found


def check_steps_in_backward(
    optimizers: Sequence[torch.optim.Optimizer], config: OffloadConfig, fastest: str
) -> None:
    """Raise if optimizers are to be stepped in backward and cannot be.

    Raises:
        UsageError: it names which, and says why.
    """
    if not config.optimizer_in_backward:
        return
    for optimizer in optimizers:
        if not registered.is_per_parameter(optimizer):
            kind = type(optimizer).__name__
            raise UsageError(
                f"optimizer_in_backward steps each parameter alone, and {kind} is not known to treat each "
                f"parameter by itself. If it does, say so: tierstore.training.register_optimizer({kind}). "
                "Else leave optimizer_in_backward out."
            )
    if config.optimizer_target == "cpu" and fastest != HOST:
        raise UsageError(
            "optimizer_in_backward steps where backward computes, and optimizer_target is 'cpu'. Leave one "
            "of the two out."
        )


def require_room(
    groups: Sequence[Group],
    sets: Sequence[WorkingSet],
    optimizers: Sequence[torch.optim.Optimizer],
    tier: str,
    capacity_bytes: int,
    forwards: Sequence[ForwardSet] = (),
) -> None:
    """Raise if one bundle alone finds no room where it is trained, or what one forward needs where it runs.

    What an optimizer has at once that is not stepped by bundle is not known: only what its gradients need.

    Args:
        groups: of parameters.
        sets: their needs.
        optimizers: that train them.
        tier: where bundles are trained.
        capacity_bytes: of the tier.
        forwards: what modules need that run there.

    Raises:
        CapacityError: it names the bundle or the module, what it needs and what there is.
    """
    trained = [
        each if _is_stepped_by_bundle(group, optimizers) else replace(each, state_bytes=0)
        for group, each in zip(groups, sets, strict=True)
    ]
    needs: list[Needs] = [*trained, *forwards]
    if tier == HOST:
        gap_bytes = PAGE_BYTES if any(each.pinned_bytes for each in trained) else 0
        needs = [_in_pages(each, gap_bytes) for each in trained]
        needs += [_run_in_pages(each, gap_bytes) for each in forwards]
    if needs and largest_needs(needs)[1] > capacity_bytes:
        raise too_large(tier, capacity_bytes, needs)


def stepped_in_host(groups: Sequence[Group], placement: Placement) -> list[int]:
    """Return the indices of the optimizers that step something in host memory."""
    return sorted(
        {
            group.optimizer
            for group in groups
            if group.optimizer is not None and _is_stepped_in_host(group, placement)
        }
    )


def without_elsewhere(
    groups: Sequence[Group], sets: Sequence[WorkingSet], placement: Placement
) -> list[WorkingSet]:
    """Return the needs in host memory where modules or optimizers compute in it, beside a device.

    What nobody uses there need not come there.
    """
    return [
        each if group.is_on_host or _is_stepped_in_host(group, placement) else WorkingSet(each.name, 0, 0)
        for group, each in zip(groups, sets, strict=True)
    ]


def without_host_modules(groups: Sequence[Group], sets: Sequence[WorkingSet]) -> list[WorkingSet]:
    """Return the needs on the device: what modules on the host use never comes there."""
    return [
        WorkingSet(each.name, 0, 0) if group.is_on_host else each
        for group, each in zip(groups, sets, strict=True)
    ]


def _is_stepped_in_host(group: Group, placement: Placement) -> bool:
    return group.optimizer is not None and placement.bundles[group.key].state.device == CPU


def _in_pages(needs: WorkingSet, gap_bytes: int) -> WorkingSet:
    """Return what is needed of host memory, where what is large begins on a page.

    What is brought together is brought the largest first, into free memory in one piece: every slot takes
    whole pages, or no more than its bytes.  So does what is pinned, before.

    Args:
        needs: in bytes.
        gap_bytes: that may be left between what is pinned and the first that is large.
    """
    slots = (needs.bundle_bytes, needs.state_bytes, *needs.gradients)
    is_large = any(nbytes >= PAGED_FROM_BYTES for nbytes in slots)
    return replace(
        needs,
        bundle_bytes=_taken_bytes(needs.bundle_bytes) + (gap_bytes if is_large else 0),
        state_bytes=_taken_bytes(needs.state_bytes),
        gradients=tuple(map(_taken_bytes, needs.gradients)),
        pinned_bytes=_taken_bytes(needs.pinned_bytes),
    )


def _run_in_pages(needs: ForwardSet, gap_bytes: int) -> ForwardSet:
    """Return what a forward needs of host memory.

    Where modules around it hold something, that lies anywhere: what is small there may begin in one page
    and end in another, and what is brought beside it may find no range that goes on into the next page.
    """
    if not needs.around:
        is_large = any(nbytes >= PAGED_FROM_BYTES for nbytes in needs.bundle_bytes)
        taken = (*map(_taken_bytes, needs.bundle_bytes), gap_bytes if is_large else 0)
        return replace(needs, bundle_bytes=taken)
    return replace(
        needs,
        bundle_bytes=(*(align_up(nbytes, PAGE_BYTES) for nbytes in needs.bundle_bytes), gap_bytes),
        around_bytes=tuple(map(_reached_bytes, needs.around_bytes)),
    )


def _reached_bytes(nbytes: int) -> int:
    """Return the bytes of the pages in which something may have a byte, wherever it lies."""
    before_bytes = 0 if nbytes >= PAGED_FROM_BYTES else PAGE_BYTES - ALIGNMENT_BYTES
    return align_up(before_bytes + nbytes, PAGE_BYTES)


def _taken_bytes(nbytes: int) -> int:
    return align_up(nbytes, PAGE_BYTES) if nbytes >= PAGED_FROM_BYTES else nbytes


def _is_stepped_by_bundle(group: Group, optimizers: Sequence[torch.optim.Optimizer]) -> bool:
    return group.optimizer is None or registered.is_per_parameter(optimizers[group.optimizer])


def check_lbfgs(
    optimizers: Sequence[torch.optim.Optimizer], sets: Sequence[WorkingSet], tier: str, capacity_bytes: int
) -> None:
    """Raise if ``LBFGS`` finds no room for what it has all at once: all gradients and its flat history.

    Where computing happens in host memory, its history is the program's own, and no quota knows of it.

    Raises:
        CapacityError: with the numbers.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.LBFGS):
            continue
        all_bytes = sum(each.nbytes for each in sets if not each.is_buffer)
        (group,) = optimizer.param_groups
        flat_bytes = sum(p.numel() * p.element_size() for p in group["params"])
        copies = 0 if tier == HOST else 2 * int(group["history_size"]) + _LBFGS_VECTORS
        needed_bytes = all_bytes + copies * flat_bytes
        if needed_bytes > capacity_bytes:
            raise CapacityError(
                f"LBFGS has all parameters and gradients at once ({format_bytes(all_bytes)}), and {copies} "
                f"vectors of {format_bytes(flat_bytes)} beside them; {tier!r} has "
                f"{format_bytes(capacity_bytes)}. Raise it, lower history_size, or take an optimizer that "
                "treats each parameter by itself, such as AdamW or SGD.",
                tier=tier,
                needed_bytes=needed_bytes,
                free_bytes=capacity_bytes,
            )


_LBFGS_VECTORS = 6
"""Beside its history: the flat gradient, the former one, a direction, its step, and a line search's two."""
