"""Where the figures of `Store.stats` come from: the books, the media, and what callers got.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, cast

from tierstore.codec import Compressed
from tierstore.core.tier_state import TierState
from tierstore.engine.engine import Engine
from tierstore.signals import uninterrupted
from tierstore.spi import Backend, CountingBackend
from tierstore.stats import StoreStats, TierStats, Traffic

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


@uninterrupted
def collect(
    engine: Engine, tier_names: Sequence[str], got: Mapping[int, Traffic], stall_seconds: float
) -> StoreStats:
    """Ask the books and the media of a store.

    Args:
        engine: of the store.
        tier_names: fastest first.
        got: what callers got, by the number of the tier that it came from.
        stall_seconds: how long they were blocked.
    """
    tiers = engine.look(lambda ledger: [_tier_stats(tier_state) for tier_state in ledger.books.tier_states])
    windows = engine.look(
        lambda ledger: {
            d: Traffic(x.copies, x.moved_bytes) for d, x in ledger.scheduler.traffic.windows.items()
        }
    )
    names = (*tier_names, "caller")  # index -1 is the caller
    traffic = {(names[source], names[target]): moved for (source, target), moved in windows.items()}
    traffic.update({(names[tier], "caller"): moved for tier, moved in got.items()})
    by_name = {
        name: _with_medium(tier, backend)
        for name, tier, backend in zip(tier_names, tiers, engine.backends, strict=True)
    }
    return StoreStats(by_name, traffic, stall_seconds)


def _tier_stats(tier_state: TierState) -> TierStats:
    return TierStats(
        capacity_bytes=tier_state.tier.capacity_bytes,
        charged_bytes=tier_state.charged_bytes,
        ready_bytes=tier_state.ready_bytes,
        in_flight_bytes=tier_state.filling_bytes,
        leased_bytes=tier_state.leased_bytes,
        peak_charged_bytes=tier_state.peak_charged_bytes,
        reserved_bytes=tier_state.charged_bytes,
        hits=tier_state.counters.hits,
        faults=tier_state.counters.faults,
        evictions=tier_state.counters.evictions,
        refusals=tier_state.counters.refusals,
    )


def _with_medium(tier: TierStats, backend: Backend) -> TierStats:
    """Add what the medium itself says; one that keeps more than its slots, such as a pool, what it holds."""
    can, counting = backend.capabilities, cast("CountingBackend", backend)
    return replace(
        tier,
        reserved_bytes=counting.reserved_bytes if can.has_reserved_bytes else tier.charged_bytes,
        codec=backend.codec_stats if isinstance(backend, Compressed) else None,
        io=asdict(cast("DataclassInstance", counting.io_stats)) if can.has_io_stats else {},
    )
