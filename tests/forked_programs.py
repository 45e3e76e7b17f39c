"""Programs of tests, each forked from one process that has imported what trainings do: that takes seconds.

`run_program` does what ``python -m MODULE`` would, as often as it is asked.  The process that is forked from
is a test process's own, is started by the first of them, runs no program itself and starts no thread; what
one program imports or changes the next one does not see.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_OUT, _ERR = "stdout", "stderr"
_started: list[subprocess.Popen[bytes]] = []
"""The process that is forked from, if there is one."""


def run_program(
    module: str, *words: str, timeout_s: float = 500.0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; return its status and what it said.

    Args:
        module: what ``python -m`` would be given.
        *words: its arguments.
        timeout_s: after how long it is killed.
        **variables: of its environment, beside those that are there.

    Raises:
        subprocess.TimeoutExpired: it was killed.
    """
    path = os.pathsep.join([str(_ROOT), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    server = _server(environment)
    assert server.stdin is not None
    assert server.stdout is not None
    with tempfile.TemporaryDirectory() as folder:
        server.stdin.write(json.dumps([module, words, environment, str(Path.cwd()), folder]).encode() + b"\n")
        process = int(server.stdout.readline())
        has_ended = bool(select.select([server.stdout], [], [], timeout_s)[0])
        if not has_ended:
            os.kill(process, signal.SIGKILL)
        status = int(server.stdout.readline())
        out, err = ((Path(folder) / name).read_text() for name in (_OUT, _ERR))
    if not has_ended:
        raise subprocess.TimeoutExpired([module, *words], timeout_s, out, err)
    return subprocess.CompletedProcess([module, *words], status, out, err)


def end() -> None:
    """End the process that is forked from, if there is one."""
    while _started:
        with _started.pop() as server:
            assert server.stdin is not None
            server.stdin.close()


def _server(environment: dict[str, str]) -> subprocess.Popen[bytes]:
    if not _started:
        _started.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.forked_programs"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,  # or `select` would not see what was read ahead
                env={**environment, "OMP_NUM_THREADS": "1"},
            )
        )
    return _started[0]


def _serve() -> None:
    """Fork each program that is asked for; say who it is, and how it ended.

    In a child this runs the program and returns, so that the interpreter ends as that of a program does.
    """
    for line in iter(sys.stdin.readline, ""):
        module, words, environment, directory, folder = json.loads(line)
        child = os.fork()
        if not child:
            _begin(environment, directory, Path(folder))
            _run(module, words)
            return
        os.write(1, f"{child}\n".encode())
        os.write(1, f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n".encode())


def _begin(environment: dict[str, str], directory: str, folder: Path) -> None:
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(directory)
    sys.path[0] = directory
    importlib.invalidate_caches()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, name in ((1, _OUT), (2, _ERR)):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), number)


def _run(module: str, words: Sequence[str]) -> None:
    import torch

    torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
    sys.argv[1:] = words
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    import torch

    from tests.imported_ahead import import_ahead

    torch.set_num_threads(1)
    import_ahead()
    _serve()
