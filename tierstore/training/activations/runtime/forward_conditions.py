"""Whether there is anything for us in a forward that begins now."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from tierstore.errors import UsageError
from tierstore.torch_private import eager_transforms
from tierstore.training.autograd.accumulation import is_in_backward
from tierstore.training.pytorch.function_modes import are_hooks_allowed
from tierstore.training.pytorch.saved_tensor_hooks import is_checkpoints, packs_the_rest


def is_saving() -> bool:
    """Say whether what is saved for backward from now on in this thread is ours to look after.

    Not where nothing is saved, where hooks see nothing of it, and where it is recomputed anyway, or is just
    being recomputed.
    """
    if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or is_forward_mode():
        return False
    if is_in_backward() or not are_hooks_allowed():  # also in that of a reentrant checkpoint
        return False
    last = packs_the_rest()
    return last is None or not is_checkpoints(last)


def is_forward_mode() -> bool:
    """Whether derivatives may go along with a forward that begins now.

    Their formulas ask whether there is a dispatch mode, and compute in another order then.
    """
    return forward_ad._current_level >= 0  # noqa: SLF001 - of all threads; a transform's is one as well


def refuse_forward_mode() -> None:
    """Refuse derivatives that begin to go along in the midst of a forward that a mode of ours sees.

    Called for each operator.  A transform of ``torch.func`` takes the modes into account by itself.

    Raises:
        UsageError: a module has entered ``torch.autograd.forward_ad.dual_level()``.
    """
    if is_forward_mode() and eager_transforms.JVP_NESTING == 0:
        raise UsageError(
            "torch.autograd.forward_ad.dual_level() was entered in a forward whose activations are swapped "
            "or whose operators are recomputed: it would compute its derivatives in another order. Enter it "
            "around the call of the model, where nothing of that happens then, use torch.func.jvp inside, or "
            "leave this module out of swap and recompute."
        )
