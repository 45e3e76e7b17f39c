"""What is everybody's, and a traced program may change: put back as it was."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def put_back() -> Iterator[None]:
    """Put generators of random numbers, the default dtype and device and the grad mode back at the end."""
    states = random.getstate()
    numpys = sys.modules.get("numpy")
    numpy_state = None if numpys is None else numpys.random.get_state()
    on_cpu = torch.get_rng_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    dtype, device = torch.get_default_dtype(), torch.get_default_device()
    is_grad_on = torch.is_grad_enabled()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        yield
    finally:
        torch.set_grad_enabled(is_grad_on)
        torch.set_default_dtype(dtype)
        if torch.get_default_device() != device:
            torch.set_default_device(None if device.type == "cpu" else device)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        if on_cuda is not None:
            torch.cuda.set_rng_state_all(on_cuda)
        torch.set_rng_state(on_cpu)
        if numpys is not None:
            numpys.random.set_state(numpy_state)
        random.setstate(states)
