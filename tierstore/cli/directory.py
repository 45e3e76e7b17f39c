"""A durable store's directory, opened for one command, and what its verbs share.

Rule 1: a verb that only looks opens it to be read: nothing in it is changed or repaired, it may be on
read-only media, and several may look at a time.
Rule 2: a key is printed so that it stays on its line and can be told from every other: see `shown`.
"""

from __future__ import annotations

import argparse
import enum
import fnmatch
import shutil
from collections.abc import Sequence
from pathlib import Path

from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import UsageError
from tierstore.store import Store

TIER = "disk"


def add_store(parser: argparse.ArgumentParser) -> None:
    """Let a verb take the directory."""
    parser.add_argument(
        "store",
        metavar="STORE_PATH",
        help="the directory of a durable store; for several drives, all of them with commas between",
    )


def add_patterns(parser: argparse.ArgumentParser) -> None:
    """Let a verb take patterns that choose keys."""
    parser.add_argument(
        "patterns",
        metavar="KEY",
        nargs="*",
        default=[],  # or messages call it required
        help="only these keys, or those that match, as a shell matches file names (default: every key)",
    )


class DirectoryAccess(enum.Enum):
    """What a verb may do to a directory."""

    LOOK = enum.auto()  # nothing
    CHANGE = enum.auto()  # put tensors there; where there is no store, make one


def open_store(text: str, access: DirectoryAccess = DirectoryAccess.LOOK) -> Store:
    """Open the directory ``text`` as a store of one durable tier.

    Args:
        text: one path, or several with commas between.
        access: what will be done to it.

    Raises:
        UsageError: it is not a directory, or no durable store; or a live process owns it.
        BackendError: it is damaged, or another version's, or cannot be read.
    """
    is_changed = access is DirectoryAccess.CHANGE
    paths = _folders(text)
    for path in paths:
        if not path.is_dir() and not (is_changed and not path.exists()):
            raise UsageError(f"{str(path)!r} is not a directory.")
    there = next((each for each in (paths[0], *paths[0].absolute().parents) if each.exists()), paths[0])
    options: dict[str, object] = {
        "path": str(paths[0]) if len(paths) == 1 else [str(path) for path in paths],
        "durable": True,
        **({"create": True} if is_changed else {"read_only": True}),
    }
    # The quota guards what a program adds; here, what there is room for is what the disk holds.
    capacity = shutil.disk_usage(there).total * len(paths)
    return Store(StoreConfig([TierConfig(TIER, "files", capacity, options=options)]))


def disk_bytes(text: str) -> int:
    """Return what all files of the store in ``text`` take of the disk, in the file system's own blocks."""
    files = [file.stat() for path in _folders(text) for file in path.glob("tierstore*")]
    return sum(found.st_blocks * 512 for found in files)


def _folders(text: str) -> list[Path]:
    parts = text.split(",")
    if not all(parts):
        raise UsageError(f"{text!r} names no directory, or has a comma too many.")
    return [Path(each).expanduser() for each in parts]


def chosen(store: Store, patterns: Sequence[str]) -> list[str]:
    """Return the keys that match a pattern, or are one, in alphabetical order; without patterns all of them.

    Raises:
        UsageError: nothing matches a pattern.
    """
    keys = sorted(store)
    if not patterns:
        return keys
    found: set[str] = set()
    for pattern in patterns:
        matching = {key for key in keys if key == pattern or fnmatch.fnmatchcase(key, pattern)}
        if not matching:
            raise UsageError(f"none of {len(keys)} keys matches {shown(pattern)}.")
        found |= matching
    return sorted(found)


def shown(key: str) -> str:
    """Return a key as one line that no other key has: escaped, as in Python, where it is not printable."""
    return "".join(
        each if each.isprintable() and each != "\\" else each.encode("unicode_escape").decode()
        for each in key
    )
