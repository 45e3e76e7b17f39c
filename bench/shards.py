"""What tiers cost, and save, a model that FSDP2 has sharded over four processes (gloo) of one machine.

``python -m bench.shards`` starts the processes and asks; each of them is ``python bench/shards.py FOLDER
RANK PROCESSES WHAT SCALE REPEATS WARMUPS``.  What the figures stand for, as there is no accelerator:

1. `shards-host`: processes compute on the CPU, so the memory that FSDP gathers into is host memory.
   ``CPUOffloadPolicy`` has nothing to copy then: shards, gradients and state stay where they are, and it
   waits for no link.  So do ours: the tier in which everything fits is the memory that is computed in, and
   nothing is to be won by fetching ahead.  What hooks, leases and books take is in the figure, and what is
   saved as ours gather in memory that processes share, where FSDP sends (ADR 0034).  It says nothing of a
   GPU, where the policy copies each shard in for forward and for backward, each gradient out, and steps on
   the host.
2. `shards-disk`: the disk is the machine's own, and all processes use it at the same time.  Its bandwidth is
   that of plain threads in all of them at once.  A step's floor is the longer of two: the bytes that must
   move, at that bandwidth, and what FSDP2 takes with everything in memory: collectives, products and the
   optimizer's steps.  Both are told on their own, too.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import distributed

sys.path.append(str(Path(__file__).resolve().parent.parent))

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Run, Spread, ratios, stopwatch, take_turns
from bench.ranks import found_by_ranks, join_group, leave_group
from bench.rawdisk import RawDisk
from bench.record import Better, Figure
from bench.store import DISK_BLOCK_BYTES, DISK_THREADS
from bench.training import MIB, SETTLING_TURNS, STATE_TENSORS, STEPS_A_TURN, Floor
from bench.workload import BLOCKS, Block, Workload, train_step, wait_for_copies
from tierstore.training import Offload, offload

PROCESSES, THREADS = 4, 1
SHARE = 1 / 2  # of the model of `step-in-memory`: what gloo sends between four processes takes most of a step
FSDP, OURS = "FSDP2", "tierstore"
HOST_SHARE = 1 / 10
"""Of the state of `shards-disk`: parameters, gradients and both moments."""

RAW_MIB = 64  # of each process


# ---------------------------------------------------------------------- one process


def in_host(workload: Workload, folder: Path) -> ts.OffloadConfig:
    """Everything fits in host memory, which is where computing happens; quotas are of all processes."""
    del folder
    quota = 2 * STATE_TENSORS * workload.parameter_bytes
    return ts.OffloadConfig(device="cpu", offload_cpu_size=quota, offload_disk_size=0)


def on_disk(workload: Workload, folder: Path) -> ts.OffloadConfig:
    """Host memory for a tenth of the state, the rest on disk."""
    return ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=host_bytes(workload),
        offload_disk_size=4 * STATE_TENSORS * workload.parameter_bytes,
        offload_path=str(folder / "tiers"),
    )


def host_bytes(workload: Workload) -> int:
    """Return the quota of `on_disk`, of all processes together."""
    return int(HOST_SHARE * STATE_TENSORS * workload.parameter_bytes)


CONFIGS = {"host": in_host, "disk": on_disk}
"""By what is asked."""


class ShardedTrainee:
    """One process's part of a model that is sharded block by block.

    Args:
        workload: which model.
        config: how its shards are offloaded; ``None``: not by us.
        policy: FSDP's own way to offload them; ``None``: none.
        device: that computes.
    """

    def __init__(
        self,
        workload: Workload,
        config: ts.OffloadConfig | None = None,
        policy: object = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 - immutable
    ) -> None:
        self._dim = workload.dim
        self._device = device
        self._model: Any = sharded(workload, policy, device)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        self._chance = torch.Generator().manual_seed(1 + distributed.get_rank())
        self.losses: list[float] = []
        self._run: Offload | None = None
        if config is not None:
            self._run = offload(self._model, self._optimizer, config)

    def step(self) -> None:
        """Train on the next batch, as any loop does."""
        loss = train_step(self._model, self._optimizer, self._dim, self._chance, self._device)
        self.losses.append(loss.item())

    def seconds_a_step(self) -> float:
        """Train some steps in all processes; return the seconds of one, of the slowest.

        That no copy is under way in the end counts, as it must not be in the other's turn.
        """
        distributed.barrier()
        return stopwatch(lambda: self.steps(STEPS_A_TURN)) / STEPS_A_TURN

    def turn(self, name: str) -> Mapping[str, float]:
        """Return the seconds of a step, and the processor seconds of this process in it."""
        spent = time.process_time()
        step_s = self.seconds_a_step()
        return {name: step_s, f"{name}, processor": (time.process_time() - spent) / STEPS_A_TURN}

    def steps(self, count: int) -> None:
        """Train some steps in all processes; return when no copy is under way in any of them."""
        for _ in range(count):
            self.step()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        if self._run is not None:
            wait_for_copies(self._run.store)
        distributed.barrier()

    def close(self) -> None:
        """End offloading."""
        if self._run is not None:
            self._run.close()

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that this process's tiers have moved, by direction."""
        if self._run is None:
            return {}
        return {f"{a} to {b}": each.nbytes for (a, b), each in self._run.store.stats().traffic.items()}


def sharded(workload: Workload, policy: object, device: torch.device) -> Any:  # noqa: ANN401 - FSDP's class
    """Return the workload's model, each block sharded over all processes before the next one is built."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    how: dict[str, Any] = {"mesh": init_device_mesh(device.type, (distributed.get_world_size(),))}
    if policy is not None:
        how["offload_policy"] = policy
    torch.manual_seed(0)
    blocks: list[Any] = [fully_shard(Block(workload.dim), **how) for _ in range(BLOCKS)]
    return fully_shard(torch.nn.Sequential(*blocks), **how)


def work(
    folder: Path, rank: int, processes: int, what: str, scale: float, repeats: int, warmups: int
) -> None:
    """Be one of the processes; what it has measured and trained goes to a file of its own."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    workload = Workload.scaled(SHARE * scale)
    config, is_disk = CONFIGS[what](workload, folder), what == "disk"
    torch.set_num_threads(THREADS)
    join_group(folder, rank, processes)
    plain = ShardedTrainee(workload, policy=None if is_disk else CPUOffloadPolicy(pin_memory=False))
    ours = ShardedTrainee(workload, config)
    runs: list[Run] = [lambda: plain.turn(FSDP), lambda: ours.turn(OURS)]
    with contextlib.ExitStack() as stack:
        if is_disk:
            path, nbytes = folder / f"raw-{rank}", raw_bytes(scale)
            raw = RawDisk(path, nbytes, threads=DISK_THREADS, block_bytes=DISK_BLOCK_BYTES)
            runs.append(_all_at_once(stack.enter_context(raw), workload))
        seconds = take_turns(runs, repeats=repeats, warmups=max(SETTLING_TURNS, warmups))
    found = {"seconds": seconds, "losses": [plain.losses, ours.losses], "moved": ours.moved_bytes()}
    leave_group(folder, rank, found)


def raw_bytes(scale: float) -> int:
    """Return what each process moves to see how fast the disk is."""
    return max(8, round(RAW_MIB * scale)) * MIB


def _all_at_once(raw: RawDisk, workload: Workload) -> Run:
    """Return a turn in which all processes write, read and mix at the same time."""
    read_share = Floor.of(workload.parameter_bytes, host_bytes(workload)).read_share

    def together(move: Callable[[], object]) -> float:
        def all_of_it() -> None:
            move()
            distributed.barrier()

        distributed.barrier()
        return stopwatch(all_of_it)

    return lambda: {
        "write": together(raw.write),
        "read": together(raw.read),
        "mix": together(lambda: raw.mix(read_share)),
    }


# ---------------------------------------------------------------------- the figures

Found = list[Mapping[str, Any]]


def ask(what: str, settings: Settings) -> Found:
    """Start the processes; return what each has found.

    Raises:
        UnmeasurableError: there can be no processes.
        RuntimeError: one of them failed.
    """
    words = [what, str(settings.scale), str(settings.repeats), str(settings.warmups)]
    return found_by_ranks(__file__, settings.scratch / f"shards-{what}", PROCESSES, words, THREADS)


def _details(found: Found) -> dict[str, str]:
    pairs = [pair for each in found for pair in zip(*each["losses"], strict=True)]
    if differ := [pair for pair in pairs if pair[0] != pair[1]]:
        raise AssertionError(f"losses differ from those of FSDP2: {differ}")
    details = {"losses": f"{len(pairs)} of {len(pairs)} equal, bit for bit"}
    for name in (FSDP, OURS):
        spent = zip(*(each["seconds"][f"{name}, processor"] for each in found), strict=True)
        details[f"{name} s"] = str(Spread.of(found[0]["seconds"][name]))
        details[f"{name}, processor s of all processes"] = str(Spread.of(list(map(sum, spent))))
    steps = len(found[0]["losses"][0])
    for direction in found[0]["moved"]:
        nbytes = sum(each["moved"].get(direction, 0) for each in found)
        details[direction] = f"{nbytes / steps / MIB:.0f} MiB a step, of all processes"
    return details


def shards_host(settings: Settings) -> Figure:
    """Train with shards in host memory, in turns with FSDP2's own offloading."""
    found = ask("host", settings)
    seconds = found[0]["seconds"]
    times = ratios(seconds[OURS], seconds[FSDP])
    details = {**_details(found), "times CPUOffloadPolicy": str(times)}
    what = (
        f"step of {Workload.scaled(SHARE * settings.scale)}, sharded over {PROCESSES} processes of one "
        "thread (gloo), shards in host memory, against FSDP2 with CPUOffloadPolicy, which has nothing to "
        "copy where the CPU computes"
    )
    return Figure("shards-host", what, times.median, "x its time", 1.0, 0.8, Better.LOWER, details)


def shards_disk(settings: Settings) -> Figure:
    """Train with shards on disk and a tenth of the state in host memory; compare with the floor."""
    workload = Workload.scaled(SHARE * settings.scale)
    found = ask("disk", settings)
    seconds = found[0]["seconds"]
    floor = Floor.of(workload.parameter_bytes, host_bytes(workload))
    moved = PROCESSES * raw_bytes(settings.scale)
    rates = {name: [moved / s for s in seconds[name]] for name in ("read", "write", "mix")}
    of_bytes = [floor.seconds(*each) for each in zip(*rates.values(), strict=True)]
    floors = list(map(max, of_bytes, seconds[FSDP]))
    sums = [sum(each) for each in zip(of_bytes, seconds[FSDP], strict=True)]
    times = ratios(seconds[OURS], floors)
    details = {
        **_details(found),
        "bytes": f"{floor.read_bytes / MIB:.0f} MiB read, {floor.write_bytes / MIB:.0f} MiB written a step",
        "bytes s": str(Spread.of(of_bytes)),
        **{f"raw {name} GB/s": str(Spread.of([r / 1e9 for r in rate])) for name, rate in rates.items()},
        "times the longer of bytes and FSDP2 in memory": str(times),
        "times bytes alone": str(ratios(seconds[OURS], of_bytes)),
        "times FSDP2 in memory alone": str(ratios(seconds[OURS], seconds[FSDP])),
        "times the sum of both": str(ratios(seconds[OURS], sums)),
    }
    what = (
        f"step of {workload}, sharded over {PROCESSES} processes of one thread (gloo), "
        f"{host_bytes(workload) / MIB:.0f} MiB of host memory in all, rest on disk, against the longer of "
        "the bytes that must move at the bandwidth of raw threads in all processes, and FSDP2's step in "
        "memory"
    )
    return Figure("shards-disk", what, times.median, "x the floor", 1.6, 1.3, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {"shards-host": shards_host, "shards-disk": shards_disk}

if __name__ == "__main__":
    if len(sys.argv) == 8 and not sys.argv[1].startswith("-"):
        folder, rank, processes, what, scale, repeats, warmups = sys.argv[1:]
        work(Path(folder), int(rank), int(processes), what, float(scale), int(repeats), int(warmups))
    else:
        sys.exit(main("bench.shards", QUESTIONS))
