"""Native code of others, tried out in a process of its own before it is let into this one.

A wheel that was built for another CPU does not fail, it kills: the process is gone by SIGILL at the first
instruction that the CPU has not, and no ``try`` helps.  So a package that has native parts and that can be
done without is first imported and used by a process that may die of it.

Rule 1: whatever the package does there, it costs this process a reason and some milliseconds: it may raise,
crash, hang, end, print, or write where the answer is expected.
Rule 2: a package that is not installed, or that stands in ``sys.modules`` without having come from anywhere,
is not tried: importing it here tells what is the matter, and costs nothing.
Rule 3: an exception is no fault here: it can be caught where the package is used, and is told there.
Rule 4: what was found holds for as long as this process does; that no process could be begun is no finding.

This file is also what that process runs, by its path; so it imports nothing of ours.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import logging
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from multiprocessing import spawn
from pathlib import Path
from typing import Final

_log = logging.getLogger("tierstore")

_PATIENCE_S: Final = 30.0  # a driver of a GPU takes seconds
_GRACE_S: Final = 1.0  # for the kernel to take away what was killed
_ANSWER: Final = b"lived"
_KILLS: Final = {
    signal.SIGILL: "it was built for another CPU than this",
    signal.SIGKILL: "by somebody else, or for want of memory",
}

_lock = threading.Lock()  # guards the next, and is held while a process tries: others wait for its finding
_found: dict[tuple[tuple[str, ...], str | None], str | None] = {}


def fault_alone(*modules: str, script: str | None = None) -> str | None:
    """Say what becomes of a process that imports ``modules`` and runs ``script``; ``None``: it lives.

    The first call for the same waits for that process: for as long as it takes to start Python and to import
    them, and at most for half a minute.  From any thread.

    Args:
        modules: their names, in the order in which they are imported.
        script: the path of a file of Python that uses them, after they were imported.
    """
    if not all(_can_be_found(module) for module in modules):
        return None
    if script is not None and not Path(script).is_file():
        return f"what would try it is not there: {script}"
    with _lock:
        asked = (modules, script)
        if asked not in _found:
            try:
                end = _end_of_a_trial(modules, script)
            except OSError as error:
                return f"a process to try it in cannot be started: {error}"
            _found[asked] = None if end is None else f"a process that only tried it was {end}"
            if end is not None:
                _log.warning("%s is not used: %s", ", ".join(modules), _found[asked])
        return _found[asked]


def _renew_lock() -> None:
    """In the child of a fork nobody is left who would give the lock back."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock)


def _can_be_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None  # the rest would import it
    except ValueError:  # it stands for a package without being one
        return False


def _end_of_a_trial(modules: Sequence[str], script: str | None) -> str | None:
    """Let a process try; return how it ended, if that was too early.

    Raises:
        OSError: it cannot be started.
    """
    executable = spawn.get_executable()
    if getattr(sys, "frozen", False) or not executable:
        raise OSError("this program has no Python of its own to start")
    path = [str(Path(each).absolute()) for each in sys.path]
    asked = json.dumps({"path": path, "modules": modules, "script": script})
    ours, theirs = os.pipe()
    try:
        try:
            process = subprocess.Popen(
                [os.fsdecode(executable), "-P", __file__, str(theirs), asked],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs,),
                start_new_session=True,  # an interrupt of ours is not its death
            )
        finally:
            os.close(theirs)
        return _early_end(process, ours)
    finally:
        os.close(ours)


def _early_end(process: subprocess.Popen[bytes], answers: int) -> str | None:
    """Wait for the process, and say how it ended; it is gone in the end, whatever interrupts us."""
    try:
        code = _end_of(process)
    except subprocess.TimeoutExpired:
        return f"still busy after {_PATIENCE_S:g} s, and stopped"
    finally:
        with contextlib.suppress(subprocess.TimeoutExpired):  # what the kernel cannot end, nobody waits for
            process.kill()
            process.wait(_GRACE_S)
    if code < 0:
        return _killed_by(-code)
    if code:
        return f"ended by the package, with exit code {code}"
    os.set_blocking(answers, False)
    with contextlib.suppress(BlockingIOError):  # nothing was said, and a child of the package is still there
        if os.read(answers, 2 * len(_ANSWER)) == _ANSWER:
            return None
    return "ended by the package, before it had used it"


def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code.

    Raises:
        subprocess.TimeoutExpired: it has none yet.
    """
    until_s = time.monotonic() + _PATIENCE_S
    with contextlib.suppress(OSError, AttributeError):  # an old kernel; another system
        end = os.pidfd_open(process.pid)  # a wait with a limit sleeps longer than the process runs
        try:
            poll = select.poll()
            poll.register(end, select.POLLIN)
            poll.poll(_PATIENCE_S * 1000)
        finally:
            os.close(end)
    return process.wait(max(0.0, until_s - time.monotonic()))


def _killed_by(number: int) -> str:
    try:
        found = signal.Signals(number)
    except ValueError:
        return f"killed by signal {number}"
    why = f" ({_KILLS[found]})" if found in _KILLS else ""
    return f"killed by {found.name}{why}"


def _try(theirs: int, asked: str) -> None:
    """Be the process that tries."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a death leaves nothing behind
    wanted = json.loads(asked)
    sys.path[:] = wanted["path"]
    with contextlib.suppress(Exception):  # rule 3
        for module in wanted["modules"]:
            importlib.import_module(module)
        if wanted["script"] is not None:
            runpy.run_path(wanted["script"])
    os.write(theirs, _ANSWER)


if __name__ == "__main__":
    _try(int(sys.argv[1]), sys.argv[2])
