"""Kill a process that uses a durable store, again and again, and look at what is left.

``python -m tests.fault.crashes --trials 500 DIRECTORY`` forks a worker that opens the store in the
directory, checks that it holds exactly what an earlier flush left, and then puts, replaces, writes, evicts,
drops, renames and flushes at random, until it is killed with SIGKILL at a random moment.  The next worker
goes on from there; every third one compresses what it writes.  The worker says what it does in a journal,
which is the oracle: it tells what was there when a flush began and that it has ended, and never asks the
store.

What a kill cannot show, since the kernel lives on, is what a missing sync would cost: the order of syncs
is tested where the kernel is scripted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

import tierstore as ts
import tierstore_backends.files  # noqa: F401 - here once, and not in each of so many short lives
from tests.fault.journals import whole_lines

Image = dict[str, int]
"""What is under each key: the number of its bytes' version, of which they are made."""

_LARGEST_BYTES = 300_000
_KEYS = 30
_LONGEST_LIFE_S = 0.4
_WRONG = 7


def bytes_of(version: int) -> torch.Tensor:
    """Return the bytes of a version: their number and their values follow from it."""
    rng = np.random.default_rng(version)
    nbytes = int(rng.choice([0, 1, 100, 4096, 70_000, _LARGEST_BYTES]))
    largest = 256 if version % 2 else 3  # every other one can be compressed
    return torch.from_numpy(rng.integers(0, largest, nbytes, dtype=np.uint8))


class Journal:
    """What a worker says it does: lines in a file that outlives it.

    Args:
        path: of the file; lines are added, after the last whole one.
    """

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.ftruncate(self._fd, len("".join(line + "\n" for line in whole_lines(path)).encode()))

    def say(self, what: str, image: Mapping[str, int] | None = None) -> None:
        """Add a line.  A worker that is killed has said all of it, or not."""
        os.write(self._fd, (json.dumps([what, image]) + "\n").encode())

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


def read_journal(path: Path) -> tuple[list[Image], str]:
    """Return what may be durable, and what the last worker was at when it died."""
    possible: list[Image] = [{}]
    last = "opening"
    for line in whole_lines(path):
        what, image = json.loads(line)
        last = what
        if what == "flushing":
            possible.append(image)
        elif what in ("flushed", "found"):
            possible = possible[-1:] if what == "flushed" else [image]
            last = "between"
    return possible, last


def open_store(directory: Path, codec: str | None) -> ts.Store:
    """Open the store: a host tier that is much too small, above a durable one."""
    options = {"path": str(directory / "store"), "durable": True, "aio_block_size": "64KiB"}
    tiers = [
        ts.TierConfig("host", "pinned", "1MiB", options={"host_mem_block_size": "1MiB"}),
        ts.TierConfig("disk", "files", "64MiB", options=options, codec=codec),
    ]
    return ts.Store(ts.StoreConfig(tiers))


class Worker:
    """One life: opens, checks, and changes things until it is killed.

    Args:
        directory: with the store and the journal.
        seed: of everything that is random here.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._possible, _ = read_journal(directory / "journal")
        self._journal = Journal(directory / "journal")
        self._version = seed * 1_000_000
        self._store = open_store(directory, "lz4" if seed % 3 == 0 else None)
        self._durable: Image = {}
        self._there: Image = {}
        self._is_renamed = False  # since the last flush of every key

    def check(self) -> None:
        """Compare what is found with what the journal says: one of the images, whole, and nothing else."""
        keys = set(self._store)
        candidates = [image for image in self._possible if set(image) == keys]
        for image in reversed(candidates):
            if all(torch.equal(self._store.get(key), bytes_of(version)) for key, version in image.items()):
                self._durable, self._there = dict(image), dict(image)
                self._journal.say("found", image)
                return
        wanted = [sorted(image.items()) for image in self._possible]
        raise AssertionError(f"found {sorted(keys)}, which is none of {wanted}")

    def live(self) -> None:
        """Do things at random, for ever."""
        deeds = [self._put] * 6 + [self._replace, self._write, self._evict] * 3
        deeds += [self._drop, self._rename, self._flush, self._flush, self._flush_some, self._get]
        while True:
            deed = self._random.choice(deeds)
            try:
                deed()
            except ts.CapacityError:
                self._flush()  # the versions of the last flush may fill the disk

    def end(self) -> None:
        """Close the store as it should be."""
        with self._doing("closing", dict(self._there)):
            self._store.close()

    @contextmanager
    def _doing(self, what: str, image: Image | None = None) -> Iterator[None]:
        self._journal.say("flushing" if image is not None else what, image)
        yield
        self._journal.say("flushed" if image is not None else "between")

    def _new_version(self) -> int:
        self._version += 1
        return self._version

    def _some_key(self) -> str | None:
        return self._random.choice(sorted(self._there)) if self._there else None

    def _put(self) -> None:
        key = f"key {self._random.randrange(_KEYS)}"
        if key not in self._there:
            version = self._new_version()
            with self._doing("put"):
                self._store.put(key, bytes_of(version))
            self._there[key] = version

    def _replace(self) -> None:
        if (key := self._some_key()) is not None:
            version = self._new_version()
            with self._doing("replace"):
                self._store.put(key, bytes_of(version), replace=True)
            self._there[key] = version

    def _write(self) -> None:
        if (key := self._some_key()) is None:
            return
        version = next(
            v for v in iter(self._new_version, 0) if len(bytes_of(v)) == len(bytes_of(self._there[key]))
        )
        with self._doing("write"), self._store.lease(key, tier="host", write=True) as lease:
            lease.tensor.copy_(bytes_of(version))
        self._there[key] = version

    def _evict(self) -> None:
        if (key := self._some_key()) is not None:
            with self._doing("evict"):
                self._store.evict(key, to="disk").result()

    def _drop(self) -> None:
        if (key := self._some_key()) is not None:
            with self._doing("drop"):
                self._store.drop(key)
            del self._there[key]

    def _rename(self) -> None:
        if (key := self._some_key()) is not None:
            name = f"key {self._random.randrange(_KEYS)}"
            if name != key:
                self._is_renamed = True
                with self._doing("rename"):
                    self._store.rename({key: name}, replace=True)
                self._there[name] = self._there.pop(key)

    def _get(self) -> None:
        if (key := self._some_key()) is not None:
            with self._doing("get"):
                assert torch.equal(self._store.get(key), bytes_of(self._there[key])), key

    def _flush(self) -> None:
        with self._doing("flush", dict(self._there)):
            self._store.flush()
        self._durable, self._is_renamed = dict(self._there), False

    def _flush_some(self) -> None:
        if self._is_renamed or not self._there:
            return  # what survives of the others is harder to say then
        names = self._random.sample(sorted(self._there), k=min(3, len(self._there)))
        image = {key: version for key, version in self._durable.items() if key in self._there}
        image |= {key: self._there[key] for key in names}
        with self._doing("flush some", image):
            self._store.flush(*names)
        self._durable = image


class Life(Protocol):
    """What a process does until it is killed."""

    def check(self) -> None:
        """Compare what is found with what the journal says."""

    def live(self) -> None:
        """Do things at random, for ever."""

    def end(self) -> None:
        """Close the store as it should be."""


def _live(make: Callable[[Path, int], Life], directory: Path, seed: int, opened: int) -> None:
    """Be a worker, in a process of its own, that says on a pipe when it has opened.  Never returns."""
    try:
        worker = make(directory, seed)
        worker.check()
        os.write(opened, b"!")
        if seed % 10 == 9:
            worker.end()
            os._exit(0)
        worker.live()
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
    os._exit(_WRONG)


def kill_one(directory: Path, seed: int, make: Callable[[Path, int], Life]) -> str:
    """Let a worker live, and kill it at a random moment: of every four, three after they have opened.

    Args:
        directory: where it works.
        seed: of what is random.
        make: opens, in a process of its own.

    Returns:
        What it was at.

    Raises:
        AssertionError: it died of something else, which it has shown on stderr.
    """
    life_s = random.Random(-seed).uniform(0, _LONGEST_LIFE_S)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    has_opened, opened = os.pipe()
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
        _live(make, directory, seed, opened)
    os.close(opened)
    with os.fdopen(has_opened, "rb") as said:
        if seed % 4:  # however slow the machine is
            said.read(1)
    signal.sigtimedwait({signal.SIGCHLD}, life_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    signal.sigtimedwait({signal.SIGCHLD}, 0)  # this one's, if the kill is what made it come
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"worker {seed} ended with {code}"
    return "closed" if code == 0 else read_journal(directory / "journal")[1]


def main(make: Callable[[Path, int], Life] = Worker, description: str | None = __doc__) -> int:
    """Kill workers and print what they were at as JSON."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    directory: Path = options.directory
    directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    moments: Counter[str] = Counter()
    for trial in range(options.trials):
        moments[kill_one(directory, options.seed + trial, make)] += 1
    sys.stdout.write(json.dumps(dict(moments.most_common())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
