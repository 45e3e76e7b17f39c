"""The inference peers by name: plain PyTorch, tierstore, Accelerate's ``disk_offload``, and reading alone."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from bench.peers import usage
from bench.peers.disk_peers import drop_pages, sync
from bench.peers.trainees import config_on_disk
from bench.peers.usage import Usage, metered
from bench.peers.workers import Answer, Subject, required
from bench.rawdisk import RawDisk
from bench.store import DISK_BLOCK_BYTES, DISK_THREADS, align_up
from bench.workload import BATCH, Workload, wait_for_copies
from tierstore.training import offload

OURS, PLAIN = "tierstore", "plain"
ACCELERATE = "accelerate"
COLD, WARM = "cold", "warm"
READ = "read-alone"
"""What computes nothing: the limit of the disk."""


class Inferring(Protocol):
    """A model that computes, a pass at a time."""

    @property
    def model(self) -> Callable[[Tensor], Tensor]:
        """What computes a pass."""
        ...

    def between(self) -> None:
        """Do what has to be done between passes, unmeasured."""

    def settle(self) -> None:
        """Wait until nothing of the passes is left to do; measured."""


class InMemory:
    """The model as it is."""

    def __init__(self, workload: Workload, _path: Path, _host_bytes: int) -> None:
        self.model = workload.new_model()

    def between(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing is left to do."""


class Offloaded:
    """The model in a store, with so many bytes of host memory and the rest on disk."""

    def __init__(self, workload: Workload, path: Path, host_bytes: int) -> None:
        self.model = workload.new_model()
        self._run = offload(self.model, None, config_on_disk(workload, path, host_bytes))

    def between(self) -> None:
        """Nothing: disk is read past the page cache."""

    def settle(self) -> None:
        """Wait for what was read ahead.

        Raises:
            TimeoutError: copies are under way for ever.
        """
        wait_for_copies(self._run.store)


class Mapped:
    """Accelerate: a memory-mapped file for each parameter, copied before each use.

    Its files go through the page cache.  When it is to be cold, their pages are dropped before each
    pass: what a model larger than memory sees.

    Raises:
        Absent: it is not installed.
    """

    def __init__(self, workload: Workload, path: Path, *, is_cold: bool) -> None:
        library = required("accelerate")
        self.model = library.disk_offload(workload.new_model(), str(path))
        self._path, self._is_cold = path, is_cold
        sync(path)

    def between(self) -> None:
        """Drop the pages, or leave them."""
        if self._is_cold:
            drop_pages(self._path)

    def settle(self) -> None:
        """Nothing is read ahead."""


class ReadAlone:
    """Plain threads that read as many bytes as the model has, past the page cache, and compute nothing."""

    def __init__(self, workload: Workload, path: Path, _host_bytes: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        nbytes = align_up(workload.parameter_bytes, DISK_BLOCK_BYTES)
        self._disk = RawDisk(path, nbytes, threads=DISK_THREADS, block_bytes=DISK_BLOCK_BYTES)

    def model(self, x: Tensor) -> Tensor:
        """Read all bytes."""
        self._disk.read()
        return x

    def between(self) -> None:
        """Nothing."""

    def settle(self) -> None:
        """Nothing is left to do."""


PEERS: dict[str, Callable[[Workload, Path, int], Inferring]] = {
    PLAIN: InMemory,
    OURS: Offloaded,
    f"{ACCELERATE}-{COLD}": lambda workload, path, _host: Mapped(workload, path, is_cold=True),
    f"{ACCELERATE}-{WARM}": lambda workload, path, _host: Mapped(workload, path, is_cold=False),
    READ: ReadAlone,
}
"""Each takes the model, a directory of its own, and the host quota in bytes, which only ours heeds."""


def open_subject(name: str) -> Subject:
    """Open a peer by its name."""
    return Passes(name)


class Passes:
    """Asked for turns of several passes."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._peer: Inferring | None = None
        self._outputs = hashlib.sha256()

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Prepare the model, compute some passes, tell a digest of all outputs."""
        match ask:
            case "prepare":
                return self._prepare(arguments)
            case "turn":
                return self._turn(int(str(arguments["passes"])))
            case _:
                return {"digest": self._outputs.hexdigest()}

    def _prepare(self, arguments: Mapping[str, object]) -> Answer:
        self._dim = int(str(arguments["dim"]))
        self._chance = torch.Generator().manual_seed(1)
        path = Path(str(arguments["path"])) / self._name
        idle_bytes = usage.resident_bytes()
        self._peer = PEERS[self._name](Workload(self._dim), path, int(str(arguments["host_bytes"])))
        usage.reset_peak()
        return {"idle_bytes": idle_bytes}

    def _turn(self, passes: int) -> Answer:
        peer = self._peer
        assert peer is not None
        taken = Usage(0.0, 0.0, 0, 0)
        for _ in range(passes):
            x = torch.randn(BATCH, self._dim, generator=self._chance)
            peer.between()
            taken += metered(lambda x=x: self._pass(peer, x))  # type: ignore[misc]
        taken += metered(peer.settle)
        return {"usage": taken.to_mapping(), "passes": passes, "peak_bytes": usage.peak_resident_bytes()}

    def _pass(self, peer: Inferring, x: Tensor) -> None:
        with torch.no_grad():
            output = peer.model(x)
        self._outputs.update(output.numpy().tobytes())
