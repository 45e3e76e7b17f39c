"""What ``torch.jit`` made of modules: objects of C++, which refer to parameters as long as they live."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import nn

_ParameterDict: Any = torch.ParameterDict
_ModuleDict: Any = torch.ModuleDict


def holders_in(model: nn.Module) -> Counter[torch.Tensor]:
    """Count, for each parameter, how often scripted and traced modules of ``model`` refer to it in C++."""
    left: list[Any] = [each._c for each in model.modules() if isinstance(each, torch.jit.ScriptModule)]  # noqa: SLF001
    seen: set[Any] = set()
    holders: Counter[torch.Tensor] = Counter()
    while left:
        script = left.pop()
        if script not in seen:
            seen.add(script)
            holders.update(parameter for _, parameter in _ParameterDict(script).items())
            left.extend(part for _, part in _ModuleDict(script).items())
    return holders
