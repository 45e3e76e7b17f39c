"""What stands in the place of bytes that are not there: it tells its looks, and where the bytes are.

1. Shape, type, strides, device, hooks and the gradient are what they were.  Whatever needs bytes raises
   ``StoreClosed``, which says where they lie, or why they are gone.
2. It is that until it gets bytes: ``p.data = values``, ``p.set_(...)``, ``p.copy_(values)``, and so
   ``model.load_state_dict(...)``.  Then it is what it was before.
3. What is detached from one is another: ``model.state_dict()`` can be made and looked at.  Copies and pickles
   need the bytes.
4. It takes no memory to speak of.  Tensors that shared memory know it: see `looks_of`.

Knows nothing of stores and bundles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tierstore.errors import StoreClosed
from tierstore.training.bundles.binding import natively
from tierstore.training.bundles.layout import LOOKS, TensorLayout, regions_of
from tierstore.training.bundles.tensor_slots import set_data
from tierstore.training.bundles.tensor_uses import LAYOUT, PASSING, Function

_Tensor: Any = torch.Tensor  # its properties, seen as the descriptors that they are
_GRADIENT = {_Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.grad.__delete__}
_LOOKS = PASSING | _GRADIENT | {torch.Tensor.__len__}
_FORM = LAYOUT | {torch.Tensor.is_conj, torch.Tensor.is_neg}
_set: Function = torch.Tensor.set_

_OWN = "_tierstore_placeholder"  # the attribute of the class that says that it is one


def looks_of(places: Sequence[TensorLayout]) -> list[torch.Tensor]:
    """Return what tensors of a bundle look like, on the meta device; what shared memory shares it there."""
    found: dict[int, torch.Tensor] = {}
    for region in regions_of(places):
        nbytes = region.end_bytes - region.begin_bytes
        flat = torch.empty(nbytes, dtype=torch.uint8, device="meta")
        for number in region.members:
            found[number] = places[number].view(flat, region.begin_bytes)
    return [found[number] for number in range(len(places))]


def placeholder_of(tensor: torch.Tensor) -> Placeholder | None:
    """Return what is known of a tensor that has no bytes since its run was left; ``None``: it has them."""
    found: Placeholder | None = getattr(type(tensor), _OWN, None)
    return found


def has_no_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor is on the meta device, or has no bytes since its run was left."""
    return tensor.is_meta or placeholder_of(tensor) is not None


def origin_of(tensor: torch.Tensor) -> torch.device:
    """Return where a tensor goes when it is brought back: where it is, or was before its run."""
    own = placeholder_of(tensor)
    return tensor.device if own is None else own.origin


class Placeholder:
    """What is known of one.

    Args:
        kind: its class while it has bytes.
        name: what messages call it.
        text: where its bytes are, or why they are gone, and what to do; as a whole message.
        looks: see `looks_of`.
        origin: where it was before its run.
    """

    __slots__ = ("kind", "looks", "name", "origin", "text")

    def __init__(self, kind: type, name: str, text: str, looks: torch.Tensor, origin: torch.device) -> None:
        self.kind = kind
        self.name = name
        self.text = text
        self.looks = looks
        self.origin = origin

    def refuse(self, *_: object, **__: object) -> object:
        """Raise: bytes are needed.

        Raises:
            StoreClosed: always.
        """
        raise StoreClosed(self.text, key=self.name)

    def put_on(self, tensor: torch.Tensor) -> None:
        """Let a tensor that has no bytes be this."""

        def set_(tensor: torch.Tensor, *source: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - PyTorch's
            return self._set(tensor, *source, **named)

        members = {
            "__doc__": self.text,
            "__module__": __name__,
            "__torch_function__": classmethod(self._see),
            "__repr__": lambda _: f"<{self.text}>",
            "__deepcopy__": self.refuse,
            "__reduce_ex__": self.refuse,
            "as_subclass": self.refuse,
            "data": property(self.refuse, self._point),
            "set_": set_,
            _OWN: self,
            LOOKS: self.looks,
        }
        tensor.__class__ = type(self.kind)(f"Placeholder{self.kind.__name__}", (self.kind,), members)

    def take_off(self, tensor: torch.Tensor) -> None:
        """Let a tensor have the class again that it has with bytes; what it shows are none."""
        tensor.__class__ = self.kind

    def _see(
        self,
        cls: type,
        func: Callable[..., object],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        del cls, types
        kwargs = kwargs or {}
        if func in _LOOKS:
            with natively():
                return func(*args, **kwargs)
        if func in _FORM:
            return func(self.looks, *args[1:], **kwargs)
        if func is torch.Tensor.detach:
            return self._detach(*args)
        if func is torch.Tensor.copy_ and type(args[0]).__dict__.get(_OWN) is self:
            return self._fill(*args, **kwargs)
        return self.refuse()

    def _detach(self, tensor: torch.Tensor) -> torch.Tensor:
        with natively():
            alias = tensor.detach()
        Placeholder(torch.Tensor, self.name, self.text, self.looks, self.origin).put_on(alias)
        return alias

    def _fill(self, tensor: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401 - as copy_
        if placeholder_of(values) is not None:
            self.refuse()
        with natively(), torch.no_grad():
            fresh = torch.empty_strided(
                self.looks.shape, self.looks.stride(), dtype=tensor.dtype, device=tensor.device
            )
            fresh.copy_(values, *args, **kwargs)
        self._point(tensor, fresh)
        return tensor

    def _point(self, tensor: torch.Tensor, value: torch.Tensor) -> None:
        with natively():
            set_data(tensor, value)
        tensor.__class__ = self.kind

    def _set(self, tensor: torch.Tensor, *source: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - as set_
        with natively():
            _set(tensor, *source, **named)
        tensor.__class__ = self.kind
        return tensor
