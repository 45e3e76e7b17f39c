"""What offloading costs a step of data parallel training, in many processes of one machine.

``python -m bench.processes`` starts the processes and asks the question; each of them is
``python bench/processes.py FOLDER RANK PROCESSES SCALE REPEATS WARMUPS``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.command import Question, Settings, UnmeasurableError, main
from bench.measure import Spread, ratios, stopwatch, take_turns
from bench.record import Better, Figure
from bench.training import SETTLING_TURNS, STEPS_A_TURN, in_memory
from bench.workload import BATCH, Workload
from tierstore.training import offload

PROCESSES, THREADS = 8, 1
SHARE = 1 / 4  # of the model of `step-in-memory`: eight processes have it twice, with Adam's state
_TIMEOUT = timedelta(minutes=10)


class Replica:
    """One process's model, wrapped and in training.

    Args:
        workload: which model.
        is_offloaded: whether its state is in a store; the quotas are of all processes together.
    """

    def __init__(self, workload: Workload, *, is_offloaded: bool) -> None:
        self._dim = workload.dim
        model = workload.new_model()
        self._optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
        self._runner = DistributedDataParallel(model)
        self._chance = torch.Generator().manual_seed(1 + distributed.get_rank())
        self.losses: list[float] = []
        if is_offloaded:
            config = in_memory(workload).to_mapping()
            config["offload_cpu_size"] = distributed.get_world_size() * 6 * workload.parameter_bytes
            self._run = offload(self._runner, self._optimizer, config)

    def step(self) -> None:
        """Train on the next batch, as any loop does."""
        x = torch.randn(BATCH, self._dim, generator=self._chance)
        y = torch.randn(BATCH, self._dim, generator=self._chance)
        loss = torch.nn.functional.mse_loss(self._runner(x), y)
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())

    def seconds_a_step(self) -> float:
        """Train some steps in all processes; return the seconds of one, of the slowest."""
        distributed.barrier()
        return stopwatch(self._steps) / STEPS_A_TURN

    def _steps(self) -> None:
        for _ in range(STEPS_A_TURN):
            self.step()
        distributed.barrier()


def work(folder: Path, rank: int, processes: int, scale: float, repeats: int, warmups: int) -> None:
    """Be one of the processes; what it has measured and trained goes to a file of its own."""
    torch.set_num_threads(THREADS)
    store = vars(distributed)["FileStore"](str(folder / "group"), processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=_TIMEOUT)
    workload = Workload.scaled(SHARE * scale)
    plain, ours = (Replica(workload, is_offloaded=each) for each in (False, True))
    seconds = take_turns(
        [lambda: {"plain": plain.seconds_a_step()}, lambda: {"offloaded": ours.seconds_a_step()}],
        repeats=repeats,
        warmups=max(SETTLING_TURNS, warmups),
    )
    found = {"seconds": seconds, "losses": [plain.losses, ours.losses]}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()


def step_of_eight(settings: Settings) -> Figure:
    """Train in eight processes of one thread each, offloaded and not, in turns."""
    if not distributed.is_available():
        raise UnmeasurableError("PyTorch was built without torch.distributed")
    folder = settings.scratch / "processes"
    folder.mkdir()
    words = [str(PROCESSES), str(settings.scale), str(settings.repeats), str(settings.warmups)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, __file__, str(folder), str(rank), *words],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for rank in range(PROCESSES)
    ]
    ends = [each.wait() for each in started]
    if any(ends):
        raise RuntimeError(f"the processes ended with {ends}")
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    return _figure(Workload.scaled(SHARE * settings.scale), found)


def _figure(workload: Workload, found: list[Mapping[str, Mapping[str, list[float]]]]) -> Figure:
    seconds = found[0]["seconds"]
    pairs = [pair for each in found for pair in zip(*each["losses"], strict=True)]
    same = sum(plain == ours for plain, ours in pairs)
    times = ratios(seconds["offloaded"], seconds["plain"])
    details = {f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()}
    details["losses"] = f"{same} of {len(pairs)} equal, bit for bit"
    details["times DistributedDataParallel alone"] = str(times)
    what = (
        f"step of {workload} in {PROCESSES} processes of one thread (gloo), everything fits, against "
        "DistributedDataParallel alone"
    )
    return Figure("step-of-eight", what, times.median, "x its time", 1.2, 1.05, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {"step-of-eight": step_of_eight}

if __name__ == "__main__":
    if len(sys.argv) == 7 and not sys.argv[1].startswith("-"):
        folder, rank, processes, scale, repeats, warmups = sys.argv[1:]
        work(Path(folder), int(rank), int(processes), float(scale), int(repeats), int(warmups))
    else:
        sys.exit(main("bench.processes", QUESTIONS))
