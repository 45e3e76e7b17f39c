"""What tests fork in place of a new interpreter is as one: `tests.forked_programs`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked_programs import run_program

_TOLD = """
import os, pathlib, signal, sys, threading
import torch
if sys.argv[1] == "say":
    print(os.environ["SAID"], sys.argv[1:], __name__, pathlib.Path.cwd(), torch.get_num_threads())
    print("and so", file=sys.stderr)
    sys.left = "what it has left"
elif sys.argv[1] == "look":
    print(hasattr(sys, "left"), "SAID" in os.environ, "torch._dynamo" in sys.modules)
    print(threading.active_count())
elif sys.argv[1] == "fail":
    raise ValueError("it failed")
elif sys.argv[1] == "exit":
    import atexit
    atexit.register(print, "at the end")
    sys.exit(3)
elif sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
else:
    threading.Event().wait()
"""


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Write the program where the process that forks has not looked yet; return its name."""
    name = f"told_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(_TOLD)
    monkeypatch.chdir(tmp_path)
    return name


def test_it_has_its_words_variables_and_directory_and_is_heard(told: str, tmp_path: Path) -> None:
    done = run_program(told, "say", "it", SAID="yes")
    assert (done.returncode, done.stderr) == (0, "and so\n")
    assert done.stdout == f"yes ['say', 'it'] __main__ {tmp_path} 1\n"


def test_the_next_one_sees_nothing_of_it_and_finds_modules_imported(told: str) -> None:
    run_program(told, "say", SAID="yes")
    assert run_program(told, "look").stdout == "False False True\n1\n"


@pytest.mark.parametrize(
    ("word", "status", "said"), [("fail", 1, "ValueError: it failed"), ("exit", 3, ""), ("die", -9, "")]
)
def test_it_ends_as_a_program_of_python_s(told: str, word: str, status: int, said: str) -> None:
    done = run_program(told, word)
    alone = subprocess.run([sys.executable, "-m", told, word], capture_output=True, text=True, check=False)
    assert done.returncode == alone.returncode == status
    assert done.stdout == alone.stdout
    assert said in done.stderr


def test_one_that_does_not_end_in_time_is_killed(told: str) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(told, "wait", timeout_s=0.2)
    assert run_program(told, "exit").returncode == 3
