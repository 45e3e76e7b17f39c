"""The peers that shard, by name: FSDP2, FSDP2 with tierstore, and DeepSpeed's ZeRO-3; of two ranks each.

Who is asked by the parent trains nothing: it starts a process for each rank, asks all of them the same at
the same time, and adds up what they say.  Each rank computes with one thread.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from torch import distributed

import tierstore as ts
from bench.peers import ops
from bench.peers.trainees import DEEPSPEED, OURS, PLAIN, OpenPeer, Steps, Zero, config_on_disk
from bench.peers.usage import Usage
from bench.peers.workers import Answer, Subject, Worker, required
from bench.shards import ShardedTrainee
from bench.workload import Workload

RANKS = 2
_OF = "@"  # "deepspeed@1" is rank 1 of that peer


class FullyShard:
    """A rank of FSDP2's, offloaded or not.

    Args:
        workload: the model.
        config: how shards are offloaded; ``None``: not at all.
    """

    def __init__(self, workload: Workload, config: ts.OffloadConfig | None) -> None:
        distributed.init_process_group("gloo")
        self._trainee = ShardedTrainee(workload, config)

    def steps(self, count: int) -> None:
        """Train, and wait until no copy is under way in any rank."""
        self._trainee.steps(count)

    def losses(self) -> list[float]:
        """Return the losses of all steps so far."""
        return self._trainee.losses


PEERS: dict[str, OpenPeer] = {
    PLAIN: lambda workload, _path, _host: FullyShard(workload, None),
    OURS: lambda workload, path, host: FullyShard(workload, config_on_disk(workload, path, host)),
    DEEPSPEED[0]: lambda workload, path, _host: Zero(workload, path, is_pipelined=False, ranks=RANKS),
    DEEPSPEED[1]: lambda workload, path, _host: Zero(workload, path, is_pipelined=True, ranks=RANKS),
}
"""One rank of each; the host quota is that of all ranks together."""


def open_subject(name: str) -> Subject:
    """Open a peer by its name, or a rank of one."""
    peer, _, rank = name.partition(_OF)
    if not rank:
        return RankedPeer(name)
    os.environ.update({"RANK": rank, "LOCAL_RANK": rank})
    return Steps(peer, PEERS[peer])


class RankedPeer:
    """A process for each rank, which are asked together.

    Raises:
        Absent: DeepSpeed is not installed, or cannot build its operators.
    """

    def __init__(self, name: str) -> None:
        if name in DEEPSPEED:
            required("deepspeed")
            for each in ops.NEEDED:
                ops.load(each)
        self._name = name
        self._ranks: list[Worker] = []

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Ask all ranks; return what they say together."""
        try:
            match ask:
                case "close":
                    self._close()
                    return {}
                case "prepare":
                    self._start(Path(str(arguments["path"])))
            with ThreadPoolExecutor(RANKS) as pool:
                return together(list(pool.map(lambda each: each.ask(ask, arguments), self._ranks)))
        except BaseException:
            self._close()
            raise

    def _start(self, scratch: Path) -> None:
        os.environ.update(_surroundings_of_ranks())
        for rank in range(RANKS):
            name = f"{self._name}{_OF}{rank}"
            self._ranks.append(Worker("shards", name, scratch / "logs" / f"{name}.log"))

    def _close(self) -> None:
        with ThreadPoolExecutor(RANKS) as pool:  # each may wait for the others
            list(pool.map(Worker.close, self._ranks))
        self._ranks = []


def _surroundings_of_ranks() -> dict[str, str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def together(answers: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Add up what ranks say: bytes and processor seconds are of all, seconds of the slowest, steps of each.

    Losses are those of one rank after the other.
    """
    found: dict[str, object] = {}
    for name, first in answers[0].items():
        values = [answer[name] for answer in answers]
        if name == "usage":
            usages = [Usage.from_mapping(each) for each in values]  # type: ignore[arg-type]  # as was sent
            total = sum(usages[1:], usages[0]).to_mapping()
            found[name] = {**total, "seconds": max(each.seconds for each in usages)}
        elif isinstance(first, list):
            found[name] = [loss for each in values if isinstance(each, list) for loss in each]
        elif name.endswith("_bytes"):
            found[name] = sum(int(str(each)) for each in values)
        else:
            found[name] = first
    return found
