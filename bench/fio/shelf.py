"""The stores that jobs work on: opened once for all jobs with equal keys, closed after the last.

Uses public names of tierstore only.  Not for several threads.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import tierstore as ts
from bench.fio.job import Job, StoreKeys
from bench.place import scratch


class Held:
    """A store and what it was opened with, so that it can be opened again."""

    def __init__(self, keys: StoreKeys, directory: Path) -> None:
        self.keys = keys
        self.directory = directory
        self._config = _config(keys, directory)
        self.store = ts.Store(self._config)

    def reopen(self) -> None:
        """Open the store again; it was closed."""
        self.store = ts.Store(self._config)

    def drop_cache(self) -> None:
        """Ask the system to forget what it holds in memory of the disk tier's files."""
        for path in self.directory.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                try:
                    os.fdatasync(descriptor)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(descriptor)


class Shelf:
    """Stores by their keys.  A context manager; leaving it closes what is open.

    Args:
        scratch: where disk tiers are made, for jobs without ``directory=``.
        jobs: all that will ask for a store, in any order.
    """

    def __init__(self, scratch: Path, jobs: Iterable[Job]) -> None:
        self._scratch = scratch
        self._held: dict[tuple[StoreKeys, str], tuple[Held, contextlib.ExitStack]] = {}
        self._awaited = Counter((job.store, job.directory) for job in jobs for _ in range(job.numjobs))

    def take(self, job: Job) -> Held:
        """Return the job's store, opened now if it is the first.

        Raises:
            TierStoreError: it cannot be opened so.
            PlaceError: its directory cannot be made.
        """
        place = (job.store, job.directory)
        if place not in self._held:
            with contextlib.ExitStack() as room:
                parent = Path(job.directory) if job.directory else self._scratch
                directory = room.enter_context(scratch(parent, "store-"))
                held = Held(job.store, directory)
                room.callback(lambda: held.store.close(flush=False))  # whatever it is by then
                self._held[place] = held, room.pop_all()
        return self._held[place][0]

    def give(self, job: Job) -> None:
        """One thread of the job has ended; after the last that awaits it, the store is closed."""
        place = (job.store, job.directory)
        self._awaited[place] -= 1
        if not self._awaited[place] and place in self._held:
            self._held.pop(place)[1].close()

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for _, room in self._held.values():
            room.close()
        self._held.clear()


def _config(keys: StoreKeys, directory: Path) -> ts.StoreConfig:
    tiers = []
    if keys.device_bytes:
        link = {} if keys.link_bandwidth is None else {"link_bandwidth": keys.link_bandwidth}
        options: dict[str, object] = {"device": "emulated", **link}
        tiers.append(ts.TierConfig("device", "device", keys.device_bytes, options=options))
    tiers.append(ts.TierConfig("host", "pinned", keys.host_bytes))
    if keys.disk_bytes:
        tiers.append(_disk(keys, directory))
    return ts.StoreConfig(tiers, eviction=keys.eviction)


def _disk(keys: StoreKeys, directory: Path) -> ts.TierConfig:
    options = {"path": str(directory), **dict(keys.options)}
    return ts.TierConfig("disk", "files", keys.disk_bytes, options=options, codec=keys.codec or None)
