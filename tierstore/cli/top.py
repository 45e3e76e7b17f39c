"""``tierstore top [PID|PATH]``: what an open run does now, from outside of its process.

Only looks: nothing is sent to the process, which answers with one snapshot for each look.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

from tierstore import live
from tierstore.errors import UsageError
from tierstore.live import LiveProcess
from tierstore.quoting import listed

_FASTEST_S = 0.1
_SLOWEST_S = 3600.0
_TRIES = 10
_MOST_ASKED = 32


def add_to(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], shared: argparse.ArgumentParser
) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "top",
        parents=[shared],
        help="what an open run does now: tiers, links, waiting, what moves",
        description="Look at the runs of a process of yours until Ctrl-C. It needs nothing of the program.",
    )
    parser.add_argument(
        "target",
        metavar="PID|PATH",
        nargs="?",
        help="a process, or a directory that a run has its files in, or a socket (default: the only process)",
    )
    parser.add_argument("--interval", metavar="SECONDS", type=float, default=1.0, help="between looks (1)")
    parser.add_argument("--once", action="store_true", help="look for one interval, print it, and end")
    parser.add_argument("--json", action="store_true", help="one snapshot a line, as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Look until interrupted, or until the process has ended.

    Raises:
        UsageError: there is no such process, or several; it has no open run; or the call is wrong.
        OSError: it does not answer.
    """
    if not _FASTEST_S <= options.interval <= _SLOWEST_S:  # also where it is no number
        raise UsageError(
            f"--interval {options.interval:g}: accepted: {_FASTEST_S} to {_SLOWEST_S:g} seconds."
        )
    path, first = find(options.target)
    if options.json:
        return _print_lines(path, first, options)
    try:
        from tierstore.cli import top_view
    except ImportError as error:
        raise UsageError(
            f"the live view needs the package rich ({error}): pip install 'tierstore[top]', or give --json."
        ) from error
    looks = _looks(path, options.interval)
    if options.once:
        top_view.show_once(first, looks)
    else:
        top_view.show(first, looks)
    return 0


def _looks(path: Path, interval_s: float) -> Callable[[], LiveProcess | None]:
    """Return what waits and then looks; ``None``: the process has ended, or its runs have.

    A process that is busy in the midst of something may be slow to answer: that is no end.
    """

    def look() -> LiveProcess | None:
        for tries_left in reversed(range(_TRIES)):
            time.sleep(interval_s)
            try:
                found = live.read(path)
            except (ConnectionError, FileNotFoundError):
                return None
            except TimeoutError:
                if not tries_left:
                    raise
            else:
                return found if found.runs else None
        return None

    return look


def _print_lines(path: Path, first: LiveProcess, options: argparse.Namespace) -> int:
    look = _looks(path, options.interval)
    found: LiveProcess | None = first
    try:
        while found is not None:
            print(json.dumps(asdict(found)), flush=True)
            found = None if options.once else look()
    except BrokenPipeError:  # who reads it has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


# ---------------------------------------------------------------------- which process


def find(target: str | None) -> tuple[Path, LiveProcess]:
    """Return the socket of the process that is meant, and what it shows.

    Args:
        target: number of a process, directory of a run, or socket; ``None``: the only one there is.

    Raises:
        UsageError: there is none, or there are several.
        OSError: it does not answer.
    """
    if target is None:
        return _only(_answering(), "no process of yours shows a run")
    if "\0" in target:
        raise UsageError(f"{target!r} is no path.")
    if target.isascii() and target.isdigit():
        return _of_process(int(target))
    path = Path(target).expanduser()
    if path.is_socket():
        return path, live.read(path)
    place = Path(os.path.normpath(path.absolute()))
    using = [each for each in _answering() if _uses(each[1], {place, place.resolve()})]
    return _only(using, f"no process of yours has an open run in {target!r}")


def _of_process(pid: int) -> tuple[Path, LiveProcess]:
    for path in live.sockets().get(pid, []):
        try:
            return path, live.read(path)
        except ConnectionRefusedError:  # left over
            continue
    if Path(f"/proc/{pid}").exists():
        raise UsageError(
            f"process {pid} shows no run: it has none open, is another user's, has live_view: false, or "
            f"other directories for sockets ({listed(live.folders(), show=str)})."
        )
    raise UsageError(f"there is no process {pid}.")


def _answering() -> list[tuple[Path, LiveProcess]]:
    """Return the processes that show a run; all are asked at once, as each may take its time."""
    paths = [path for several in live.sockets().values() for path in several]
    if not paths:
        return []
    with ThreadPoolExecutor(min(len(paths), _MOST_ASKED)) as threads:
        answers = list(zip(paths, threads.map(_read_or_none, paths), strict=True))
    return [(path, process) for path, process in answers if process is not None and process.runs]


def _read_or_none(path: Path) -> LiveProcess | None:
    try:
        return live.read(path)
    except (OSError, UsageError):  # left over, hangs, or is another version's
        return None


def _uses(process: LiveProcess, places: set[Path]) -> bool:
    """Whether a run of a process has files in one of some places, or below."""
    paths = {Path(each) for one in process.runs for each in one.paths}
    paths |= {each.resolve() for each in paths}
    return any(path == place or place in path.parents for path in paths for place in places)


def _only(found: list[tuple[Path, LiveProcess]], none: str) -> tuple[Path, LiveProcess]:
    if not found:
        raise UsageError(f"{none}.")
    if len(found) > 1:
        named = listed((f"{process.pid} ({_names(process)})" for _, process in found), show=str)
        raise UsageError(f"{len(found)} processes have one: give one of {named}.")
    return found[0]


def _names(process: LiveProcess) -> str:
    return ", ".join(each.name or "?" for each in process.runs[:3])
