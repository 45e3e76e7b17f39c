"""What the parameters and buffers of a model are called, by the tensors themselves."""

from __future__ import annotations

import torch
from torch import nn


def all_names(model: nn.Module) -> dict[nn.Parameter, list[str]]:
    """Return every name of every parameter, the first one first."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def buffer_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return every name of every persistent buffer, the first one first."""
    names: dict[torch.Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:  # noqa: SLF001 - there is no other way to ask
                names.setdefault(buffer, []).append(f"{path}.{name}" if path else name)
    return names


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that a state dict holds, each once a module, by name."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        known: set[torch.Tensor] = set()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            is_kept = name not in module._non_persistent_buffers_set  # noqa: SLF001 - there is no other way to ask
            if is_kept and buffer not in known:
                known.add(buffer)
                found[f"{path}.{name}" if path else name] = buffer
    return found
