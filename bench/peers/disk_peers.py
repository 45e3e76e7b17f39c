"""The disk peers by name, and one turn of one of them: write, read, compare."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from bench.peers import disk_native, disk_python, disk_store, usage
from bench.peers.diskjob import DiskJob, DiskPeer, Way, check
from bench.peers.usage import Usage, metered
from bench.peers.workers import Answer, Subject

OURS = "tierstore"
PEERS: dict[str, Callable[[], DiskPeer | disk_native.Fio]] = {
    "fio-psync": lambda: disk_native.Fio("psync"),
    "fio-libaio": lambda: disk_native.Fio("libaio"),
    "fio-io_uring": lambda: disk_native.Fio("io_uring"),
    "deepspeed-aio": disk_native.DeepSpeedAio,
    "kvikio": disk_native.Kvikio,
    OURS: disk_store.Evicted,
    "tierstore-io_uring": lambda: disk_store.Evicted(engine="io_uring"),
    "tierstore-no-checksum": lambda: disk_store.Evicted(checksum=False),
    "tierstore-put-get": disk_store.PutGot,
    "torch.save": disk_python.torch_save,
    "safetensors": disk_python.safetensors,
    "zarr": disk_python.zarr,
    "aiofiles": disk_python.Aiofiles,
}


def open_subject(name: str) -> Subject:
    """Open a peer by its name.

    Raises:
        Absent: it cannot run here.
    """
    peer = PEERS[name]()
    return FioTurns(name, peer) if isinstance(peer, disk_native.Fio) else Turns(name, peer)


class FioTurns:
    """Asked for turns of fio."""

    def __init__(self, name: str, peer: disk_native.Fio) -> None:
        self._name = name
        self._peer = peer
        self._job: DiskJob | None = None

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Prepare, take a turn, finish."""
        match ask:
            case "prepare":
                self._job = _own(DiskJob.from_mapping(arguments), self._name)
                self._peer.prepare(self._job)
                return {"way": self._peer.way.value, "idle_bytes": 0}
            case "turn":
                phases = {rw: self._peer.measured(rw).to_mapping() for rw in ("write", "read")}
                return phases | {"verified_bytes": self._peer.verified_bytes}
            case _:
                _remove(self._job)
                return {}


class Turns:
    """Asked for turns of any other peer.  Each turn writes bytes that were never there before."""

    def __init__(self, name: str, peer: DiskPeer) -> None:
        self._name = name
        self._peer = peer
        self._job: DiskJob | None = None
        self._turn = 0

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Prepare, take a turn, finish."""
        match ask:
            case "prepare":
                self._job = _own(DiskJob.from_mapping(arguments), self._name)
                idle_bytes = usage.resident_bytes()
                self._peer.prepare(self._job)
                return {"way": self._peer.way.value, "idle_bytes": idle_bytes}
            case "turn":
                assert self._job is not None
                return self._take_turn(self._job)
            case _:
                if self._job is not None:
                    self._peer.finish()
                    _remove(self._job)
                    self._job = None
                return {}

    def _take_turn(self, job: DiskJob) -> Answer:
        self._turn += 1
        for index, tensor in enumerate(job.expected(self._turn)):
            self._peer.give(index, tensor)
        usage.reset_peak()
        phases = self._phases(job)
        answer: dict[str, object] = {name: taken.to_mapping() for name, taken in phases.items()}
        answer["peak_bytes"] = usage.peak_resident_bytes()
        answer["proportional_bytes"] = usage.proportional_bytes()
        check(self._peer, job, self._turn)
        return answer | {"verified_bytes": job.nbytes}

    def _phases(self, job: DiskJob) -> dict[str, Usage]:
        peer = self._peer
        phases = {}
        if isinstance(peer, disk_store.Evicted):
            phases["put"] = peer.put()
        if peer.way is Way.DIRECT:
            return phases | {"write": metered(peer.write), "read": metered(peer.read)}

        def write_and_sync() -> None:
            peer.write()
            sync(job.path)

        phases["write"] = metered(write_and_sync)
        drop_pages(job.path)
        phases["read"] = metered(peer.read)
        phases["warm read"] = metered(peer.read)
        return phases


def sync(directory: Path) -> None:
    """Let every file of a directory, and its names, reach the drive."""
    for path in [directory, *directory.rglob("*")]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def drop_pages(directory: Path) -> None:
    """Drop what the page cache holds of the files of a directory; they have been synced."""
    for path in filter(Path.is_file, directory.rglob("*")):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _own(job: DiskJob, name: str) -> DiskJob:
    """Return the same job in a directory that no other peer uses."""
    path = job.path / name
    path.mkdir(parents=True)
    return replace(job, path=path)


def _remove(job: DiskJob | None) -> None:
    if job is not None:
        shutil.rmtree(job.path, ignore_errors=True)
