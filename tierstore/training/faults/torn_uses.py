"""What a parameter of a module on the host is used with on the device, outside of that module: told by name.

Values cross at calls of modules only.  Who computes with such a parameter himself brings it himself.
"""

from __future__ import annotations

from collections.abc import Sequence

from tierstore.errors import UsageError
from tierstore.training.faults.guarded_tensors import GuardedTensor


def explained(
    error: RuntimeError, guarded_tensors: Sequence[GuardedTensor], name: str
) -> RuntimeError | UsageError:
    """Return what to raise for an error of PyTorch's: itself, unless values of both sides met.

    Args:
        error: of PyTorch.
        guarded_tensors: that were used.
        name: of the function.
    """
    on_host = [each for each in guarded_tensors if each.binding.confined_to is not None]
    if not on_host or "same device" not in str(error):
        return error
    names = ", ".join(dict.fromkeys(repr(each.place.name) for each in on_host))
    return UsageError(
        f"{name} is given {names} of a module that computes on the host, together with values of the device, "
        "outside of that module's forward: values cross where a module is called, and nowhere else. Call the "
        "module, let a module inside of it do this, or bring what it is given with Tensor.to."
    )
