"""Packages that kill whoever imports them: a process of its own dies, and this one is told how."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import EntryPoint
from multiprocessing import spawn
from pathlib import Path

import pytest

import tierstore as ts
from tests.files_disk import open_files
from tierstore import alone
from tierstore.alone import fault_alone
from tierstore.cli import doctor, main, measure
from tierstore.errors import BackendError
from tierstore_backends.files.engines.gpu import gpu_fault

Package = Callable[[str, str], None]

_KILL = "import os, signal; os.kill(os.getpid(), signal.{})"
_WRITE_EVERYWHERE = """
import os
for fd in range(3, 64):
    try:
        os.write(fd, b"x")
    except OSError:
        pass
"""
_DIE_AT_THE_END = f"import atexit; atexit.register(lambda: exec({_KILL.format('SIGSEGV')!r}))"
_TOO_EARLY = "ended by the package, before it had used it"
_DEADLY = {
    "an instruction that the CPU has not": (_KILL.format("SIGILL"), "killed by SIGILL (it was built for "),
    "memory that is not there": ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV"),
    "an abort": ("import os; os.abort()", "killed by SIGABRT"),
    "want of memory": (_KILL.format("SIGKILL"), "killed by SIGKILL (by somebody else, or for want of "),
    "a signal without a name": ("import os; os.kill(os.getpid(), 40)", "killed by signal 40"),
    "an exit": ("import sys; sys.exit(3)", "ended by the package, with exit code 3"),
    "an exit that looks well": ("import os; os._exit(0)", _TOO_EARLY),
    "an end of the interpreter": ("raise SystemExit", _TOO_EARLY),
    "a death at the end": (_DIE_AT_THE_END, "killed by SIGSEGV"),
    "an answer of its own": (_WRITE_EVERYWHERE, _TOO_EARLY),
    "closing what it does not know": ("import os; os.closerange(3, 64)", "with exit code 1"),
}
_CHATTER = "import os\nfor _ in range(300): os.write(1, b'x' * 4096); os.write(2, b'lived')"
_CHILD = "import subprocess; subprocess.Popen(['sleep', '5'], close_fds=False, process_group=0)"
_HARMLESS = {
    "nothing": "",
    "an exception": "raise RuntimeError('no such device')",
    "no package that it needs": "import a_package_that_nobody_has",
    "rubbish on its outputs": _CHATTER,
    "a child that stays": _CHILD,
    "a signal to all around it": "import os, signal; os.killpg(0, signal.SIGURG)",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    """Install a package of the given name and source, and forget what was found before."""
    place = tmp_path / "installed"
    place.mkdir()
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setattr(alone, "_found", {})

    def install(name: str, source: str) -> None:
        file = place / f"{name}.py"
        file.parent.mkdir(exist_ok=True)
        file.write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)

    return install


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Count the processes that are begun to try something."""
    begun: list[list[str]] = []
    popen = subprocess.Popen

    def note(words: list[str], **more: object) -> object:
        begun.append(words)
        return popen(words, **more)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "Popen", note)
    return begun


@pytest.mark.parametrize("kind", _DEADLY)
def test_a_package_that_ends_its_process_costs_a_reason(package: Package, kind: str) -> None:
    source, reason = _DEADLY[kind]
    package("deadly", source)
    assert reason in str(fault_alone("deadly"))
    assert "deadly" not in sys.modules


@pytest.mark.parametrize("kind", _DEADLY)
def test_a_package_that_dies_only_in_use_costs_a_reason(package: Package, tmp_path: Path, kind: str) -> None:
    source, reason = _DEADLY[kind]
    package("deadly", f"def use():\n    exec({source!r}, {{}})")
    script = tmp_path / "use.py"
    script.write_text("import deadly; deadly.use()")
    assert fault_alone("deadly") is None
    assert reason in str(fault_alone("deadly", script=str(script)))


@pytest.mark.parametrize("kind", _HARMLESS)
def test_what_can_be_caught_or_hurts_nobody_is_no_fault(package: Package, kind: str) -> None:
    package("harmless", _HARMLESS[kind])
    assert fault_alone("harmless") is None


def test_a_package_that_hangs_is_stopped(package: Package, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "_PATIENCE_S", 0.5)
    package("slow", "import threading; threading.Event().wait()")
    assert fault_alone("slow") == "a process that only tried it was still busy after 0.5 s, and stopped"


def test_an_interrupt_ends_the_trial_and_nothing_is_believed(
    package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    package("slow", "import threading; threading.Event().wait()")
    pids: list[int] = []

    def interrupt(process: subprocess.Popen[bytes]) -> int:
        pids.append(process.pid)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(alone, "_end_of", interrupt)
        with pytest.raises(KeyboardInterrupt):
            fault_alone("slow")
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)
    monkeypatch.setattr(alone, "_PATIENCE_S", 0.5)
    assert "still busy" in str(fault_alone("slow"))  # it is tried again


def test_a_finding_is_found_once_and_said_once(
    package: Package, started: list[list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    package("deadly", _KILL.format("SIGILL"))
    with caplog.at_level(logging.WARNING, "tierstore"):
        assert fault_alone("deadly") == fault_alone("deadly") is not None
    assert len(started) == 1
    assert [record.getMessage().split(" (")[0] for record in caplog.records] == [
        "deadly is not used: a process that only tried it was killed by SIGILL"
    ]


@pytest.mark.parametrize("given", [None, type(sys)("absent")], ids=["blocked", "a double"])
def test_what_comes_from_nowhere_is_not_tried(
    package: Package, started: list[list[str]], monkeypatch: pytest.MonkeyPatch, given: object
) -> None:
    assert fault_alone("absent") is None
    monkeypatch.setitem(sys.modules, "absent", given)
    assert fault_alone("absent") is None
    assert started == []


@pytest.mark.parametrize("lack", ["no process", "no Python"])
def test_a_process_that_cannot_be_started_is_a_reason_that_is_not_kept(
    package: Package, monkeypatch: pytest.MonkeyPatch, lack: str
) -> None:
    package("harmless", "")
    with monkeypatch.context() as patched:
        if lack == "no Python":
            patched.setattr(sys, "frozen", True, raising=False)
        else:
            patched.setattr(spawn, "get_executable", lambda: "/nowhere/python")
        assert "a process to try it in cannot be started" in str(fault_alone("harmless"))
    assert fault_alone("harmless") is None


# ------------------------------------------------------------------------------ who uses it


def test_an_engine_asked_for_by_name_is_refused_with_the_reason(package: Package, tmp_path: Path) -> None:
    package("liburing", _KILL.format("SIGILL"))
    with pytest.raises(
        BackendError, match=r"engine='io_uring' cannot be used .*killed by SIGILL.*pip install"
    ):
        open_files(tmp_path / "files", engine="io_uring")
    assert not (tmp_path / "files").exists()


def test_an_engine_whose_package_kills_only_who_uses_it_is_refused(package: Package, tmp_path: Path) -> None:
    package("liburing", f"class Ring:\n    def __init__(self):\n        {_KILL.format('SIGILL')}")
    with pytest.raises(BackendError, match=r"engine='io_uring' cannot be used .*killed by SIGILL"):
        open_files(tmp_path / "files", engine="io_uring")


def test_a_trial_that_is_not_there_is_a_reason(package: Package, tmp_path: Path) -> None:
    package("harmless", "")
    missing = tmp_path / "trial.py"
    assert f"is not there: {missing}" in str(fault_alone("harmless", script=str(missing)))


def test_engines_that_need_no_package_try_none(
    package: Package, started: list[list[str]], tmp_path: Path
) -> None:
    for name in ("liburing", "kvikio"):
        package(name, _KILL.format("SIGILL"))
    for engine in ("auto", "threads", "aiofiles", "plain"):
        config = ts.StoreConfig.default(
            "cpu", offload_cpu_size="1MB", offload_disk_size="1MB", offload_path=str(tmp_path / engine)
        )
        ts.Store(config).close()
        open_files(tmp_path / "files", engine=engine).close()
    assert started == []


@pytest.mark.parametrize("part", ["__init__", "cufile_driver"])
def test_the_way_straight_from_a_gpu_is_closed_with_the_reason(
    package: Package, tmp_path: Path, part: str
) -> None:
    package("kvikio/__init__", "")
    package("kvikio/cufile_driver", "")
    package(f"kvikio/{part}", _KILL.format("SIGSEGV"))
    assert "killed by SIGSEGV" in str(gpu_fault(tmp_path))
    assert "kvikio" not in sys.modules


def test_doctor_lives_says_why_and_leaves_nothing(
    package: Package, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_FILE_BYTES", 12 << 20)
    package("liburing", _KILL.format("SIGILL"))
    place = tmp_path / "place"
    place.mkdir()
    assert main(["doctor", str(place)]) == 0
    assert "killed by SIGILL" in capsys.readouterr().out
    assert list(place.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_backend_of_others_that_kills_is_missing_and_doctor_lives(
    package: Package, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "_FILE_BYTES", 12 << 20)
    package("of_others", _KILL.format("SIGBUS"))
    theirs = EntryPoint("of-others", "of_others:open_backend", "tierstore.backends")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [theirs])
    report = doctor.examine(tmp_path)
    assert "killed by SIGBUS" in str(report.backends["of-others"])
    assert any("backend 'of-others' cannot be loaded" in line for line in report.missing)
