"""Whether all that a run has would fit into memory as ordinary tensors, with room to spare.

1. What is needed is what was brought back from the store: bundles and gradients, each where it goes in the
   end.  What has memory of its own already needs none.
2. What is available is what the machine, the cgroups and the process's limits leave, and on an accelerator
   what is free there.  What the store gives up as bytes leave it is added, where memory is counted: of
   page-locked blocks only a part, as a block is given back when all of it is empty.  A limit that counts
   addresses gets nothing back before the end.
3. To spare there has to be an eighth of what is needed, and what copying takes: the largest bundle twice, and
   the outputs that a store keeps for the next ones.
4. A device that does not tell how much is free bounds nothing.

Measured anew for each decision; promises nothing about what other programs take meanwhile.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch

from tierstore.config.host_memory import host_rooms
from tierstore.config.machine import free_device_bytes
from tierstore.output_buffers import KEPT_BYTES
from tierstore.planning.rules import HOST
from tierstore.store import Store
from tierstore.training.bundles.binding import Binding, Where
from tierstore.training.bundles.layout import span_of
from tierstore.units import format_bytes

_SPARE_PART = 8
_LOCKED_SHARE = (3, 4)  # of page-locked memory, what is given back before the end

CPU = "cpu"


class Shortage(NamedTuple):
    """What does not fit.

    Attributes:
        needed_bytes: that everything needs there.
        spare_bytes: that have to be left.
        available_bytes: that there are, with those that the store gives up.
        freed_bytes: that the store gives up.
        where: the bound that is too narrow.
    """

    needed_bytes: int
    spare_bytes: int
    available_bytes: int
    freed_bytes: int
    where: str

    def __str__(self) -> str:
        return (
            f"it needs {format_bytes(self.needed_bytes)} and {format_bytes(self.spare_bytes)} to spare, and "
            f"{self.where} leaves {format_bytes(self.available_bytes)}, of which the store gives up "
            f"{format_bytes(self.freed_bytes)}"
        )


class Need(NamedTuple):
    """What one key of the store becomes.

    Attributes:
        device: where it goes.
        nbytes: of it.
    """

    device: torch.device
    nbytes: int


def needs_of_bundle(binding: Binding, origins: Iterable[torch.device]) -> Iterator[Need]:
    """Yield what the tensors of a bundle take where they go in the end."""
    devices = [torch.device(CPU) if each.type == "meta" else each for each in origins]
    for region in binding.regions:
        if any(binding.where[number] is Where.HOME for number in region.members):
            yield Need(devices[region.members[0]], region.end_bytes - region.begin_bytes)
    for number in binding.abroad:
        tensor = binding.tensors[number]
        if tensor.device.type != devices[number].type:
            yield Need(devices[number], span_of(tensor))


def shortage(store: Store, needs: Iterable[Need]) -> Shortage | None:
    """Return what does not fit; ``None``: everything does, with room to spare.

    Args:
        store: that gives up what is brought back.
        needs: of all that is to be.
    """
    needed: Counter[torch.device] = Counter()
    largest: Counter[torch.device] = Counter()
    for need in needs:
        needed[need.device] += need.nbytes
        largest[need.device] = max(largest[need.device], need.nbytes)
    for device, needed_bytes in needed.items():
        spare_bytes = needed_bytes // _SPARE_PART + 2 * largest[device]
        if device.type == CPU:
            spare_bytes += min(KEPT_BYTES, needed_bytes)
        for room in _rooms(store, device):
            if needed_bytes + spare_bytes > room.available_bytes:
                return Shortage(needed_bytes, spare_bytes, room.available_bytes, room.freed_bytes, room.name)
    return None


class _FreeMemory(NamedTuple):
    name: str
    available_bytes: int
    freed_bytes: int


def _rooms(store: Store, device: torch.device) -> Iterator[_FreeMemory]:
    if device.type != CPU:
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            cached_bytes = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(
                device
            )
            free_bytes = free_device_bytes(str(device)) + max(0, cached_bytes)
            freed_bytes = store.stats().tiers[store.tier_names[0]].charged_bytes
            yield _FreeMemory(f"the device {device}", free_bytes + freed_bytes, freed_bytes)
        return
    for room in host_rooms():
        freed_bytes = 0 if room.counts_addresses else _freed_host_bytes(store)
        yield _FreeMemory(room.name, room.nbytes + freed_bytes, freed_bytes)


def _freed_host_bytes(store: Store) -> int:
    """Return how much host memory a store gives up while its keys leave it."""
    tiers = store.stats().tiers
    if store.device.type != CPU:
        share, whole = _LOCKED_SHARE
        return tiers[HOST].reserved_bytes * share // whole if HOST in tiers else 0
    return sum(tiers[name].reserved_bytes for name in host_tiers(store))


def host_tiers(store: Store) -> list[str]:
    """Return the tiers whose bytes are host memory: that of an emulated device is, too."""
    fastest = store.tier_names[0]
    return [
        name for name in store.tier_names if name == HOST or (name == fastest and store.device.type == CPU)
    ]
