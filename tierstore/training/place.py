"""Modules of a model without a run that compute on the host, beside an accelerator: ``place(model, {...})``.

The same hooks as in a run bring values, by `torch.Tensor.to`: nothing is offloaded and nothing is counted.
Where there is no accelerator, all modules compute in one place.  An `offload` of the same model inside the
context takes the placement over.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from tierstore.errors import UsageError
from tierstore.planning.homes import CPU
from tierstore.planning.placement import patterns_in
from tierstore.quoting import quoted
from tierstore.training.faults import guard
from tierstore.training.given import check_is_model
from tierstore.training.modules.crossings import Crossings
from tierstore.training.modules.host_modules import PlacedModules, say_placed
from tierstore.training.opening import placed_by
from tierstore.training.pytorch.own_work import ordinary_mode

_placements: weakref.WeakKeyDictionary[nn.Module, list[Mapping[str, str]]] = weakref.WeakKeyDictionary()


class PlainLink:
    """Carries values as `torch.Tensor.to` does.

    Args:
        device: beside the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def device_of(self, side: str) -> torch.device:
        """See `Carrier.device_of`."""
        return torch.device(CPU) if side == CPU else self._device

    def is_there(self, tensor: torch.Tensor, side: str) -> bool:
        """See `Carrier.is_there`."""
        return tensor.device.type == self.device_of(side).type

    def carry(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """See `Carrier.carry`."""
        with torch.no_grad(), ordinary_mode():
            return tensor.to(self.device_of(side), copy=True)

    def note_on_host(self, value: torch.Tensor) -> None:
        """See `Carrier.note_on_host`: a tensor says it itself."""

    def sweep(self) -> None:
        """See `Carrier.sweep`: there is nothing to let go of."""


@contextlib.contextmanager
def place(model: nn.Module, placement: Mapping[str, str]) -> Iterator[None]:
    """Let modules compute on the host or on the accelerator inside the context.

    Args:
        model: any module, with what modules on the host have in host memory: move it there before optimizers
            are made.
        placement: by pattern of module names, ``"cpu"`` or ``"device"``; as of `tierstore.training.offload`.

    Raises:
        ConfigError: a pattern or a word is none.
        UsageError: something would be used on both sides, or is not in host memory, or is offloaded; the
            message names it.
    """
    check_is_model(model)
    _require_no_run(model)
    patterns = patterns_in({"modules": placement})
    placed = placed_by(model, patterns)
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device(CPU)
    with contextlib.ExitStack() as stack:
        if device.type != CPU:
            _require_on_host(model, placed)
            for handle in Crossings(PlainLink(device), model, placed).register(lambda _: True):
                stack.callback(handle.remove)
            say_placed(model, placed, device)
        given = _placements.setdefault(model, [])
        given.append(patterns)
        stack.callback(given.remove, patterns)
        yield


def _require_no_run(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if guard.guarded_tensor_of(parameter) is not None:
            raise UsageError(
                f"place({type(model).__name__}, ...): {name!r} is offloaded, and its run says where modules "
                "compute. Give the patterns to the run, offload(..., placement={...}), or begin it inside of "
                "place.",
                key=name,
            )


def _require_on_host(model: nn.Module, placed: PlacedModules) -> None:
    own = placed.tensors_on_host(model)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor in own and tensor.device.type not in (CPU, "meta"):
            raise UsageError(
                f"placement: {name!r} is on {str(tensor.device)!r}, and its module computes on the host. "
                "Move the module there, with .to('cpu'), before optimizers are made.",
                key=name,
            )


def given_patterns(given: object) -> Mapping[str, str]:
    """Return patterns of modules as they were given, none for ``None``.

    Raises:
        UsageError: it is no mapping of texts.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(each, str) for each in given):
        raise UsageError(
            f"placement={quoted(given)}: accepted is a mapping of patterns of module names, which are texts, "
            "to 'cpu' or 'device', such as {r'layer\\d': 'cpu'}."
        )
    return given


def placement_around(model: object, but: Mapping[str, str]) -> Mapping[str, str]:
    """Return what `place` says of a model now, without some patterns; what was said last comes first."""
    found: dict[str, str] = {}
    for patterns in reversed(_placements.get(model, []) if isinstance(model, nn.Module) else []):
        found.update({text: device for text, device in patterns.items() if text not in {**found, **but}})
    return found
