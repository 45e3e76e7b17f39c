"""``tierstore ls STORE_PATH [KEY ...]``: what is in a durable store."""

from __future__ import annotations

import argparse
import json

from tierstore.cli import directory
from tierstore.store import Store
from tierstore.units import format_bytes


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser("ls", parents=[shared], help="list the keys of a durable store")
    directory.add_store(parser)
    directory.add_patterns(parser)
    parser.add_argument("--json", action="store_true", help="one JSON array")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    with directory.open_store(options.store) as store:
        rows = [_row(store, key) for key in directory.chosen(store, options.patterns)]
    if options.json:
        print(json.dumps(rows))
        return 0
    lines = [
        (
            directory.shown(str(row["key"])),
            str(row["dtype"]),
            str(row["shape"]),
            format_bytes(int(str(row["nbytes"]))),
        )
        for row in rows
    ]
    tiers = [",".join(row["tiers"]) for row in rows if isinstance(row["tiers"], list)]
    heads = ("KEY", "DTYPE", "SHAPE", "SIZE")
    widths = [max(len(line[column]) for line in (heads, *lines)) for column in range(len(heads))]
    for line, tier in zip((heads, *lines), ("TIER", *tiers), strict=True):
        print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)), "", tier)
    return 0


def _row(store: Store, key: str) -> dict[str, object]:
    spec = store.spec(key)
    return {
        "key": key,
        "dtype": str(spec.dtype).removeprefix("torch."),
        "shape": list(spec.shape),
        "nbytes": spec.nbytes,
        "tiers": list(store.where(key)),
    }
