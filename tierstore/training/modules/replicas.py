"""Wrappers that average gradients over processes: they read what no hook of ours can know.

``DistributedDataParallel`` reads gradients in C++: while they are accumulated, when the last one of a bucket
has been, and at the end of a backward pass, even those of parameters that took no part in it; it writes
averages into them, or makes them views of its buckets.

Buffers it sends in every forward, in C++ as well.

1. The gradient of a parameter that it reduces is an ordinary tensor as long as the run lasts, wherever the
   wrapper is: inside the model, around it, or around something that holds it.  So is every buffer that it
   sends.  Parameters and optimizer state are in the store as ever.
2. It is known before the first step: by what the model is made of, and when the wrapper is made.
3. What cannot be right or cannot fit is refused there, by name.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from tierstore.errors import CapacityError, UsageError
from tierstore.training.pytorch.global_hooks import HookEverywhere
from tierstore.units import format_bytes

LetBe = Callable[[Iterable[torch.Tensor]], None]

_Replicated = nn.parallel.DistributedDataParallel
_IGNORED = "_ddp_params_and_buffers_to_ignore"  # that a wrapper which is being made looks for
_SHARDED = "FullyShardedDataParallel"  # by name: importing it takes a second


def wrappers_in(model: nn.Module, device: torch.device) -> list[nn.parallel.DistributedDataParallel]:
    """Return the wrappers inside ``model`` that read gradients.

    Args:
        model: that is to be offloaded.
        device: where it will compute.

    Raises:
        UsageError: a wrapper is for another device.
    """
    found: list[nn.parallel.DistributedDataParallel] = []
    for module in model.modules():
        if isinstance(module, _Replicated):
            found.append(module)
            if module.device.type != device.type:
                raise UsageError(
                    f"a DistributedDataParallel was made for parameters on {module.device.type!r}, and they "
                    f"would compute on {device.type!r}. Move the model there before it is wrapped, or wrap "
                    "it after offload(...)."
                )
    return found


def buffers_sent(model: nn.Module) -> set[torch.Tensor]:
    """Return the buffers of ``model`` that a wrapper, wherever it is, sends to other processes in forward."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return set()
    own = set(model.buffers())
    return own & {buffer for wrapper in _wrappers() for buffer in wrapper.module.buffers()}


def wrappers_of(model: nn.Module) -> list[nn.parallel.DistributedDataParallel]:
    """Return the wrappers inside ``model`` or around a part of it, wherever they are."""
    own = set(model.modules())
    return [wrapper for wrapper in _wrappers() if not own.isdisjoint(wrapper.modules())]


def _wrappers() -> list[nn.parallel.DistributedDataParallel]:
    """Return all wrappers that there are.  Proxies that say they are of another class are left alone."""
    kinds: list[type] = [_Replicated]
    for kind in kinds:  # which gets longer meanwhile
        kinds += kind.__subclasses__()
    return [each for each in gc.get_objects() if type(each) in kinds]


class LeftOut:
    """Lets wrappers that are made around a model, or a module in it, ignore some parameters.

    Args:
        model: whose.
        parameters: that they neither send nor average.
    """

    def __init__(self, model: nn.Module, parameters: Container[object]) -> None:
        self._former: list[tuple[nn.Module, object]] = []
        names: dict[nn.Module, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if parameter in parameters:
                path = name.split(".")
                for depth in range(len(path)):
                    around = model.get_submodule(".".join(path[:depth]))
                    names.setdefault(around, []).append(".".join(path[depth:]))
        for module, ignored in names.items():
            former = getattr(module, _IGNORED, None)
            self._former.append((module, former))
            setattr(module, _IGNORED, [*(former or ()), *ignored])

    def remove(self) -> None:
        """Let modules be as they were.  Idempotent."""
        while self._former:
            module, former = self._former.pop()
            if former is None:
                delattr(module, _IGNORED)
            else:
                setattr(module, _IGNORED, former)


def _is_sharded(module: nn.Module) -> bool:
    return any(kind.__name__ == _SHARDED for kind in type(module).__mro__)


def refuse(module: nn.Module, what: str, *, casts: bool = False) -> None:
    """Raise if a wrapper cannot work on an offloaded model.

    Args:
        module: that may be one.
        what: what messages call it.
        casts: whether it was told to compute in another precision.

    Raises:
        UsageError: it names the wrapper, and says what to do instead.
    """
    if _is_sharded(module):
        raise UsageError(
            f"{what} is a {_SHARDED}, which moves parameters itself. Offload the model without it; to train "
            "in several processes wrap it in DistributedDataParallel."
        )
    if isinstance(module, nn.DataParallel) and len(module.device_ids) > 1:
        raise UsageError(
            f"{what} is a DataParallel on several devices, which copies all parameters to each of them in "
            "every step. Use one process for each device and DistributedDataParallel."
        )
    if isinstance(module, _Replicated) and (casts or getattr(module, "mixed_precision", None) is not None):
        raise UsageError(
            f"{what} is a DistributedDataParallel with mixed_precision, which replaces the memory of "
            "parameters. Use torch.autocast instead."
        )


def refuse_to_average(reduced: Iterable[torch.Tensor]) -> None:
    """Raise where parameters are stepped before their gradients are averaged.

    Raises:
        UsageError: always.
    """
    del reduced
    raise UsageError(
        "optimizer_in_backward steps each parameter with the gradient of this process alone, before "
        "DistributedDataParallel has averaged it: the processes would drift apart. Leave "
        "optimizer_in_backward out."
    )


@dataclass(frozen=True, slots=True)
class ComputeRoom:
    """What there is where the model computes.

    Attributes:
        tier: its name in the store.
        parameter_bytes: of the whole model.
        capacity_bytes: what the tier may take.
        gradient_capacity_bytes: what gradients may take beside the largest bundle; ``None``: they are in
            memory that no quota counts.
    """

    tier: str
    parameter_bytes: int
    capacity_bytes: int
    gradient_capacity_bytes: int | None

    def refuse_gradients(self, reduced: Iterable[torch.Tensor], *, are_views: bool) -> None:
        """Raise if there is no room for gradients that are all there at the same time.

        Raises:
            CapacityError: with what to do instead.
        """
        once_bytes = sum(each.nbytes for each in reduced if each.requires_grad)
        needed_bytes = once_bytes if are_views else 2 * once_bytes
        if self.gradient_capacity_bytes is None or needed_bytes <= self.gradient_capacity_bytes:
            return
        advice = "" if are_views else "pass gradient_as_bucket_view=True, "
        raise CapacityError(
            f"DistributedDataParallel needs {format_bytes(needed_bytes)} for all gradients"
            f"{'' if are_views else ' and its buckets'} in {self.tier!r}, and beside the largest bundle "
            f"there are {format_bytes(self.gradient_capacity_bytes)}. To train in several processes {advice}"
            "leave DistributedDataParallel out and call run.average_gradients(), which averages one at a "
            "time, or raise max_device_memory.",
            tier=self.tier,
            needed_bytes=needed_bytes,
            free_bytes=self.gradient_capacity_bytes,
        )

    def refuse_parameters(self) -> None:
        """Raise if not all parameters can be there at the same time.

        Raises:
            CapacityError: with what to do instead.
        """
        if self.parameter_bytes <= self.capacity_bytes:
            return
        raise CapacityError(
            "DistributedDataParallel sends all parameters to the other processes at once when it is made: "
            f"{format_bytes(self.parameter_bytes)}, and {self.tier!r} has "
            f"{format_bytes(self.capacity_bytes)}. Wrap the model before offload(...), or give every process "
            "the same weights and pass init_sync=False.",
            tier=self.tier,
            needed_bytes=self.parameter_bytes,
            free_bytes=self.capacity_bytes,
        )


class Wrapping:
    """Sees an offloaded model being wrapped.

    Args:
        model: whose.
        keep: lets the gradients of parameters be ordinary tensors from now on.
        release: lets buffers be.
        room: for what a wrapper needs.
        left_out: parameters that it neither sends nor averages; see `LeftOut`.
        told: is told of it.
    """

    def __init__(
        self,
        model: nn.Module,
        keep: LetBe,
        release: LetBe,
        room: ComputeRoom,
        left_out: Container[object],
        told: Callable[[nn.parallel.DistributedDataParallel], None],
    ) -> None:
        self._left_out = left_out
        self._told = told
        self._own = frozenset(model.modules())
        self._keep = keep
        self._release = release
        self._room = room

    def watch(self) -> HookEverywhere:
        """See every module that gets a part from now on."""
        return HookEverywhere(register_module_module_registration_hook, self._registered)

    def _registered(self, module: nn.Module, name: str, part: nn.Module | None) -> None:
        """A module gets a part: if it is a wrapper of ours, gradients are kept for it."""
        del name
        is_replicated = isinstance(module, _Replicated)
        if part is None or not (is_replicated or _is_sharded(module)):
            return
        if not any(each in self._own for each in part.modules()):
            return
        given = _arguments(sys._getframe())  # noqa: SLF001 - it is told before the wrapper knows them itself
        refuse(module, "what wraps the offloaded model", casts=given.get("mixed_precision") is not None)
        reduced = [each for each in part.parameters() if each not in self._left_out]
        self._room.refuse_gradients(reduced, are_views=bool(given.get("gradient_as_bucket_view")))
        if given.get("init_sync"):
            self._room.refuse_parameters()
        self._keep(reduced)
        self._release(part.buffers())
        if isinstance(module, _Replicated):
            self._told(module)


def _arguments(frame: FrameType | None) -> Mapping[str, object]:
    """Return what the wrapper that is being made was given; nothing if it is made in another way."""
    while frame is not None and frame.f_code is not _Replicated.__init__.__code__:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals
