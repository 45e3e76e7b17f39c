"""Which tensors abroad may come home, and how their bytes get there.

1. A tensor comes home when nobody but tensors of bundles refers to its memory, and those that overlap it
   come home with it, to the same bundle.
2. Where it looks as its place says, and shares that with no other, its bytes are copied there.  Else the
   bundle is laid out anew: with other shapes, strides and types, and with what is shared now.
3. Until then it stays where it is, in memory that somebody has anyway.

Knows nothing of stores: whoever calls leases and puts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from tierstore.training.bundles.binding import (
    REFERENCES_OF_ONE,
    Binding,
    Where,
    natively,
    references,
    values_of,
)
from tierstore.training.bundles.layout import (
    ALIGNMENT_BYTES,
    TensorLayout,
    lay_out,
    overlapping,
    pack,
    raw_bytes,
)
from tierstore.training.bundles.poisons import Poisons
from tierstore.training.bundles.tensor_slots import memory_of


class Abroad(NamedTuple):
    """One tensor that is abroad."""

    binding: Binding
    number: int

    @property
    def tensor(self) -> torch.Tensor:
        """The tensor that has its bytes."""
        return memory_of(self.binding.tensors[self.number])


def that_may_return(bindings: Iterable[Binding], *, from_anywhere: bool = False) -> dict[Binding, list[int]]:
    """Return the numbers of the tensors that may come home, by binding.

    Args:
        bindings: of the tensors.
        from_anywhere: whether their memory may be on another device than their bundle's.
    """
    of_storage: defaultdict[int, list[Abroad]] = defaultdict(list)
    found: defaultdict[Binding, list[int]] = defaultdict(list)
    with natively():
        for binding in bindings:
            for number in binding.abroad:
                tensor = memory_of(binding.tensors[number])
                is_there = from_anywhere or tensor.device == binding.device
                if is_there and tensor.layout is torch.strided:
                    of_storage[tensor.untyped_storage()._cdata].append(Abroad(binding, number))  # noqa: SLF001
        for sharers in of_storage.values():
            if _has_others(sharers):
                continue
            for part in overlapping([each.tensor for each in sharers]):
                members = [sharers[number] for number in part]
                if len({each.binding for each in members}) == 1 and members[0].binding.windows == 0:
                    found[members[0].binding] += [each.number for each in members]
    return {binding: sorted(numbers) for binding, numbers in found.items()}


def _has_others(sharers: Sequence[Abroad]) -> bool:
    """Whether anything but these tensors refers to the storage of the first, which is that of all."""
    return references(sharers[0].tensor) > REFERENCES_OF_ONE + len(sharers) - 1


def fit_as_they_are(binding: Binding, numbers: Sequence[int]) -> bool:
    """Whether the bytes of some tensors can be copied to their places: each has its own, there and here.

    The remainders of the addresses are the same: kernels look at them, and with them the last bits change.
    """
    alone = {region.members[0] for region in binding.regions if len(region.members) == 1}
    with natively():
        memories = {number: memory_of(binding.tensors[number]) for number in numbers}
        return len(overlapping(list(memories.values()))) == len(numbers) and all(
            number in alone
            and binding.places[number].is_of(memory)
            and _is_aligned_as(memory, binding.places[number])
            for number, memory in memories.items()
        )


def _is_aligned_as(tensor: torch.Tensor, place: TensorLayout) -> bool:
    remainder_bytes = (tensor.data_ptr() - place.begin_bytes) % ALIGNMENT_BYTES
    return remainder_bytes == 0 or place.nbytes == 0


def copy_home(binding: Binding, numbers: Sequence[int]) -> None:
    """Copy the bytes of some tensors to their places in the leased bytes."""
    assert binding.flat is not None
    with natively(), torch.no_grad():
        for number in numbers:
            place = binding.places[number]
            binding.flat[place.begin_bytes : place.end_bytes].copy_(raw_bytes(binding.tensors[number]))
    binding.come_home(numbers)
    binding.is_dirty = True


def laid_out_anew(binding: Binding, numbers: Sequence[int]) -> tuple[tuple[TensorLayout, ...], torch.Tensor]:
    """Return new places for a bundle with some tensors come home, and its bytes, in host memory."""
    assert binding.flat is not None
    with natively(), torch.no_grad():
        views = [
            value if number in numbers or where is Where.HOME else place.view(binding.flat)
            for number, (value, place, where) in enumerate(
                zip(values_of(binding, binding.flat), binding.places, binding.where, strict=True)
            )
        ]
        places, nbytes = lay_out(
            (place.name, view) for place, view in zip(binding.places, views, strict=True)
        )
        flat = torch.empty(nbytes, dtype=torch.uint8)
        pack(flat, places, views)
    return places, flat


def lay(binding: Binding, places: Sequence[TensorLayout], nbytes: int, numbers: Sequence[int]) -> None:
    """Take in new places, at which some tensors are at home."""
    fresh = Poisons(binding.poisons[0].device)
    poisons = [
        fresh.like(place) if number in numbers else poison
        for number, (place, poison) in enumerate(zip(places, binding.poisons, strict=True))
    ]
    binding.lay(places, nbytes, poisons)
    binding.come_home(numbers)
