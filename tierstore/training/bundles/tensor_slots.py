"""How one tensor of a bundle is given its bytes, and how they are taken back.

A slot is a kind of tensor, not a tensor: it refers to none, so that references to tensors can be counted.
Another kind, such as a tensor that has its bytes in another one, is another class and a line in `slot_of`.

1. A *plain* tensor has its bytes itself.
2. A ``DTensor`` has them in its local tensor, which is this process's part.  Its own sizes and strides are
   those of the whole; where bytes are meant, `memory_of` it stands in its place.

Everything is called natively (`tierstore.training.bundles.binding.natively`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from tierstore.torch_private import version_of

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
set_data: Callable[[torch.Tensor, torch.Tensor], None] = _Tensor.data.__set__
"""Points a tensor at the memory of another one; autograd's version counter stays."""

LOCAL = "_local_tensor"
"""The member of a ``DTensor`` that has its bytes."""


class TensorSlot(Protocol):
    """Where a kind of tensor has its bytes."""

    def attach(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """Give a tensor its bytes."""
        ...

    def detach(self, tensor: torch.Tensor, poison: torch.Tensor) -> None:
        """Take them back: the tensor looks as before, and holds nothing."""
        ...

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor whose memory it is that `attach` and `detach` exchange."""
        ...

    def writes(self, tensor: torch.Tensor) -> int:
        """Return how often a tensor was written to, as far as autograd knows."""
        ...


class PlainSlot:
    """A tensor that has its bytes itself."""

    def attach(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """See `TensorSlot.attach`."""
        set_data(tensor, view)

    def detach(self, tensor: torch.Tensor, poison: torch.Tensor) -> None:
        """See `TensorSlot.detach`."""
        set_data(tensor, poison)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TensorSlot.local`."""
        return tensor

    def writes(self, tensor: torch.Tensor) -> int:
        """See `TensorSlot.writes`."""
        return version_of(tensor)


class LocalTensorSlot:
    """A tensor that has its bytes in its local one, which stays the same object."""

    def attach(self, tensor: torch.Tensor, view: torch.Tensor) -> None:
        """See `TensorSlot.attach`."""
        set_data(self.local(tensor), view)

    def detach(self, tensor: torch.Tensor, poison: torch.Tensor) -> None:
        """See `TensorSlot.detach`."""
        set_data(self.local(tensor), poison)

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `TensorSlot.local`."""
        return _member_of_sharded()(tensor)  # past whatever a guard's class makes of it

    def writes(self, tensor: torch.Tensor) -> int:
        """See `TensorSlot.writes`."""
        return version_of(tensor) + version_of(self.local(tensor))


_PLAIN = PlainSlot()
_LOCAL = LocalTensorSlot()


def sharded_kind() -> type[torch.Tensor] | None:
    """Return ``DTensor``; ``None``: nobody has imported it, which takes a second, so there is none."""
    return getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)


@functools.cache
def _member_of_sharded() -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what reads the local tensor of a ``DTensor``: there is one."""
    read: Callable[[torch.Tensor], torch.Tensor] = vars(sharded_kind())[LOCAL].__get__
    return read


def is_sharded_kind(kind: type) -> bool:
    """Whether tensors of a class are a ``DTensor``."""
    return _is_sharded(kind)


def _seen_to_be_sharded(kind: Any) -> bool:  # noqa: ANN401 - a class
    sharded = sharded_kind()
    return sharded is not None and issubclass(kind, sharded)


_is_sharded: Callable[[Any], bool] = functools.lru_cache(maxsize=256)(_seen_to_be_sharded)
"""What a class is does not change, and this is asked of each parameter many times in a step."""


def slot_of(kind: type[torch.Tensor]) -> TensorSlot:
    """Return the slot of tensors of a class, as it is with or without a guard."""
    return _LOCAL if is_sharded_kind(kind) else _PLAIN


def memory_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has a tensor's bytes: itself, or the part of it that this process has."""
    return slot_of(type(tensor)).local(tensor)


Part = tuple[tuple[int, int], ...]
"""A part of a tensor: first and end of it in each dimension."""


def part_here(tensor: torch.Tensor) -> Part | None:
    """Return which part of a tensor this process has.

    Args:
        tensor: any; a ``DTensor`` as ``fully_shard`` makes it.  Where it splits a dimension that tensor
            parallel has split before, its placement has a ``split_factor``.  All parts but the last ones are
            of one size.

    Returns:
        ``None`` for a plain tensor, which is here as a whole.
    """
    local = memory_of(tensor)
    if local is tensor:
        return None
    sharded: Any = tensor
    part = [(0, size) for size in tensor.shape]
    mesh = sharded.device_mesh
    numbers = mesh.get_coordinate()
    placements = list(enumerate(sharded.placements))
    for mesh_dim, placement in sorted(placements, key=lambda each: hasattr(each[1], "split_factor")):
        if placement.is_replicate():
            continue
        begin, end = part[placement.dim]
        chunk = -(-(end - begin) // mesh.size(mesh_dim))
        first = min(end, begin + numbers[mesh_dim] * chunk)
        part[placement.dim] = first, min(end, first + chunk)
    if local.numel() == 0:  # FSDP makes more of its sizes 0 than are
        return tuple((begin, begin + size) for (begin, _), size in zip(part, local.shape, strict=True))
    return tuple(part)


def sharded_like(like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has its bytes in a local one, for a tensor of another one's sizes and placement.

    Args:
        like: a ``DTensor``, as it is without a guard or with one.
        local: of the size of its local one.
    """
    return lying(local, how_it_lies(like))


class Lies(NamedTuple):
    """How a ``DTensor`` lies over processes, without its bytes."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def how_it_lies(tensor: torch.Tensor) -> Lies:
    """Return how a ``DTensor`` lies."""
    given: Any = tensor
    return Lies(given.device_mesh, tuple(given.placements), tensor.shape, tensor.stride())


def lying(local: torch.Tensor, how: Lies) -> torch.Tensor:
    """Return a ``DTensor`` that has its bytes in a local tensor, which is its own from then on."""
    kind: Any = sharded_kind()
    made: torch.Tensor = kind.from_local(
        local, how.mesh, how.placements, run_check=False, shape=how.shape, stride=how.stride
    )
    own_local(made)
    return made


def lies_as(tensor: torch.Tensor, like: torch.Tensor) -> bool:
    """Whether a tensor is a ``DTensor`` of which each process has the same part as of another one."""
    if not (is_sharded_kind(type(tensor)) and is_sharded_kind(type(like))):
        return False
    mine: Any = tensor
    theirs: Any = like
    return (
        tuple(mine.placements) == tuple(theirs.placements)
        and mine.device_mesh == theirs.device_mesh
        and tensor.shape == like.shape
        and memory_of(tensor).shape == memory_of(like).shape
    )


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors be each other, but for what users have hung on them: attributes and hooks stay."""
    mine, theirs = vars(tensor), vars(other)
    torch.utils.swap_tensors(tensor, other)
    tensor.__dict__, other.__dict__ = mine, theirs
    for name in _HOOKS:
        # Each is kept by the Python object, but it is the other one's gradient that asks for it now.
        setattr(tensor, name, getattr(tensor, name))


_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def own_local(tensor: torch.Tensor) -> None:
    """Let the local tensor of one be no view: the base of a view would keep the bytes."""
    local = memory_of(tensor)
    own = torch.empty(0, dtype=local.dtype, device=local.device)
    set_data(own, local)
    setattr(tensor, LOCAL, own)
