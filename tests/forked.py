"""Forks for tests: what happens in a child is told to its parent, and a child that hangs is killed."""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

TIMEOUT_S = 30


def in_child(act: Callable[[], object]) -> None:
    """Fork; call ``act`` in the child; raise what it raised there.

    The child ends without the interpreter's end: another test's objects are in it.

    Raises:
        AssertionError: it failed, with its traceback; a signal ended it, with those of its threads; or it did
            not end in time and was killed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(TIMEOUT_S)
        try:
            os.close(reading)
            faulthandler.disable()  # a test may have put back the handlers of all signals
            faulthandler.enable(writing)
            act()
            gc.collect()
        except BaseException:  # noqa: BLE001 - told to the parent
            os.write(writing, traceback.format_exc().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as told:
        failure = told.read()
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert (ended, failure) == (0, ""), f"the child ended with {ended}: {failure}"


def in_thread(act: Callable[[], object]) -> None:
    """Call ``act`` in a thread of its own, wait for it, and raise what it raised."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(act).result()


def run_python(code: str, *arguments: str, expects: int = 0) -> str:
    """Run a program in a process of its own; return what it printed, errors included.

    Raises:
        AssertionError: it ended with another status, or did not end in time and was killed.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "OMP_NUM_THREADS": "1",
    }
    program = subprocess.run(
        [sys.executable, "-X", "faulthandler", "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        timeout=90,
        check=False,
    )
    assert program.returncode == expects, program.stdout
    return program.stdout
