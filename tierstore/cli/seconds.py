"""Seconds as people read them."""

from __future__ import annotations


def format_seconds(seconds: float) -> str:
    """Print seconds with a unit that keeps the number at 1 or more."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= factor:
            return f"{seconds / factor:.4g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"
