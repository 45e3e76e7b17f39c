"""The state of PyTorch's random number generators, so that dropout goes on where it was.

The CPU's generator, and that of the device that is trained on.  Python's and NumPy's are the program's
own business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from tierstore.training.formats.json_codec import Sources, encode

_CPU = "cpu"


def save(device: torch.device, sources: Sources) -> dict[str, object]:
    """Return the state of the generators as JSON; their bytes are added to ``sources``."""
    states = {_CPU: torch.get_rng_state()}
    if device.type != _CPU:
        states[device.type] = _module(device).get_rng_state(*_which(device))
    return {kind: encode(state, f"rng/{kind}", sources) for kind, state in states.items()}


def restore(saved: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Set the generators to what was saved: the device's, if that one was of the same type."""
    torch.set_rng_state(tensors[saved[_CPU]["tensor"]])
    if device.type != _CPU and device.type in saved:
        _module(device).set_rng_state(tensors[saved[device.type]["tensor"]], *_which(device))


def _module(device: torch.device) -> Any:  # noqa: ANN401 - each accelerator has one of its own
    return torch.get_device_module(device)


def _which(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # which has one generator, and takes no argument
