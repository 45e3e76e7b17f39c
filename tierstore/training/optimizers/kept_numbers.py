"""Numbers in state dicts that somebody keeps: they follow the optimizer's, as the tensors beside them do.

In plain PyTorch a parameter's entries in ``optimizer.state_dict()`` are the optimizer's own dict. Where
tensors of it are in the store, they are a dict of their own, whose tensors follow the state; what is no
tensor, such as `torch.optim.SparseAdam`'s ``step``, follows after each step here, as long as somebody has
the dict and the tensors in it follow: after a run those do that are in host memory. Else a state dict
that was kept would name another step than its moments are of.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from tierstore.training.faults import guard

_OURS = 2  # a local variable and the argument of `sys.getrefcount`


def _follows(own: Mapping[str, Any], kept: Mapping[str, Any]) -> bool:
    """Whether the tensors in a state dict are still one with the optimizer's."""
    for name, value in own.items():
        entry = kept.get(name)
        if isinstance(value, torch.Tensor) and isinstance(entry, torch.Tensor) and entry is not value:
            return guard.guarded_tensor_of(value) is not None or value.data_ptr() == entry.data_ptr()
    return True


class KeptNumbers:
    """What follows in the state dicts of one optimizer."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Mapping[str, Any], dict[str, Any]]] = []
        self._hook: RemovableHandle | None = None

    def follow(self, optimizer: torch.optim.Optimizer, own: Mapping[str, Any], kept: dict[str, Any]) -> None:
        """Let what is no tensor in a dict follow the optimizer's own, if anything is."""
        if any(not isinstance(value, torch.Tensor) for value in own.values()):
            self._pairs.append((own, kept))
            self._hook = self._hook or optimizer.register_step_post_hook(lambda *_: self.refresh())

    def refresh(self) -> None:
        """Bring what the optimizer has now to the dicts that somebody has still; let the others go."""
        pairs, self._pairs = self._pairs, []
        while pairs:
            own, kept = pairs.pop()
            if sys.getrefcount(kept) > _OURS and _follows(own, kept):
                kept.update({name: v for name, v in own.items() if not isinstance(v, torch.Tensor)})
                self._pairs.append((own, kept))
        if not self._pairs and self._hook is not None:
            self._hook.remove()
            self._hook = None
