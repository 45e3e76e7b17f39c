"""``tierstore du STORE_PATH [KEY ...]``: how many bytes are in a durable store, and under which names."""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter

from tierstore.cli import directory
from tierstore.units import format_bytes

_SEPARATORS = re.compile(r"[./:]")


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser("du", parents=[shared], help="count the bytes of a durable store")
    directory.add_store(parser)
    directory.add_patterns(parser)
    parser.add_argument(
        "--depth",
        type=_depth,
        default=1,
        help="how many parts of names, between '.', '/' or ':', to tell apart",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    nbytes: Counter[str] = Counter()
    keys: Counter[str] = Counter()
    with directory.open_store(options.store) as store:
        for key in directory.chosen(store, options.patterns):
            prefix = _prefix(key, options.depth)
            keys[prefix] += 1
            nbytes[prefix] += store.spec(key).nbytes
        held_bytes = store.stats().tiers[directory.TIER].charged_bytes
    disk_bytes = directory.disk_bytes(options.store)
    if options.json:
        groups = [{"prefix": p, "keys": keys[p], "nbytes": nbytes[p]} for p in sorted(keys)]
        total = {"keys": keys.total(), "nbytes": nbytes.total()}
        total |= {"store_held_bytes": held_bytes, "store_disk_bytes": disk_bytes}
        print(json.dumps({**total, "groups": groups}))
        return 0
    for prefix, count in nbytes.most_common():
        print(f"{format_bytes(count):>12}  {keys[prefix]:>8} keys  {directory.shown(prefix)}")
    print(f"{format_bytes(nbytes.total()):>12}  {keys.total():>8} keys  in all")
    print(f"{format_bytes(held_bytes):>12}  that the whole store takes of a tier's capacity")
    print(f"{format_bytes(disk_bytes):>12}  that its files take of the disk, with what is free in them")
    return 0


def _depth(text: str) -> int:
    if text.isdecimal():
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r}; accepted: a whole number, 0 or more")


def _prefix(key: str, depth: int) -> str:
    """Return the first parts of a key, as they are written."""
    ends = [match.start() for match in _SEPARATORS.finditer(key)]
    return key[: ends[depth - 1]] + "*" if 0 < depth <= len(ends) else key if depth > 0 else "*"
