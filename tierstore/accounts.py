"""Where the figures of `Store.stats` come from: the books, the media, and what callers got.

Knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from tierstore.core.tier_state import TierState
from tierstore.engine.engine import Engine
from tierstore.signals import uninterrupted
from tierstore.spi import CountingBackend
from tierstore.stats import Counted, MovingCopy, RoomInTier, StoreStats, TierStats, Traffic, plain_values
from tierstore.tier_backends import TierBackend


@uninterrupted
def collect(
    engine: Engine, backends: Mapping[str, TierBackend], got: Mapping[int, Traffic], stall_seconds: float
) -> StoreStats:
    """Ask the books and the media of a store.

    Args:
        engine: of the store.
        backends: by the tiers' names, fastest first.
        got: what callers got, by the number of the tier that it came from.
        stall_seconds: how long they were blocked.
    """
    tiers = engine.look(lambda ledger: [_tier_stats(tier_state) for tier_state in ledger.books.tier_states])
    windows = engine.look(
        lambda ledger: {
            d: Traffic(x.copies, x.moved_bytes) for d, x in ledger.scheduler.traffic.windows.items()
        }
    )
    names = (*backends, "caller")  # index -1 is the caller
    traffic = {(names[source], names[target]): moved for (source, target), moved in windows.items()}
    traffic.update({(names[tier], "caller"): moved for tier, moved in got.items()})
    by_name = {
        name: _with_medium(tier, backend)
        for (name, backend), tier in zip(backends.items(), tiers, strict=True)
    }
    return StoreStats(by_name, traffic, stall_seconds)


def rooms(engine: Engine, names: Sequence[str]) -> dict[str, RoomInTier]:
    """Ask the books what the tiers, of these names, have room for."""
    found = engine.look(
        lambda ledger: [
            RoomInTier(each.tier.capacity_bytes, each.charged_bytes, each.leased_bytes)
            for each in ledger.books.tier_states
        ]
    )
    return dict(zip(names, found, strict=True))


def moving(engine: Engine, names: Sequence[str], most: int) -> tuple[MovingCopy, ...]:
    """Return copies that are under way, the oldest first.

    Args:
        engine: of the store.
        names: the tiers', fastest first.
        most: how many.
    """
    every = (*names, "caller")  # index -1 is the caller
    return engine.look(
        lambda ledger: tuple(
            MovingCopy(copy.want.entry.key, every[copy.source], every[copy.target], copy.nbytes)
            for copy in ledger.scheduler.traffic.under_way(most)
        )
    )


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


def _with_medium(tier: TierStats, opened: TierBackend) -> TierStats:
    """Add what the medium itself says, and what stands around it; a pool keeps more than its slots."""
    can, counting = opened.backend.capabilities, cast("CountingBackend", opened.backend)
    return replace(
        tier,
        reserved_bytes=counting.reserved_bytes if can.has_reserved_bytes else tier.charged_bytes,
        codec=None if opened.codec is None else opened.codec.codec_stats,
        io=_as_mapping(counting.io_stats) if can.has_io_stats else {},
        wrappers={name: _as_mapping(wrapper.stats) for name, wrapper in opened.wrappers.items()},
    )


def _as_mapping(stats: object) -> Mapping[str, Counted]:
    """Return what a medium counts as plain values, whatever mappings and numbers it counts with."""
    counted: Mapping[str, Counted] = plain_values(stats)
    return counted
