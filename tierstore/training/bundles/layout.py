"""Where tensors lie in a bundle's bytes: exactly as they lie in memory.

1. A tensor keeps its strides, whatever they are: transposed, channels last, with gaps, expanded.  It takes
   the *span* of bytes from its first element to its last, gaps included; an empty one takes none.
2. Tensors whose spans overlap in memory are one *region*, and lie in the bundle as they lie in memory:
   what is written through one is seen through the others.
3. An address keeps its remainder by 64 bytes: kernels for vectors and matrices choose their way by it, and
   with it the last bit of what they compute.  Memory that an allocator gave begins at a multiple of it.
4. A tensor alone takes its own bytes and no more, so that it can be stored without a copy; one that begins
   between two multiples takes those from the lower one, too.
5. Of a tensor that has its bytes in another one, all of this is said of that: see `memory_of`.

Knows nothing of stores and tiers, and not which tensors travel together.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from tierstore.torch_private import negative_view
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.units import align_up

ALIGNMENT_BYTES = 64
_LARGEST_ELEMENT_BYTES = 16  # complex128

Stride = tuple[int, ...]


@dataclass(frozen=True)
class TensorLayout:
    """Where one tensor lies in a bundle, and what it looks like.

    Attributes:
        name: what messages call the tensor.
        shape: its sizes.
        dtype: its element type.
        stride: in elements.
        offset: of its first element from the start of the bundle, in elements.
        nbytes: of its span.
        is_conj: whether its values are the conjugates of what the bytes say.
        is_neg: whether they are the negatives.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    stride: Stride
    offset: int
    nbytes: int
    is_conj: bool = False
    is_neg: bool = False

    def view(self, flat: torch.Tensor, begin_bytes: int = 0) -> torch.Tensor:
        """Return the tensor as a view into flat bytes.

        Args:
            flat: one-dimensional uint8; all of its storage.
            begin_bytes: where in the bundle they begin.
        """
        return self.view_of_elements(flat.view(self.dtype), begin_bytes)

    def view_of_elements(self, elements: torch.Tensor, begin_bytes: int = 0) -> torch.Tensor:
        """Return the tensor as a view into flat bytes that are seen as elements of its type already."""
        offset = self.offset - begin_bytes // self.dtype.itemsize
        view = elements.as_strided(self.shape, self.stride, offset)
        if self.is_conj:
            view = torch.conj(view)  # sets the bit that the tensor had
        return negative_view(view) if self.is_neg else view  # as well

    @functools.cached_property
    def begin_bytes(self) -> int:
        """Where it begins in the bundle."""
        return self.offset * self.dtype.itemsize

    @functools.cached_property
    def is_expanded(self) -> bool:
        """Whether several of its elements are one in memory."""
        return any(size > 1 and not step for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def end_bytes(self) -> int:
        """Where it ends."""
        return self.begin_bytes + self.nbytes

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor looks like this: its bytes can be those of the place."""
        return self.looks == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    @functools.cached_property
    def looks(self) -> tuple[torch.dtype, torch.Size, Stride, bool, bool]:
        """All that says how its values follow from its bytes."""
        return self.dtype, self.shape, self.stride, self.is_conj, self.is_neg


class OverlapRegion(NamedTuple):
    """Places whose bytes overlap, or one alone.

    Attributes:
        begin_bytes: where it begins in the bundle: a multiple of 64.
        end_bytes: where it ends.
        members: the numbers of its places.
    """

    begin_bytes: int
    end_bytes: int
    members: tuple[int, ...]


def span_bytes(shape: Sequence[int], stride: Stride, itemsize: int) -> int:
    """Return the bytes from a tensor's first element to its last."""
    if 0 in shape:
        return 0
    return itemsize * (1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)))


def span_of(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's span."""
    tensor = memory_of(tensor)
    return span_bytes(tensor.shape, tensor.stride(), tensor.element_size())


# ---------------------------------------------------------------------- laying out


def lay_out(named: Iterable[tuple[str, torch.Tensor]]) -> tuple[tuple[TensorLayout, ...], int]:
    """Place tensors one after another; return the places and the bytes of the bundle."""
    pairs = list(named)
    tensors = [tensor for _, tensor in pairs]
    places: dict[int, TensorLayout] = {}
    end_bytes = 0
    for members in overlapping(tensors):
        region_bytes = align_up(end_bytes, ALIGNMENT_BYTES)
        base_bytes = _align_down(min(_begin_bytes(tensors[number]) for number in members))
        for number in members:
            tensor = tensors[number]
            begin_bytes = region_bytes + _begin_bytes(tensor) - base_bytes
            places[number] = place_of(pairs[number][0], tensor, begin_bytes)
            end_bytes = max(end_bytes, begin_bytes + span_of(tensor))
    found = tuple(places[number] for number in range(len(pairs)))
    return found, end_bytes if len(found) == 1 else align_up(end_bytes, ALIGNMENT_BYTES)


def place_of(name: str, tensor: torch.Tensor, begin_bytes: int = 0) -> TensorLayout:
    """Return the place of a tensor that begins at a byte of a bundle."""
    tensor = _as_it_lies(tensor)
    return TensorLayout(
        name,
        tensor.shape,
        tensor.dtype,
        tensor.stride(),
        begin_bytes // tensor.element_size(),
        span_of(tensor),
        tensor.is_conj(),
        tensor.is_neg(),
    )


def _align_down(nbytes: int) -> int:
    return nbytes - nbytes % ALIGNMENT_BYTES


LOOKS = "_tierstore_looks"
"""The attribute of a class whose tensors have no bytes: how its tensor lies, on the meta device."""


def _as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the bytes, or what says how it would lie if it had them."""
    looks: torch.Tensor | None = getattr(type(tensor), LOOKS, None)
    return memory_of(tensor) if looks is None else looks


def _begin_bytes(tensor: torch.Tensor) -> int:
    """Return where a tensor's memory begins; one without memory has the start of its storage at 0."""
    tensor = _as_it_lies(tensor)
    if tensor.is_meta:
        return int(tensor.storage_offset()) * tensor.element_size()
    return tensor.data_ptr()


def _space(tensor: torch.Tensor) -> object:
    """Return what an address of a tensor is an address in."""
    tensor = _as_it_lies(tensor)
    return tensor.untyped_storage()._cdata if tensor.is_meta else tensor.device  # noqa: SLF001 - it has no address


def overlapping(tensors: Sequence[torch.Tensor]) -> list[tuple[int, ...]]:
    """Part tensors into those whose memory overlaps; return their numbers, in the order of the first ones."""
    if len(tensors) == 1:
        return [(0,)]

    def range_of(tensor: torch.Tensor) -> tuple[object, int, int]:
        begin_bytes = _begin_bytes(tensor)
        return _space(tensor), begin_bytes, begin_bytes + span_of(tensor)

    return _overlapping([range_of(tensor) for tensor in tensors])


def regions_of(places: Sequence[TensorLayout]) -> list[OverlapRegion]:
    """Return the regions of a bundle, in the order of their first places."""
    parts = _overlapping([(None, place.begin_bytes, place.end_bytes) for place in places])
    return [_region(places, members) for members in parts]


def _region(places: Sequence[TensorLayout], members: tuple[int, ...]) -> OverlapRegion:
    begin_bytes = _align_down(min(places[number].begin_bytes for number in members))
    end_bytes = max(places[number].end_bytes for number in members)
    if len(members) > 1:  # of any element types, and of whole ones each
        end_bytes = align_up(end_bytes, _LARGEST_ELEMENT_BYTES)
    return OverlapRegion(begin_bytes, end_bytes, members)


def _overlapping(ranges: Sequence[tuple[object, int, int]]) -> list[tuple[int, ...]]:
    """Part ranges (space, begin, end) into those that overlap, directly or through others."""
    spaces: dict[object, list[int]] = {}
    for number, (space, _, _) in enumerate(ranges):
        spaces.setdefault(space, []).append(number)
    parts: list[list[int]] = []
    for numbers in spaces.values():
        reached = -1
        current: list[int] = []
        for number in sorted(numbers, key=lambda each: ranges[each][1:]):
            _, begin, end = ranges[number]
            if begin == end:
                parts.append([number])
                continue
            if begin >= reached:
                current = []
                parts.append(current)
            current.append(number)
            reached = max(reached, end)
    return sorted(tuple(sorted(part)) for part in parts)


# ---------------------------------------------------------------------- bytes


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's span, where they are."""
    tensor = memory_of(tensor)
    begin_bytes = int(tensor.storage_offset()) * tensor.element_size()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), begin_bytes, (span_of(tensor),), (1,))


def fill(target: torch.Tensor, values: torch.Tensor) -> None:
    """Give a tensor of any layout its values; where elements share memory, one of them."""
    for dim, (size, step) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if step == 0 and size > 1:
            target, values = target.narrow(dim, 0, 1), values.narrow(dim, 0, 1)
    target.copy_(values)


def flat_bytes(tensor: torch.Tensor, place: TensorLayout, nbytes: int) -> torch.Tensor:
    """Return the bytes of a bundle of one tensor: those that it has where they are right."""
    tensor = memory_of(tensor).detach()
    if nbytes == place.nbytes and place.is_of(tensor):
        return raw_bytes(tensor)
    flat = torch.empty(nbytes, dtype=torch.uint8, device=tensor.device)
    fill(place.view(flat), tensor)
    return flat


def pack(flat: torch.Tensor, places: Sequence[TensorLayout], tensors: Sequence[torch.Tensor]) -> None:
    """Bring tensors to their places in the flat bytes of a bundle."""
    for place, tensor in zip(places, tensors, strict=True):
        values = memory_of(tensor).detach()
        if place.is_of(values):
            flat[place.begin_bytes : place.end_bytes].copy_(raw_bytes(values))
        else:
            fill(place.view(flat), values)


def unpack(
    flat: torch.Tensor,
    places: Sequence[TensorLayout],
    own: Callable[[torch.Tensor, OverlapRegion], tuple[torch.Tensor, int]],
) -> list[torch.Tensor]:
    """Return the tensors of a bundle in memory of their own, one piece a region.

    Args:
        flat: the bundle's bytes.
        places: where each tensor lies in it.
        own: returns the memory that a region's bytes are to be in, as bytes, and the byte of the bundle that
            its first one is, given the bytes and the region.
    """
    found: dict[int, torch.Tensor] = {}
    for region in regions_of(places):
        memory, begin_bytes = own(flat[region.begin_bytes : region.end_bytes], region)
        for number in region.members:
            found[number] = places[number].view(memory, begin_bytes)
    return [found[number] for number in range(len(places))]
