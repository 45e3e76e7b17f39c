"""``tierstore verify STORE_PATH [KEY ...]``: read everything, compare checksums, name what is damaged."""

from __future__ import annotations

import argparse
import json

from tierstore.cli import directory
from tierstore.errors import BackendError
from tierstore.progress import progress
from tierstore.store import Store
from tierstore.units import format_bytes

_DAMAGED = 1


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser("verify", parents=[shared], help="read a durable store and name damaged keys")
    directory.add_store(parser)
    directory.add_patterns(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with directory.open_store(options.store) as store:
        keys = directory.chosen(store, options.patterns)
        sizes = [store.spec(key).nbytes for key in keys]
        damaged = {
            key: error
            for key in progress(keys, sizes, "verify")
            if (error := _damage(store, key)) is not None
        }
        unchecked_bytes = _unchecked_bytes(store)
    if options.json:
        told = {"keys": len(keys), "nbytes": sum(sizes), "unchecked_bytes": unchecked_bytes}
        print(json.dumps(told | {"damaged": damaged}))
    else:
        for key, error in damaged.items():
            print(f"damaged: {directory.shown(key)}: {error}")
        undamaged = len(keys) - len(damaged)
        are = "can be read" if unchecked_bytes else "are whole"
        print(f"{undamaged} of {len(keys)} keys {are} ({format_bytes(sum(sizes))} read)")
        if unchecked_bytes:
            print(
                f"{format_bytes(unchecked_bytes)} of that have no checksum in the files (checksum=False): "
                "nobody can tell whether they are what was written, unless a codec packed them."
            )
    return _DAMAGED if damaged else 0


def _unchecked_bytes(store: Store) -> int:
    """Return how much of what was read there was no checksum for."""
    counted = store.stats().tiers[directory.TIER].io["unchecked_bytes"]
    assert isinstance(counted, int)
    return counted


def _damage(store: Store, key: str) -> str | None:
    """Return what is wrong with a key's bytes, if anything is."""
    try:
        store.get(key, device="cpu")
    except BackendError as error:
        return " ".join(str(error).split())
    return None
