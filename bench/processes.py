"""What offloading costs a step of data parallel training, in many processes of one machine.

``python -m bench.processes`` starts the processes and asks the question; each of them is
``python bench/processes.py FOLDER RANK PROCESSES SCALE REPEATS WARMUPS``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

sys.path.append(str(Path(__file__).resolve().parent.parent))

from bench.command import Question, Settings, main
from bench.measure import Spread, ratios, stopwatch, take_turns
from bench.ranks import found_by_ranks, join_group, leave_group
from bench.record import Better, Figure
from bench.training import SETTLING_TURNS, STEPS_A_TURN, in_memory
from bench.workload import Workload, train_step
from tierstore.training import offload

PROCESSES, THREADS = 8, 1
SHARE = 1 / 4  # of the model of `step-in-memory`: eight processes have it twice, with Adam's state


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
        self.losses.append(train_step(self._runner, self._optimizer, self._dim, self._chance).item())

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
    join_group(folder, rank, processes)
    workload = Workload.scaled(SHARE * scale)
    plain, ours = (Replica(workload, is_offloaded=each) for each in (False, True))
    seconds = take_turns(
        [lambda: {"plain": plain.seconds_a_step()}, lambda: {"offloaded": ours.seconds_a_step()}],
        repeats=repeats,
        warmups=max(SETTLING_TURNS, warmups),
    )
    leave_group(folder, rank, {"seconds": seconds, "losses": [plain.losses, ours.losses]})


def step_of_eight(settings: Settings) -> Figure:
    """Train in eight processes of one thread each, offloaded and not, in turns."""
    words = [str(settings.scale), str(settings.repeats), str(settings.warmups)]
    found = found_by_ranks(__file__, settings.scratch / "processes", PROCESSES, words, THREADS)
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
