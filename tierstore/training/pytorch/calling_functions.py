"""Which function of PyTorch's asks: some want what no alias can be, and say so in no other way.

Knows nothing of tensors.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

Function = Callable[..., Any]


def is_for_a_parameter() -> bool:
    """Whether ``nn.Parameter(p)`` asks for ``p.detach()``: it wants an alias that has the class of ``p``."""
    return is_asked_by(torch.nn.Parameter.__new__)


def is_asked_by(function: Function) -> bool:
    """Whether what is being seen is a use in a function of PyTorch's that is in Python."""
    code = inspect.unwrap(function).__code__
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no other way to know
    for _ in range(5):
        if frame is None or frame.f_code is code:
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code
