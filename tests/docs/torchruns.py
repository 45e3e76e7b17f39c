"""torchrun where everything is imported already: the processes that it starts are forked from one.

``python -m tests.docs.torchruns RUNS``: of each run of a JSON list, its folder, which becomes the working
directory, and torchrun's words.  What it says goes to ``stdout.txt`` and ``stderr.txt`` there; after one
that fails none is run.  Importing PyTorch takes a process seconds, and a run has three or more of them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.forked_programs import run_program


def torchrun(*runs: tuple[Path, Sequence[str]]) -> list[tuple[str, str]]:
    """Run torchrun in folders, one after the other; return what each said on stdout and stderr.

    Args:
        *runs: of each the folder and torchrun's words, with the program as an absolute path.

    Raises:
        AssertionError: one ended with a status other than 0, with all that it said.
    """
    written = json.dumps([(str(folder), list(words)) for folder, words in runs])
    done = run_program(
        "tests.docs.torchruns",
        written,
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="lo",
        TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # see docs/how-to/run-on-several-processes.md
    )
    said = [
        ((folder / "stdout.txt").read_text(), (folder / "stderr.txt").read_text())
        for folder, _ in runs
        if (folder / "stderr.txt").exists()
    ]
    assert done.returncode == 0, (done.stderr, said)
    return said


def _run_in_child(folder: str, words: Sequence[str]) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    from torch.distributed.run import main

    os.chdir(folder)
    for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)
    status = 1
    try:
        main(["--run-path", "--start-method", "fork", *words])
        sys.stdout.flush()
        status = 0
    finally:
        if status:
            sys.excepthook(*sys.exc_info())
        os._exit(status)


if __name__ == "__main__":
    sys.exit(any(_run_in_child(folder, words) for folder, words in json.loads(sys.argv[1])))
