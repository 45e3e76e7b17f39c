"""The programs of the how-to run under torchrun, and are started again where a process is killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from torch import distributed

from tests.docs import blocks

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


def torchrun(folder: Path, program: str) -> tuple[dict[int, tuple[int, float]], str]:
    """Run a program in two processes; return where each began and what it came to, and all that was said."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(blocks.ROOT), *sys.path]),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # see the page
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d", "--max-restarts=1"]
    command += ["--rdzv-endpoint=localhost:0", "--nnodes=1", "--nproc-per-node=2", program]
    done = subprocess.run(command, check=False, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Nothing but the number: of two processes, one may write between the other's line and its end.
    found = re.findall(r"rank (\d) began at step (\d+): (-?\d+\.\d+(?:e[-+]\d+)?)", done.stdout)
    return {int(rank): (int(step), float(total)) for rank, step, total in found}, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")
@pytest.mark.parametrize("what", ["dense", "tables"])
def test_a_process_that_is_killed_is_started_again_and_goes_on_from_the_last_checkpoint(
    tmp_path: Path, what: str
) -> None:
    programs = [each.text for each in blocks.blocks(PAGE) if "def main" in each.text]
    assert len(programs) == 2
    program = programs[what == "tables"]
    ends = {}
    for name, start in (("whole", "train.py"), ("killed", "killed.py")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "train.py").write_text(program, encoding="utf-8")
        (folder / "killed.py").write_text(KILLED, encoding="utf-8")
        ends[name], said = torchrun(folder, start)
        assert sorted(each.name for each in (folder / "offload").iterdir()) == ["rank-0", "rank-1"]
        assert ("exitcode: -9" in said) == (name == "killed")
    assert {rank: step for rank, (step, _) in ends["whole"].items()} == {0: 0, 1: 0}
    assert {rank: step for rank, (step, _) in ends["killed"].items()} == {0: 4, 1: 4}
    (total,) = {total for each in ends.values() for _, total in each.values()}
    assert total
