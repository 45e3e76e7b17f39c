"""What FSDP knows of a parameter, while its shard lives in tiers.

FSDP reads a shard in one place: ``_sharded_param_data``, flat and padded, when it is about to be gathered.
During a run each ``FSDPParam`` wears a class in which that is asked for:

1. The bundle is leased where the model computes, by the stream that copies it into the message.  The lease
   ends when nothing refers to its bytes any more, as any other's does.
2. FSDP keeps no other reference to the bytes, and nothing is set on its objects.
"""

from __future__ import annotations

from typing import Any

import torch

from tierstore.errors import UsageError
from tierstore.torch_private import fsdp_param
from tierstore.training.bundles.placeholders import placeholder_of
from tierstore.training.bundles.tensor_slots import memory_of, own_local, set_data
from tierstore.training.faults import guard

_FSDPParam: Any = fsdp_param()


class TieredParam(_FSDPParam):  # type: ignore[misc]  # importing it for its type takes a second
    """One parameter of FSDP's whose shard lives in tiers; put on and taken off, never made."""

    @property
    def _sharded_param_data(self) -> torch.Tensor:
        """The shard, flat and padded, as FSDP gathers it.  Blocks for hardware."""
        with torch.no_grad():
            return self._padded(_shard_of(self.sharded_param))

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        """The local tensor, whose class FSDP looks at, and not at its bytes."""
        return memory_of(self.sharded_param)

    def _padded(self, shard: torch.Tensor) -> torch.Tensor:
        if shard.shape == self.padded_sharded_param_size:
            return shard.view(-1)
        padded = shard.new_zeros(self.padded_sharded_param_size)
        padded.narrow(0, 0, len(shard)).copy_(shard)
        return padded.view(-1)

    def reset_sharded_param(self) -> None:
        """Make sure that the module has the parameter that it had: there is nothing to pad anew.

        Raises:
            UsageError: it had another one.
        """
        info = self._module_info
        if getattr(info.module, info.param_name) is not self.sharded_param:
            self._setattr_on_modules(self.sharded_param)
            raise UsageError(
                f"the parameter {info.param_name!r} of a sharded module was replaced while it is offloaded, "
                "as load_state_dict(..., assign=True) does. Load without assign, or before offload(...)."
            )


def _shard_of(parameter: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a parameter, which stays where it is as long as the result is kept."""
    guarded_tensor = guard.guarded_tensor_of(parameter)
    if guarded_tensor is None or guarded_tensor.is_abroad:
        placeholder = placeholder_of(parameter)
        if placeholder is not None:
            placeholder.refuse()
        return memory_of(parameter)
    binding, bindings = guarded_tensor.binding, guarded_tensor.fault_handler.bindings
    return guarded_tensor.place.view(bindings.reach(binding))


def put_on(param: Any) -> None:  # noqa: ANN401 - FSDP's own
    """Let a parameter of FSDP's ask for its shard from now on."""
    if type(param) is not TieredParam:
        own_local(param.sharded_param)
        param.__dict__.pop("_sharded_param_data", None)
        param.__class__ = TieredParam


def take_off(param: Any) -> None:  # noqa: ANN401 - FSDP's own
    """Let it have its shard itself again; one whose bytes were released goes on to say so."""
    if type(param) is not TieredParam or placeholder_of(param.sharded_param) is not None:
        return
    local = memory_of(param.sharded_param)
    flat = param._sharded_param_data  # noqa: SLF001 - as FSDP reads it
    if local.shape != param.padded_sharded_param_size:
        set_data(local, flat.view(param.padded_sharded_param_size).narrow(0, 0, len(local)))
    param.__class__ = _FSDPParam
    param.__dict__["_sharded_param_data"] = flat
