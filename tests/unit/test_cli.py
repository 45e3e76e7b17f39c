"""The command line: one line of error, the right exit code, the same facts for machines."""

from __future__ import annotations

import errno
import gc
import json
import os
import re
import runpy
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from tierstore.cli import doctor, main, measure
from tierstore.cli.no_collection import no_collection
from tierstore.errors import BackendError
from tierstore.units import MIB

_Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure hardly anything: what is tested is what is done with it."""
    monkeypatch.setattr(measure, "_COPY_BYTES", MIB)
    monkeypatch.setattr(measure, "_COPY_SECONDS", 0.001)
    monkeypatch.setattr(measure, "_FILE_BYTES", 12 * MIB)


# ------------------------------------------------------------------------------ the command


def test_help_names_the_verbs(capsys: _Output) -> None:
    assert main(["--help"]) == 0
    assert "doctor" in capsys.readouterr().out


def test_a_verb_has_help_of_its_own(capsys: _Output) -> None:
    assert main(["doctor", "--help"]) == 0
    assert "PATH" in capsys.readouterr().out


def test_the_version_is_the_package_s(capsys: _Output) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"tierstore {version('tierstore')}\n"


@pytest.mark.parametrize(
    "words", [[], ["docter"], ["doctor", "--jason"], ["doctor", "a", "b"], ["doctor", "no/such/place"]]
)
def test_a_wrong_call_is_one_line_on_stderr_and_exit_code_2(words: list[str], capsys: _Output) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert re.fullmatch(r"tierstore.*: .*\n", printed.err)


def test_a_failure_is_one_line_on_stderr_and_exit_code_1(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(directory: Path, *, room_bytes: int) -> measure.Disk:
        raise BackendError(f"{directory}:\nthe disk is gone")

    monkeypatch.setattr(measure, "disk", fail)
    assert main(["doctor", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("", f"tierstore doctor: {tmp_path}: the disk is gone\n")


def test_debug_shows_where_an_error_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="is not a directory"):
        main(["doctor", "--debug", str(tmp_path / "nowhere")])


def test_a_bug_is_one_line_too_and_says_that_it_is_one(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumble() -> int:
        raise ZeroDivisionError("boom")

    monkeypatch.setattr(measure, "host_copy_bytes_per_s", stumble)
    assert main(["doctor", str(tmp_path)]) == 1
    assert re.fullmatch(
        r"tierstore doctor: ZeroDivisionError: boom \(a bug in tierstore; .*\)\n", capsys.readouterr().err
    )


def test_an_interrupt_ends_quietly_with_the_shells_code(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(measure, "host_copy_bytes_per_s", interrupt)
    assert main(["doctor", str(tmp_path)]) == 130
    assert capsys.readouterr().err == ""


def test_the_module_can_be_run() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tierstore.cli", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("tierstore ")


def test_the_module_ends_with_the_command_s_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: _Output
) -> None:
    monkeypatch.setattr(sys, "argv", ["tierstore", "no-such-verb"])
    monkeypatch.delitem(sys.modules, "tierstore.cli.__main__", raising=False)
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("tierstore.cli", run_name="__main__")
    assert caught.value.code == 2
    assert "no-such-verb" in capsys.readouterr().err


# ------------------------------------------------------------------------------ doctor


def test_the_report_for_people_has_a_line_for_everything(tmp_path: Path, capsys: _Output) -> None:
    assert main(["doctor", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines} >= {
        "tierstore",
        "host",
        "device",
        "backend",
        "disk",
        "files",
        "missing",
    }
    assert any("emulated" in line for line in lines)
    assert any(str(tmp_path) in line and "/s" in line for line in lines)


def test_the_report_for_machines_is_json_of_plain_numbers(tmp_path: Path, capsys: _Output) -> None:
    assert main(["doctor", "--json", str(tmp_path)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == {
        "versions",
        "host",
        "devices",
        "backends",
        "place",
        "findings",
        "missing",
        "more_places",
    }
    assert report["host"]["copy_bytes_per_s"] > 0
    assert report["place"]["disk"]["write_bytes_per_s"] > 0
    assert report["place"]["disk"]["read_bytes_per_s"] > 0
    assert {"device", "files", "memory", "pinned"} <= report["backends"].keys()
    assert report["devices"][-1]["name"] == "emulated"


def test_several_directories_have_a_line_each(tmp_path: Path, capsys: _Output) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    assert main(["doctor", *map(str, folders)]) == 0
    disks = [line for line in capsys.readouterr().out.splitlines() if line.startswith("disk ")]
    assert [str(folder) in line for folder, line in zip(folders, disks, strict=True)] == [True, True]


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    assert main(["doctor", str(tmp_path)]) == 0
    assert list(tmp_path.iterdir()) == []


def test_each_engine_of_the_files_is_tried_in_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: _Output
) -> None:
    monkeypatch.setitem(sys.modules, "liburing", None)
    monkeypatch.setitem(sys.modules, "kvikio", None)
    findings = doctor.examine(tmp_path).findings["files"]
    assert {name for name, fault in findings.items() if fault is None} == {
        "engine threads",
        "engine aiofiles",
        "engine plain",
    }
    assert "pip install 'tierstore[io-uring]'" in str(findings["engine io_uring"])
    assert "pip install 'tierstore[gds]'" in str(findings["straight from a GPU"])
    assert main(["doctor", str(tmp_path)]) == 0
    assert "files     engine threads: works" in capsys.readouterr().out


def test_a_file_is_no_place(tmp_path: Path, capsys: _Output) -> None:
    path = tmp_path / "file"
    path.touch()
    assert main(["doctor", str(path)]) == 2


@pytest.mark.parametrize(
    ("setting", "asks", "is_missing"),
    [
        ("always [madvise] never", None, True),
        ("always [madvise] never", "1", False),
        ("[always] madvise never", None, False),
    ],
)
def test_huge_pages_that_nobody_asks_for_are_missing(
    setting: str, asks: str | None, is_missing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = tmp_path / "enabled"
    pages.write_text(setting)
    monkeypatch.setattr(doctor, "_HUGE_PAGES", pages)
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    if asks is not None:
        monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", asks)
    assert is_missing == any("huge pages" in line for line in doctor.examine(tmp_path).missing)


def test_a_machine_without_an_accelerator_misses_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    assert any("no accelerator" in line for line in doctor.examine(tmp_path).missing)


class _Cuda:
    """A machine with one CUDA device, as far as torch is asked about it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.link: measure.LinkSpeed | None = measure.LinkSpeed(12 * 2**30, 11 * 2**30)
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
        )
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
        monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda name: (70 * 2**30, 80 * 2**30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "H1000")
        monkeypatch.setattr(measure, "link", self._measure)

    def _measure(self, device: str) -> measure.LinkSpeed:
        if self.link is None:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return self.link


def test_an_accelerator_is_reported_with_its_memory_and_its_link(
    tmp_path: Path, capsys: _Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Cuda(monkeypatch)
    assert main(["doctor", str(tmp_path)]) == 0
    line = "cuda:0: H1000, 70.0 GiB free of 80.0 GiB, pinning works, to it 12.0 GiB/s, from it 11.0 GiB/s"
    assert f"device    {line}" in capsys.readouterr().out.splitlines()


def test_pinning_that_fails_is_missing_with_the_limit_that_may_be_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _Cuda(monkeypatch).link = None
    monkeypatch.setattr("resource.getrlimit", lambda which: (8 * MIB, 8 * MIB))
    report = doctor.examine(tmp_path)
    assert report.devices[0].pinning == "failed: CUDA error: out of memory"
    assert any("pinning failed" in line for line in report.missing)
    assert any("8.0 MiB" in line and "ulimit -l" in line for line in report.missing)


def test_a_limit_that_is_none_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _Cuda(monkeypatch).link = None
    monkeypatch.setattr("resource.getrlimit", lambda which: (-1, -1))
    report = doctor.examine(tmp_path)
    assert report.host.lockable_bytes is None
    assert not any("ulimit" in line for line in report.missing)


def test_a_backend_that_cannot_be_loaded_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object) -> object:
        raise ImportError("no module of that name")

    monkeypatch.setattr("importlib.metadata.EntryPoint.load", refuse)
    missing = doctor.examine(tmp_path).missing
    assert "backend 'files' cannot be loaded: no module of that name" in missing


def test_a_file_system_in_memory_is_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounted = SimpleNamespace(mountpoint="/", fstype="tmpfs")
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [mounted])  # noqa: A006 - psutil's own name
    assert any("not a disk" in line for line in doctor.examine(tmp_path).missing)


def test_a_file_system_that_nobody_lists_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [])  # noqa: A006 - psutil's own name
    assert doctor.examine(tmp_path).place.file_system == "unknown"


# ------------------------------------------------------------------------------ measuring


def test_a_directory_that_refuses_direct_io_is_measured_through_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_open = os.open

    def refuse_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", refuse_direct)
    report = doctor.examine(tmp_path)
    assert (report.place.disk.is_direct, report.place.disk.alignment_bytes) == (False, None)
    assert any("refuses direct I/O" in line for line in report.missing)


def test_direct_io_without_a_known_alignment_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real_write = os.pwritev

    def refuse_small(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if len(buffers[0]) <= 4096:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real_write(descriptor, buffers, offset)

    monkeypatch.setattr(os, "pwritev", refuse_small)
    assert not measure.disk(tmp_path, room_bytes=12 * MIB).is_direct


def test_the_file_gets_no_larger_than_the_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[int] = []
    real_write = os.pwritev

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        written = real_write(descriptor, buffers, offset)
        ends.append(offset + written)
        return written

    monkeypatch.setattr(os, "pwritev", note)
    measure.disk(tmp_path, room_bytes=9 * MIB)
    assert max(ends) == 8 * MIB


def test_a_disk_with_no_room_is_refused_with_numbers(tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="less than 4194304 bytes"):
        measure.disk(tmp_path, room_bytes=MIB)


@pytest.mark.parametrize("call", ["open", "pwritev", "preadv"])
def test_an_io_error_is_a_backend_error_with_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*arguments: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(BackendError, match="cannot be written or read: Input/output error") as refused:
        measure.disk(tmp_path, room_bytes=12 * MIB)
    assert isinstance(refused.value.__cause__, OSError)


def test_a_short_transfer_is_an_error_and_not_a_speed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "preadv", lambda descriptor, buffers, offset: 1)
    with pytest.raises(BackendError, match="only a part"):
        measure.disk(tmp_path, room_bytes=12 * MIB)


def test_a_link_is_measured_in_both_directions_and_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin of the next test, with host memory for a device."""
    waited: list[str] = []
    make = torch.ones
    monkeypatch.setattr(torch, "ones", lambda size, dtype, pin_memory: make(size, dtype=dtype))
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    link = measure.link("cpu")
    assert min(link.to_device_bytes_per_s, link.from_device_bytes_per_s) > 0
    assert set(waited) == {"cpu"}


@pytest.mark.gpu
def test_a_link_is_measured() -> None:
    name = str(torch.accelerator.current_accelerator())
    link = measure.link(name)
    assert min(link.to_device_bytes_per_s, link.from_device_bytes_per_s) > 0


def test_a_slow_disk_is_measured_no_longer_than_the_time_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offsets: list[int] = []
    real_write = os.pwritev

    def note(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return real_write(descriptor, buffers, offset)

    monkeypatch.setattr(measure, "_FILE_BYTES", 64 * MIB)
    monkeypatch.setattr(measure, "_DISK_SECONDS", 0.0)
    monkeypatch.setattr(os, "pwritev", note)
    assert measure.disk(tmp_path, room_bytes=64 * MIB).write_bytes_per_s > 0
    assert len([offset for offset in offsets if offset % (4 * MIB) == 0]) <= measure._THREADS


def test_little_free_space_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=64 * MIB))
    assert any("64.0 MiB free: little" in line for line in doctor.examine(tmp_path).missing)


@no_collection()
def _fail_without_collection() -> None:
    with no_collection():
        pass
    raise ValueError(gc.isenabled())


def test_garbage_is_looked_for_as_before_whatever_ends_a_time_without() -> None:
    assert gc.isenabled()
    with pytest.raises(ValueError, match="False"):
        _fail_without_collection()
    assert gc.isenabled()
