"""The training peers by name: plain PyTorch, tierstore, and DeepSpeed, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import tierstore as ts
from bench.peers import usage
from bench.peers.usage import metered
from bench.peers.workers import Answer, Subject
from bench.peers.zero import ZeroTrainee
from bench.workload import Trainee, Workload

OURS, PLAIN = "tierstore", "plain"
DEEPSPEED = ("deepspeed", "deepspeed-pipelined")


class InTraining(Protocol):
    """Something that trains."""

    def steps(self, count: int) -> None:
        """Train so many steps; return when nothing of them is left to do."""

    def losses(self) -> list[float]:
        """Return the losses of all steps so far."""


class Looped:
    """`bench.workload`'s loop, plain or offloaded.

    Args:
        workload: the model.
        config: how it is offloaded; ``None``: not at all.
    """

    def __init__(self, workload: Workload, config: ts.OffloadConfig | None) -> None:
        self._trainee = Trainee(workload, config)

    def steps(self, count: int) -> None:
        """Train, and wait until no copy is under way."""
        self._trainee.seconds_a_step(count)

    def losses(self) -> list[float]:
        """Return the losses of all steps so far."""
        return [float(loss) for loss in self._trainee.losses]


class Zero:
    """DeepSpeed's loop."""

    def __init__(self, workload: Workload, path: Path, *, is_pipelined: bool, ranks: int = 1) -> None:
        self._trainee = ZeroTrainee(workload, path, is_pipelined=is_pipelined, ranks=ranks)

    def steps(self, count: int) -> None:
        """Train; a step of DeepSpeed's ends when its bytes are written."""
        for _ in range(count):
            self._trainee.step()

    def losses(self) -> list[float]:
        """Return the losses of all steps so far."""
        return [float(loss) for loss in self._trainee.losses]


def config_on_disk(workload: Workload, path: Path, host_bytes: int) -> ts.OffloadConfig:
    """Compute in host memory, keep so many bytes of state there, the rest on disk."""
    return ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=host_bytes,
        offload_disk_size=16 * workload.parameter_bytes,
        offload_path=str(path),
    )


OpenPeer = Callable[[Workload, Path, int], InTraining]
"""Takes the model, a directory of its own, and the host quota in bytes, which only ours heeds."""

PEERS: dict[str, OpenPeer] = {
    PLAIN: lambda workload, _path, _host: Looped(workload, None),
    OURS: lambda workload, path, host: Looped(workload, config_on_disk(workload, path, host)),
    DEEPSPEED[0]: lambda workload, path, _host: Zero(workload, path, is_pipelined=False),
    DEEPSPEED[1]: lambda workload, path, _host: Zero(workload, path, is_pipelined=True),
}


def open_subject(name: str) -> Subject:
    """Open a peer by its name."""
    return Steps(name, PEERS[name])


class Steps:
    """Asked for turns of several steps.

    Args:
        name: of the peer, and of its directory.
        open_peer: makes it.
    """

    def __init__(self, name: str, open_peer: OpenPeer) -> None:
        self._name = name
        self._open_peer = open_peer
        self._trainee: InTraining | None = None

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Prepare the model, train some steps, tell the losses."""
        match ask:
            case "prepare":
                return self._prepare(arguments)
            case "turn":
                return self._turn(int(str(arguments["steps"])))
            case _:
                return {"losses": [] if self._trainee is None else self._trainee.losses()}

    def _prepare(self, arguments: Mapping[str, object]) -> Answer:
        workload, path = Workload(int(str(arguments["dim"]))), Path(str(arguments["path"])) / self._name
        idle_bytes = usage.resident_bytes()
        self._trainee = self._open_peer(workload, path, int(str(arguments["host_bytes"])))
        peak_bytes = usage.peak_resident_bytes()
        usage.reset_peak()
        return {"idle_bytes": idle_bytes, "peak_bytes": peak_bytes}

    def _turn(self, steps: int) -> Answer:
        assert self._trainee is not None
        taken = metered(lambda: self._trained().steps(steps))
        return {
            "usage": taken.to_mapping(),
            "steps": steps,
            "peak_bytes": usage.peak_resident_bytes(),
            "proportional_bytes": usage.proportional_bytes(),
        }

    def _trained(self) -> InTraining:
        assert self._trainee is not None
        return self._trainee
