"""A durable store's directory, opened for one command, and what its verbs share."""

from __future__ import annotations

import argparse
import fnmatch
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import UsageError
from tierstore.store import Store

T = TypeVar("T")

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
        help="only keys that match one of these, as a shell matches file names (default: every key)",
    )


def open_store(text: str, *, creates: bool = False) -> Store:
    """Open the directory ``text`` as a store of one durable tier.

    Args:
        text: one path, or several with commas between.
        creates: whether a directory that is not a store becomes one.

    Raises:
        UsageError: it is not a directory, or no durable store; or a live process owns it.
        BackendError: it is damaged, or another version's.
    """
    paths = [Path(each).expanduser() for each in text.split(",")]
    for path in paths:
        if not path.is_dir() and not (creates and not path.exists()):
            raise UsageError(f"{str(path)!r} is not a directory.")
    there = next((each for each in (paths[0], *paths[0].absolute().parents) if each.exists()), paths[0])
    options: dict[str, object] = {
        "path": str(paths[0]) if len(paths) == 1 else [str(path) for path in paths],
        "durable": True,
        "create": creates,
    }
    # The quota guards what a program adds; here, what there is room for is what the disk holds.
    capacity = shutil.disk_usage(there).total * len(paths)
    return Store(StoreConfig([TierConfig(TIER, "files", capacity, options=options)]))


def chosen(store: Store, patterns: Sequence[str]) -> list[str]:
    """Return the keys that match a pattern, in alphabetical order; without patterns all of them.

    Raises:
        UsageError: nothing matches.
    """
    keys = sorted(store)
    if not patterns:
        return keys
    found = [key for key in keys if any(fnmatch.fnmatchcase(key, pattern) for pattern in patterns)]
    if not found:
        raise UsageError(f"none of {len(keys)} keys matches {', '.join(patterns)}.")
    return found


def progress(items: Iterable[T], sizes: Sequence[int], doing: str) -> Iterator[T]:
    """Yield ``items`` and show on stderr, if a person may be looking, how many bytes of them are done."""
    from tqdm import tqdm

    bar = tqdm(
        total=sum(sizes),
        desc=doing,
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=not sys.stderr.isatty(),
        leave=False,
    )
    with bar:
        for item, nbytes in zip(items, sizes, strict=True):
            yield item
            bar.update(nbytes)
