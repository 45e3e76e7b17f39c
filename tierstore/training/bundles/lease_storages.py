"""How a bundle's leased bytes are shown: as memory that each tensor has to itself, as in plain PyTorch.

Tensors of a bundle lie side by side in one storage.  Whoever asks a parameter for its storage, or for where
it begins there (``p.storage_offset()``, ``p.as_strided(size, stride, 0)``), and whoever pickles or copies its
storage, would see the neighbours.  So each region of a bundle is a storage of its own, which begins where the
first of its tensors does: a slice of the leased one, which keeps the whole of it alive.

Knows nothing of leases.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from tierstore.torch_private import TensorBase, negative_view
from tierstore.training.bundles.layout import OverlapRegion, TensorLayout

# As C++ has it: none of these is a guarded parameter, which `torch.Tensor.set_` would look for.
_set = TensorBase.set_


class Pieces(NamedTuple):
    """What of a bundle's bytes is a storage of its own.

    Attributes:
        bounds: of each, in the order of the bytes: where it begins and ends in the bundle.
        owners: of each tensor: which it lies in.
    """

    bounds: tuple[tuple[int, int], ...]
    owners: tuple[int, ...]

    def offsets(self, places: Sequence[TensorLayout]) -> list[int]:
        """Return where each tensor begins in its storage, in elements."""
        return [
            (place.begin_bytes - self.bounds[owner][0]) // place.dtype.itemsize
            for place, owner in zip(places, self.owners, strict=True)
        ]


def pieces_of(places: Sequence[TensorLayout], regions: Sequence[OverlapRegion]) -> Pieces:
    """Return what of a bundle's bytes is a storage of its own.

    Args:
        places: of its tensors.
        regions: of these, in the order of the bytes.
    """
    owners = {number: piece for piece, region in enumerate(regions) for number in region.members}
    bounds = [_bounds([places[number] for number in region.members], region) for region in regions]
    return Pieces(tuple(bounds), tuple(owners[number] for number in range(len(places))))


def _bounds(members: Sequence[TensorLayout], region: OverlapRegion) -> tuple[int, int]:
    begin = min(place.begin_bytes for place in members)
    if any((place.begin_bytes - begin) % place.dtype.itemsize for place in members):
        begin = region.begin_bytes  # of several types: a tensor begins at a multiple of its element
    return begin, max(place.end_bytes for place in members)


class LeaseStorages:
    """The storages of one lease, and its tensors in them.

    Args:
        flat: the leased bytes: one-dimensional uint8, all of its storage.
        places: of the tensors.
        pieces: what is a storage of its own.
        offsets: of each tensor in its storage, in elements.

    Attributes:
        all: the leased one, in which only the store's own tensors are, and its slices.
        keys: what each is known by.
        views: each tensor.
    """

    __slots__ = ("_device", "_pieces", "_slices", "all", "keys", "views")

    def __init__(
        self, flat: torch.Tensor, places: Sequence[TensorLayout], pieces: Pieces, offsets: Sequence[int]
    ) -> None:
        whole = flat.untyped_storage()
        self._device = flat.device
        self._pieces = pieces
        # Also where one slice is all of it: its tensors are told from the store's own by their storage.
        self._slices = [whole[begin:end] for begin, end in pieces.bounds]
        self.all: tuple[torch.UntypedStorage, ...] = (whole, *self._slices)
        self.keys = tuple(storage._cdata for storage in self.all)  # noqa: SLF001
        self.views = tuple(map(self._view, places, pieces.owners, offsets))

    def _view(self, place: TensorLayout, piece: int, offset: int) -> torch.Tensor:
        return self._in_piece(
            piece, place.dtype, place.shape, place.stride, offset, place.is_conj, place.is_neg
        )

    def tell_of_slices(self, note: Callable[[torch.UntypedStorage, str], None], tier: str) -> None:
        """Tell of each storage that is not the leased one, and of the tier that it is leased in."""
        for storage in self.all[1:]:
            note(storage, tier)

    def alias(
        self,
        dtype: torch.dtype,
        shape: torch.Size,
        stride: Sequence[int],
        offset: int,
        *,
        is_conj: bool = False,
        is_neg: bool = False,
    ) -> torch.Tensor:
        """Return a view of the bytes, in the storage of the tensors that have them.

        Args:
            dtype: its element type.
            shape: its sizes.
            stride: in elements.
            offset: of its first element from the start of the bundle, in elements.
            is_conj: whether its values are the conjugates of what the bytes say.
            is_neg: whether they are the negatives.
        """
        bounds = self._pieces.bounds
        begin_bytes = offset * dtype.itemsize
        piece = max(bisect.bisect_right(bounds, begin_bytes, key=lambda each: each[0]) - 1, 0)
        offset = (begin_bytes - bounds[piece][0]) // dtype.itemsize
        return self._in_piece(piece, dtype, shape, stride, offset, is_conj, is_neg)

    def _in_piece(
        self,
        piece: int,
        dtype: torch.dtype,
        shape: torch.Size,
        stride: Sequence[int],
        offset: int,
        is_conj: bool,
        is_neg: bool,
    ) -> torch.Tensor:
        view = torch.empty(0, dtype=dtype, device=self._device)
        _set(view, self._slices[piece], offset, shape, tuple(stride))
        if is_conj:
            view = torch.conj(view)  # sets the bit that the tensor had
        return negative_view(view) if is_neg else view  # as well
