"""Which tables keep rows on the device, how many, and whether there is room for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tierstore.errors import CapacityError, UsageError
from tierstore.nn import EmbeddingTable
from tierstore.nn.table_weight import TableWeight
from tierstore.planning.deciding import ALIGNMENT_BYTES
from tierstore.planning.homes import CPU
from tierstore.tables.frames import Policy
from tierstore.training.bundles.working_sets import WorkingSet, largest_needs
from tierstore.units import align_up, format_bytes


@dataclass(frozen=True)
class CacheWish:
    """What a table keeps on the device.

    Attributes:
        module: the name of the module that says so.
        rows: how many of its rows at most, at least 1.
        policy: which of them leave first: ``"lfu"`` or ``"lru"``.
    """

    module: str
    rows: int
    policy: Policy

    def nbytes(self, weight: TableWeight, states: int) -> int:
        """Return what they take.

        Args:
            weight: of the table.
            states: how many an optimizer keeps of each element.
        """
        store = weight.row_store
        return self.rows * (1 + states) * store.width * store.dtype.itemsize


CacheWishes = Mapping[TableWeight, CacheWish]


def cache_wishes(model: nn.Module, is_on_host: Callable[[nn.Module], bool]) -> dict[TableWeight, CacheWish]:
    """Return what the tables of a model keep on the device.

    Args:
        model: whose tables.
        is_on_host: whether a module computes on the host, beside the device.

    Raises:
        UsageError: a table's module computes on the host, or two modules of one table say otherwise.
    """
    found: dict[TableWeight, CacheWish] = {}
    for name, module in model.named_modules():
        if not isinstance(module, EmbeddingTable) or not isinstance(module.weight, TableWeight):
            continue
        wish = CacheWish(name, module.cache_rows, "lru" if module.policy == "lru" else "lfu")
        if wish.rows and is_on_host(module):
            raise UsageError(
                f"{name!r} has cache_rows={wish.rows} and is placed on the host, where all of its rows are. "
                "Make it with cache_rows=0, or leave it on the device.",
                key=name,
            )
        other = found.setdefault(module.weight, wish)
        if (other.rows, other.policy) != (wish.rows, wish.policy):
            raise UsageError(
                f"{other.module!r} and {name!r} look up one table, with cache_rows={other.rows}, "
                f"policy={other.policy!r} and cache_rows={wish.rows}, policy={wish.policy!r}. Say the same "
                "of both.",
                key=name,
            )
    return {weight: wish for weight, wish in found.items() if wish.rows}


def refuse_cached_rows(wishes: CacheWishes) -> None:
    """Refuse tables that keep rows on the device where their rows are spread over processes.

    Args:
        wishes: of the tables.

    Raises:
        UsageError: it names the first, and says what to do instead.
    """
    for wish in wishes.values():
        raise UsageError(
            f"{wish.module!r} has cache_rows={wish.rows}: its rows are spread over the processes, which "
            "bring them to each other in host memory and keep none of them on their devices. Make it with "
            "cache_rows=0.",
            key=wish.module,
        )


def require_targets(wishes: CacheWishes, targets: Mapping[torch.Tensor, str], run_target: str) -> None:
    """Refuse tables that keep rows on the device and are stepped on the host.

    Args:
        wishes: of the tables.
        targets: where parameters are stepped, of those whose group has a ``target``.
        run_target: where the others are.

    Raises:
        UsageError: it names the first, and what says so.
    """
    for weight, wish in wishes.items():
        if targets.get(weight, run_target) == CPU:
            what = (
                "its optimizer's group has target='cpu'" if weight in targets else "optimizer_target is 'cpu'"
            )
            raise UsageError(
                f"{wish.module!r} has cache_rows={wish.rows}: it is stepped where these rows are, on the "
                f"device, and {what}. Leave that out, or make the table with cache_rows=0.",
                key=wish.module,
            )


def require_cache_room(
    wishes: Mapping[CacheWish, int], sets: Sequence[WorkingSet], capacity_bytes: int
) -> None:
    """Raise unless the device has room for the rows that tables keep there beside what is trained there.

    Args:
        wishes: of the tables, with their bytes.
        sets: what else is needed on the device, bundle by bundle.
        capacity_bytes: of the device.

    Raises:
        CapacityError: there is not enough; it says how many rows there is room for.
    """
    if not wishes:
        return
    needed_bytes = sum(align_up(nbytes, ALIGNMENT_BYTES) for nbytes in wishes.values())
    largest, beside_bytes = largest_needs(sets) if sets else (None, 0)
    left_bytes = max(0, capacity_bytes - beside_bytes)
    if needed_bytes <= left_bytes:
        return
    whose = ", ".join(repr(wish.module) for wish in wishes)
    rows = sum(wish.rows for wish in wishes)
    beside = (
        "" if largest is None else f" beside the bundle of {largest.name!r} ({format_bytes(beside_bytes)})"
    )
    fits = max(0, left_bytes - ALIGNMENT_BYTES * len(wishes)) * rows // needed_bytes
    raise CapacityError(
        f"{whose}: cache_rows={rows} with their state take {format_bytes(needed_bytes)} on the device, and"
        f"{beside} max_device_memory leaves {format_bytes(left_bytes)} of {format_bytes(capacity_bytes)}: "
        f"room for {fits} rows. Raise it, or lower cache_rows.",
        key=next(iter(wishes)).module,
        needed_bytes=needed_bytes,
        free_bytes=left_bytes,
    )


def cache_set(wish: CacheWish, nbytes: int) -> WorkingSet:
    """Return what a table keeps on the device as one that stays there."""
    taken_bytes = align_up(nbytes, ALIGNMENT_BYTES)
    return WorkingSet(wish.module, 0, taken_bytes, (), taken_bytes)
