"""Models that are built without memory for their parameters, and yet with their buffers.

Under ``torch.device("meta")`` nothing that a model makes has values, also tables that it computes and that no
file holds, such as rotary frequencies.  `without_values` leaves everything to the model's own code but the
parameters: each loses its memory when a module takes it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from tierstore.training.bundles.freed_memory import give_freed_memory_back
from tierstore.training.bundles.tensor_slots import swap


@contextlib.contextmanager
def without_values() -> Iterator[None]:
    """Build models whose parameters are on the meta device, and whose buffers are not.

    Each parameter of a module that is made inside the context has its memory only until the module takes it,
    so that the peak is the largest one.  It stays the same object, also where several modules share it.
    Buffers have the values that the model computes.  Initial values of parameters are lost: give the model
    others by ``weights`` of `tierstore.training.offload`.

    What is a class of its own (tables, lazy and quantised parameters), what something else refers to already,
    and what recurrent layers of PyTorch have, which refer to it themselves, keeps its memory.  Threads other
    than the caller's are left alone.
    """
    mine = threading.get_ident()

    def empty(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        del name
        if isinstance(module, nn.RNNBase):
            return
        if threading.get_ident() == mine and type(parameter) is nn.Parameter and not parameter.is_meta:
            _empty(parameter)

    give_freed_memory_back()  # else each leaves a hole in the heap
    handle = register_module_parameter_registration_hook(empty)
    try:
        yield
    finally:
        handle.remove()


def _empty(parameter: nn.Parameter) -> None:
    """Take a parameter's memory; it stays the same object, with the same attributes."""
    users = parameter._use_count()  # type: ignore[attr-defined]  # noqa: SLF001 - graphs are not told otherwise
    if parameter.layout is not torch.strided or users > 1:
        return
    looks = torch.empty_like(parameter, device="meta")
    fresh = nn.Parameter(looks, requires_grad=parameter.requires_grad)
    with contextlib.suppress(RuntimeError):  # a weak reference is to it: it stays as it is
        swap(parameter, fresh)
