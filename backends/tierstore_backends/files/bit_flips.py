"""Bytes that are one flipped bit away from others: what a damaged bit may have made of them."""

from __future__ import annotations

from collections.abc import Iterator


def flips(data: bytes) -> Iterator[bytes]:
    """Yield everything that is one flipped bit away from ``data``."""
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit >> 3] ^= 1 << (bit & 7)
        yield bytes(flipped)
