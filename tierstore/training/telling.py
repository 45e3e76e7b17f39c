"""What a run says of itself at INFO on the logger ``tierstore``: a line when it opens, and one when it ends.

Names of types, tiers and keys of the configuration, and numbers: nothing of what is trained, and no paths.
"""

from __future__ import annotations

import logging

from tierstore.stats import StoreStats, TierStats
from tierstore.training.bundles.bundle_tiers import setting_of
from tierstore.training.run_stats import RunStats
from tierstore.training.session import Session
from tierstore.units import format_bytes

log = logging.getLogger("tierstore")

_LONGEST_NAME = 60
_MOST_DIRECTIONS = 6


def say_opened(session: Session) -> None:
    """Log how large everything is, which quotas there are, and where it lies."""
    if not log.isEnabledFor(logging.INFO):
        return
    tiers = session.store.stats().tiers
    placement = session.placing.placement
    quotas = {
        each.name: placement.used_bytes(each.name, each.capacity_bytes) for each in session.store.config.tiers
    }
    kinds = ", ".join(type(steps.optimizer).__name__[:_LONGEST_NAME] for steps in session.steps[:4])
    log.info(
        "%s is offloaded with %s: %d bundles of parameters, %d of buffers%s; %s",
        _name(session),
        kinds or "no optimizer",
        len(session.bundles),
        len(list(session.buffers)),
        _tables(session),
        "; ".join(
            _opened(name, tier, quotas[name], placement.shares.get(name)) for name, tier in tiers.items()
        ),
    )


def say_ended(session: Session, stats: RunStats) -> None:
    """Log what the tiers held at most, what was copied, and what the time went into."""
    if not log.isEnabledFor(logging.INFO) or stats.store is None:
        return
    log.info(
        "%s is no longer offloaded: %s; copied %s; seconds: forward %.1f, backward %.1f, optimizer %.1f, of "
        "which waiting for bytes %.1f",
        _name(session),
        "; ".join(_ended(name, tier) for name, tier in stats.store.tiers.items()),
        _copied(stats.store),
        stats.forward_s,
        stats.backward_s,
        stats.optimizer_s,
        stats.stall_s,
    )


def _name(session: Session) -> str:
    return type(session.model).__name__[:_LONGEST_NAME]


def _tables(session: Session) -> str:
    frames = [each.frames for each in session.placing.placement.tables.values()]
    whole_bytes = sum(session.tables.whole_bytes.values())
    if not frames:
        return ""
    return f", {len(frames)} tables of {format_bytes(whole_bytes)} in frames of {format_bytes(sum(frames))}"


def _opened(name: str, tier: TierStats, quota_bytes: int, share: float | None) -> str:
    quota = format_bytes(quota_bytes)
    setting = setting_of(name) if share is None else f"{share:.4g} of {setting_of(name)},"
    return f"{name} has {format_bytes(tier.charged_bytes)} of {setting} {quota}"


def _ended(name: str, tier: TierStats) -> str:
    return f"{name} had at most {format_bytes(tier.peak_charged_bytes)}"


def _copied(store: StoreStats) -> str:
    moved = [(traffic.nbytes, *way) for way, traffic in store.traffic.items() if traffic.nbytes]
    largest = sorted(moved, reverse=True)[:_MOST_DIRECTIONS]
    return ", ".join(f"{format_bytes(n)} {source} to {target}" for n, source, target in largest) or "nothing"
