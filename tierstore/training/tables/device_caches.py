"""Hot rows of the tables of one run on its device: where they lie, and how they come there and back.

1. A table's cache is one key of the device tier, which is leased for writing for as long as rows are kept
   there.  It is charged as what is pinned.
2. Rows travel over the run's link, so they are counted with all else that does.
3. A cache holds nothing that a checkpoint would miss: its rows are written back before one is made, and
   before it is taken away.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Final, Protocol

import torch

from tierstore.errors import CapacityError, KeyNotFound, StoreClosed
from tierstore.leases import Lease
from tierstore.nn.table_weight import TableWeight
from tierstore.planning.homes import CPU, DEVICE
from tierstore.store import Store
from tierstore.tables import DeviceHome
from tierstore.torch_private import DisableTorchDispatch
from tierstore.training.bundles.lease_room import let_frames_go
from tierstore.training.bundles.working_sets import WorkingSet
from tierstore.training.tables.cache_wishes import CacheWish, cache_set
from tierstore.training.tables.kept_tables import cache_key
from tierstore.units import format_bytes

log = logging.getLogger("tierstore")

_LEAST_BYTES: Final = 4096
"""What has no room over the link in so small parts has none."""


class SideLink(Protocol):
    """The way between a run's device and the host: `tierstore.training.modules.link.Link`."""

    def carry(self, tensor: torch.Tensor, side: str) -> torch.Tensor:
        """Return a copy on a side, ``"cpu"`` or ``"device"``."""
        ...


class _OverLink:
    """Carries rows over the link of a run; see `tierstore.tables.RowCarrier`.

    As a whole, or in as large parts as the tiers have room for: what a batch misses may be more than host
    memory, or the device, has in one piece beside everything else.
    """

    def __init__(self, link: SideLink, device: torch.device) -> None:
        self._link = link
        self._device = device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `tierstore.tables.RowCarrier.to_device`."""
        return self._carry(tensor, DEVICE, self._device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `tierstore.tables.RowCarrier.to_host`."""
        return self._carry(tensor, CPU, torch.device(CPU))

    def _carry(self, tensor: torch.Tensor, side: str, device: torch.device) -> torch.Tensor:
        try:
            return self._link.carry(tensor, side)
        except CapacityError as error:
            if tensor.nbytes <= _LEAST_BYTES:
                raise
            let_frames_go(error)
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
        flat, into = tensor.view(-1), made.view(-1)
        begin, step = 0, flat.numel() // 2
        while begin < flat.numel():
            part = slice(begin, begin + step)
            try:
                into[part] = self._link.carry(flat[part], side)
            except CapacityError as error:
                if step * flat.itemsize <= _LEAST_BYTES:
                    raise
                let_frames_go(error)
                step //= 2
            else:
                begin += step
        return made

    def gradient_to_device(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return a gradient of rows on the device, as it was before a backward pass goes on."""
        if not gradient.is_sparse:
            return self.to_device(gradient)
        index, values = gradient._indices(), gradient._values()  # noqa: SLF001 - repeats stay
        values = self.to_device(values.contiguous())
        return torch.sparse_coo_tensor(
            self.to_device(index.contiguous()),
            values,
            gradient.shape,
            device=values.device,
            is_coalesced=gradient.is_coalesced(),
            check_invariants=False,
        )


class DeviceCaches:
    """The caches of one run.

    Args:
        store: of the run, with a device.
        wishes: of its tables, with the bytes that each takes.
    """

    def __init__(self, store: Store, wishes: Mapping[TableWeight, tuple[CacheWish, int]]) -> None:
        self._store = store
        self._wishes = wishes
        self._link: SideLink | None = None
        self._leases: dict[TableWeight, tuple[str, Lease]] = {}

    @property
    def nbytes(self) -> int:
        """What they take of the device."""
        return sum(each.nbytes for each in self.sets())

    def sets(self) -> list[WorkingSet]:
        """Return what each table has of the device as what stays there."""
        return [cache_set(*wish) for wish in self._wishes.values()]

    def travel_over(self, link: SideLink) -> None:
        """Say how rows come to the device and back."""
        self._link = link

    def attach(self, weight: TableWeight, name: str) -> None:
        """Keep hot rows of a table on the device from now on, if that is wished.  Blocks.

        Raises:
            CapacityError: there is no room, beside what is in use; nothing has changed.
            BackendError: a medium failed; likewise.
        """
        if weight not in self._wishes or weight in self._leases:
            return
        assert self._link is not None
        wish, nbytes = self._wishes[weight]
        key = cache_key(name)
        lease = self._lease(key, nbytes)
        gradient, weight.grad = weight.grad, None
        try:
            store, link = weight.row_store, _OverLink(self._link, self._store.device)
            cells = lease.tensor.view(store.dtype).view(-1, store.width)
            there = None if gradient is None else link.gradient_to_device(gradient)
            weight.attach_device(DeviceHome(cells, link, wish.policy))
            weight.grad = there
        except BaseException:
            weight.grad = gradient
            self._drop(key, lease)
            raise
        self._leases[weight] = key, lease
        log.info(
            "table %r: up to %d of %d rows are kept on the device, with their state in %s (%s)",
            name,
            wish.rows,
            weight.row_store.num_rows,
            format_bytes(nbytes),
            wish.policy,
        )

    def detach(self, weight: TableWeight) -> None:
        """Write back what was changed on the device, and keep nothing there.  Blocks.

        Raises:
            TierStoreError: it could not be written back; nothing has changed.
        """
        if weight in self._leases:
            weight.detach_device()
            self._drop(*self._leases.pop(weight))

    def forget(self, weight: TableWeight) -> None:
        """Let go of the room of a table that has ended."""
        if weight in self._leases:
            self._drop(*self._leases.pop(weight))

    def _lease(self, key: str, nbytes: int) -> Lease:
        tier = self._store.tier_names[0]
        with DisableTorchDispatch():
            zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
            self._store.put(key, zeros, tier=tier, replace=True)
        try:
            return self._store.lease(key, tier=tier, write=True)
        except BaseException:
            self._store.drop(key)
            raise

    def _drop(self, key: str, lease: Lease) -> None:
        lease.release(written=False)
        with contextlib.suppress(KeyNotFound, StoreClosed):
            self._store.drop(key)
