"""The programs of the how-to run under torchrun, and are started again where a process is killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import distributed

from tests.docs import blocks
from tests.docs.torchruns import torchrun
from tests.sampling import tried

PAGE = blocks.ROOT / "docs" / "how-to" / "run-on-several-processes.md"

# Rank 1 dies in its sixth backward pass, after two checkpoints of two steps, in the first of its lives.
KILLED = """
import os, runpy, signal, torch
backward, made = torch.Tensor.backward, []
def counted(self, *args, **kwargs):
    made.append(1)
    if len(made) == 6 and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    return backward(self, *args, **kwargs)
torch.Tensor.backward = counted
runpy.run_path("train.py", run_name="__main__")
"""


WORDS = ["--rdzv-backend=c10d", "--max-restarts=1", "--rdzv-endpoint=localhost:0", "--nnodes=1"]
RUNS = [("whole", "train.py"), ("killed", "killed.py")]

PROGRAMS = {"dense": 2, "shards": 4, "tables": 2}
"""Those of the page, in its order, and in how many processes each runs."""

TRIED = tried(PROGRAMS, always=1)

Said = dict[str, tuple[Path, str, str]]
"""Of each run its folder, and what it said on stdout and stderr."""


@pytest.fixture(scope="module", name="said")
def _said(tmp_path_factory: pytest.TempPathFactory) -> Said:
    """Run the programs that are tried, each to its end, and killed on the way."""
    programs = [each.text for each in blocks.blocks(PAGE) if "def main" in each.text]
    runs = {}
    texts = dict(zip(PROGRAMS, programs, strict=True))
    for what in TRIED:
        processes, program = PROGRAMS[what], texts[what]
        for name, start in RUNS:
            folder = tmp_path_factory.mktemp(f"{what}-{name}")
            (folder / "train.py").write_text(program, encoding="utf-8")
            (folder / "killed.py").write_text(KILLED, encoding="utf-8")
            runs[f"{what} {name}"] = folder, [*WORDS, f"--nproc-per-node={processes}", str(folder / start)]
    said = torchrun(*runs.values())
    return {name: (runs[name][0], *each) for name, each in zip(runs, said, strict=True)}


def ends(stdout: str) -> dict[int, tuple[int, float]]:
    """Return of each process where it began, and what it came to."""
    # Nothing but the number: of two processes, one may write between the other's line and its end.
    found = re.findall(r"rank (\d) began at step (\d+): (-?\d+\.\d+(?:e[-+]\d+)?)", stdout)
    return {int(rank): (int(step), float(total)) for rank, step, total in found}


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")
@pytest.mark.parametrize("what", TRIED)
def test_a_process_that_is_killed_is_started_again_and_goes_on_from_the_last_checkpoint(
    said: Said, what: str
) -> None:
    found, ranks = {}, range(PROGRAMS[what])
    for name, _ in RUNS:
        folder, stdout, stderr = said[f"{what} {name}"]
        found[name] = ends(stdout)
        assert sorted(each.name for each in (folder / "offload").iterdir()) == [
            f"rank-{rank}" for rank in ranks
        ]
        # Of two that fail, torchrun names the one that it notices first: who was killed, or who waited.
        assert ("failed (exitcode: " in stderr) == (name == "killed")
    assert {rank: step for rank, (step, _) in found["whole"].items()} == dict.fromkeys(ranks, 0)
    assert {rank: step for rank, (step, _) in found["killed"].items()} == dict.fromkeys(ranks, 4)
    (total,) = {total for each in found.values() for _, total in each.values()}
    assert total
