"""What of a run is leased because somebody needs it."""

from __future__ import annotations

from tierstore.training import Offload


def leased_bytes(run: Offload) -> int:
    """Return the bytes of leases that are needed: such as stay until somebody asks are asked for here."""
    assert run._session is not None
    run._session.bindings.let_go(None)
    return sum(tier.leased_bytes for tier in run.store.stats().tiers.values())
