"""Checkpoints of modules that an interrupt has left open.

With ``torch.distributed._composable.checkpoint_activation`` hooks of a module begin and end its checkpoint: a
generator that has hooks for saved tensors in force while it waits.  Where a ``KeyboardInterrupt`` ends the
forward, nobody ends it.  PyTorch lets it go when the module is called again, and it takes away whatever hooks
are in force last: in plain PyTorch its own, and beside ours those that we have brought into force since.  Its
own would stay then, and give backward what they have kept of the interrupted call.
"""

from __future__ import annotations

from types import GeneratorType
from typing import Any

from torch import nn

from tierstore.torch_private import COMPOSABLE_STATE, CheckpointFrame, composable_checkpoint
from tierstore.training.pytorch.saved_tensor_hooks import Hook, top_hooks


def end_left_checkpoints(beginning: nn.Module) -> None:
    """End checkpoints of a module whose call begins, and of those inside, that are in force in this thread.

    Called before anything of ours comes into force for the call.
    """
    while (top := top_hooks()) is not None and (frame := _frame_of_hook(top[0])) is not None:
        left = next((each for each in _begun_in(beginning) if _frame_of(each) is frame), None)
        if left is None:
            return
        left.close()  # its hooks are the last ones, as in plain PyTorch


def _frame_of_hook(hook: Hook) -> CheckpointFrame | None:
    """Return what a checkpoint's hook writes to; ``None``: it is none of a checkpoint."""
    closure: Any = getattr(hook, "__closure__", None) or ()
    return next(
        (cell.cell_contents for cell in closure if isinstance(cell.cell_contents, CheckpointFrame)), None
    )


def _begun_in(model: nn.Module) -> list[GeneratorType[None]]:
    """Return the checkpoints that hooks of modules have begun and not ended."""
    composed = [module for module in model.modules() if COMPOSABLE_STATE in module.__dict__]
    states = [composable_checkpoint.state(module) for module in composed]
    begun = [getattr(state, "_ac_generator", None) for state in states]
    return [each for each in begun if each is not None]


def _frame_of(left: GeneratorType[None]) -> object:
    return None if left.gi_frame is None else left.gi_frame.f_locals.get("new_frame")
