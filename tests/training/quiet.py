"""Waiting until a store is quiet: what is being copied and freed, and what waits for room for it."""

from __future__ import annotations

import os
import time

import tierstore as ts

PATIENCE_S = 60.0


def be_quiet(store: ts.Store) -> None:
    """Return when nothing is under way: a copy that waits for room is not in flight yet."""
    begin_s = time.monotonic()
    while any(tier.charged_bytes > tier.ready_bytes for tier in store.stats().tiers.values()):
        assert time.monotonic() - begin_s < PATIENCE_S
        os.sched_yield()
