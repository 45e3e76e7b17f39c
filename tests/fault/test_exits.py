"""However a program ends with a run open: what is durable is its last checkpoint, and no scratch is left."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.fault.lives import CHECKPOINT, build, sizes, train
from tests.files_disk import finish, open_durable
from tests.files_kept import look, write
from tierstore.training import offload


@pytest.fixture(scope="module")
def lives() -> Iterator[subprocess.Popen[str]]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    with subprocess.Popen(
        [sys.executable, "-m", "tests.fault.lives"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    ) as program:
        yield program
        assert program.stdin is not None
        program.stdin.close()
        assert program.stderr is not None
        said = program.stderr.read()
        assert "Exception ignored" not in said, said


long = pytest.mark.long
ENDS = [
    ("end", 0),
    ("SIGTERM", -15),
    ("fork", 0),
    ("a thread trains", 0),
    *(
        pytest.param(how, status, marks=long)
        for how, status in {
            "raise": 1,
            "raise in a thread": 0,
            "exit": 3,
            "exit in a thread": 0,
            "in a pass": 4,
            "a daemon trains": 0,
            "_exit": 5,
            "SIGKILL": -9,
            "pool": 0,
            "spawn": 0,
        }.items()
    ),
]
KILLED = {"_exit", "SIGTERM", "SIGKILL", "fork", "spawn", "pool"}
"""Ends after which nothing of the program runs any more: `multiprocessing` ends its processes so, too."""


@pytest.mark.parametrize(("how", "status"), ENDS)
def test_an_end_hangs_nothing_keeps_the_last_checkpoint_and_leaves_no_scratch(
    how: str, status: int, lives: subprocess.Popen[str], tmp_path: Path
) -> None:
    assert lives.stdin is not None
    assert lives.stdout is not None
    lives.stdin.write(f"{how}\t{tmp_path}\n")
    lives.stdin.flush()
    ended = int(lives.stdout.readline())
    # PyTorch's C++ may abort a process whose daemon thread is in it when the interpreter is gone.
    assert ended in ((status, -6) if how == "a daemon trains" else (status,))
    assert how in KILLED or not (tmp_path / "scratch").exists()
    ts.Store(ts.OffloadConfig.from_mapping(sizes(tmp_path / "scratch")).store_config()).close()
    assert not (tmp_path / "scratch").exists(), "what a dead one left was swept"

    steps = CHECKPOINT + 12 if how == "a thread trains" else CHECKPOINT
    plain, ours = build(), build()
    train(plain, steps)
    with offload(*ours, {**sizes(tmp_path / "durable"), "durable": True}) as run:
        assert run.resumed is not None
        assert run.resumed.extra == {"step": steps}
    for theirs, own in zip(plain[0].parameters(), ours[0].parameters(), strict=True):
        assert torch.equal(theirs, own)


def test_a_thread_that_goes_on_when_main_has_ended_commits_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:  # as Python 3.12 and later do from then on
        raise RuntimeError(f"can't create new thread at interpreter shutdown: {thread.name}")

    files = open_durable(tmp_path)
    records = write(files, {"a": 5000})
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        finish(files.commit(records))
    files.close()
    assert look(tmp_path) == {"a": "0"}
