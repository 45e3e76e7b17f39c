"""Zarr arrays as scratch space: a tier on a directory, in memory, or on a remote object store.

What it promises: each slot is a zarr v3 array of bytes, named by a number, which any zarr can read; its
chunks take at most ``capacity_bytes`` in the store, whatever the codec makes of them; every chunk is checked
on its way back, and one that is missing is an error, not zeros; nothing is left behind after ``close``, and
what a dead owner left is swept by the next one where its death can be proved.  What it does not do: survive
a restart.  Durability needs a manifest and a commit in one step, which most object stores do not have.

The capacity counts the chunks.  Beside it a store holds one ``zarr.json`` of some 400 bytes for each slot,
and the marker of the owner.

The rooms, each ignorant of the ones after it:

- `layout`: a slot as an array: cuts and documents.  Pure.
- `failures`: what a store's exceptions mean.
- `codecs`: codecs by name.
- `loop`: an event loop in a thread of its own.
- `places`: a store from a path, a URL or an object.
- `owner`: who may use a place, and what is swept from it.
- `slots`, `arrays`: bytes to chunks and back.
- `options`, `backend`: what a user writes, and the `tierstore.spi.Backend` itself.
"""

from __future__ import annotations

from collections.abc import Mapping

from tierstore.units import parse_bytes
from tierstore_backends.zarr.backend import ZarrBackend
from tierstore_backends.zarr.options import parse_options

__all__ = ["ZarrBackend", "open_backend"]


def open_backend(*, capacity_bytes: int, options: Mapping[str, object]) -> ZarrBackend:
    """Open a zarr store as scratch space for at most ``capacity_bytes``.

    Args:
        capacity_bytes: the most that the chunks of all slots may take in the store.
        options: ``store`` is required; see `tierstore_backends.zarr.options.ZarrOptions`.

    Raises:
        ConfigError: an unknown option, a bad value or a negative capacity; the message lists every fault.
        UsageError: another backend owns the place, or it cannot be proved that its owner is gone.
        BackendError: the store cannot be reached or used.
    """
    return ZarrBackend(parse_bytes(capacity_bytes), parse_options(options))
