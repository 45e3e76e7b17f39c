"""``tierstore top``: finds the process that is meant, and draws what it shows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests import filled_stats
from tests.filled_stats import Numbers
from tierstore import live
from tierstore.cli import main, top, top_view
from tierstore.live import LiveProcess, LiveRun, places, server
from tierstore.live.client import MovingBytes
from tierstore.metrics import as_metrics

Output = pytest.CaptureFixture[str]


class View:
    """Shows a run with everything."""

    def __init__(self, *paths: Path, name: str = "net") -> None:
        self.shows: Mapping[str, object] = {
            "name": name,
            "opened_by": "train.py, line 3",
            "paths": [str(each) for each in paths],
            "metrics": as_metrics(filled_stats.run(Numbers())),
            "moving": [
                {"key": f"k{number}", "source": "host", "target": "disk", "nbytes": 5} for number in range(20)
            ],
        }

    def look(self) -> Mapping[str, object] | None:
        return self.shows


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(server, "_room", server._Everything())  # another test may have left a run open
    with tempfile.TemporaryDirectory(prefix="ts") as place:
        monkeypatch.setenv("XDG_RUNTIME_DIR", place)
        monkeypatch.setattr(places, "folders", lambda: [Path(place) / "tierstore"])
        yield Path(place) / "tierstore"


@pytest.fixture
def shown(tmp_path: Path) -> Iterator[View]:
    view = View(tmp_path / "offload" / "rank-0")
    handle = live.show(view)
    assert handle is not None
    yield view
    handle.remove()


def _environment() -> dict[str, str]:
    """Return what lets another process find ours."""
    path = os.pathsep.join(filter(None, sys.path))
    return {**os.environ, "PYTHONPATH": path, "TMPDIR": os.environ["XDG_RUNTIME_DIR"]}


def error_of(capsys: Output, *arguments: str, code: int = 2) -> str:
    """Run the command, which fails, and does not stay; return what it says, in one line."""
    assert main(["top", "--once", *arguments]) == code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    return line


# ---------------------------------------------------------------------- which process


def test_a_process_is_found_by_its_number_its_directories_and_its_socket(
    shown: View, tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "offload")
    places = [tmp_path, tmp_path / "offload", tmp_path / "offload" / "rank-0", link, Path("offload"), Path()]
    targets = [None, str(os.getpid()), str(folder / f"{os.getpid()}.sock"), *map(str, places)]
    for target in targets:
        path, process = top.find(target)
        assert (path, process.pid) == (folder / f"{os.getpid()}.sock", os.getpid()), target


def test_without_a_run_it_says_so_in_one_line(capsys: Output, tmp_path: Path) -> None:
    assert error_of(capsys) == "tierstore top: no process of yours shows a run."
    assert "has an open run in" in error_of(capsys, str(tmp_path))
    assert error_of(capsys, "4194305") == "tierstore top: there is no process 4194305."
    assert "shows no run: it has none open" in error_of(capsys, str(os.getpid()))


def test_a_directory_that_another_run_is_in_is_not_taken_for_it(
    shown: View, capsys: Output, tmp_path: Path
) -> None:
    for name in ("off", "offload/rank", "offload/rank-0/below", "offload/../else"):
        assert "has an open run in" in error_of(capsys, str(tmp_path / name))


def test_of_several_processes_it_asks_which_is_meant(shown: View, capsys: Output, tmp_path: Path) -> None:
    program = (
        "import sys\nfrom pathlib import Path\nfrom tests.unit.test_cli_top import View\n"
        "from tierstore import live\nassert live.show(View(Path(sys.argv[1]), name='other'))\n"
        "print('ready', flush=True)\nsys.stdin.read()"
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": os.environ["XDG_RUNTIME_DIR"],
    }
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "other")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
    ) as other:  # fmt: skip
        assert other.stdout is not None
        assert other.stdin is not None
        assert other.stdout.readline() == "ready\n"
        line = error_of(capsys)
        assert "2 processes have one: give one of" in line
        assert f"{other.pid} (other)" in line
        assert f"{os.getpid()} (net)" in line
        assert "2 processes" in error_of(capsys, str(tmp_path))
        assert top.find(str(tmp_path / "other"))[1].pid == other.pid
        assert top.find(str(other.pid))[1].runs[0].name == "other"
        other.send_signal(signal.SIGKILL)
    assert top.find(None)[1].pid == os.getpid(), "what a killed one has left is no process"
    assert error_of(capsys, str(other.pid)) == f"tierstore top: there is no process {other.pid}."


@pytest.mark.parametrize("target", ["", "x", "0", "-", "1e3", "\u0661", "a\0b"], ids=repr)
def test_what_is_neither_is_refused_in_one_line(capsys: Output, target: str) -> None:
    assert error_of(capsys, target).startswith("tierstore top: ")


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "inf", "0.05", "4000"])
def test_an_interval_that_makes_no_sense_is_refused(shown: View, capsys: Output, interval: str) -> None:
    assert "accepted: 0.1 to 3600 seconds" in error_of(capsys, "--interval", interval)


def test_one_that_does_not_answer_is_one_line(
    folder: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    import socket

    monkeypatch.setattr("tierstore.live.client.read.__defaults__", (0.1,))
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(folder / "7.sock"))
        listening.listen()
        assert "no whole answer in 0.1 s" in error_of(capsys, "7", code=1)
        assert "no process of yours shows a run" in error_of(capsys)


def test_all_are_asked_at_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may take seconds: to start training, a process holds its interpreter for as long."""
    paths = {number: [folder / f"{number}.sock"] for number in range(1, 6)}
    all_asked = threading.Barrier(len(paths), timeout=20)

    def read(path: Path) -> LiveProcess:
        all_asked.wait()
        number = int(path.stem)
        if number == 2:
            raise TimeoutError
        return LiveProcess(number, 0.0, (LiveRun(),) * (number != 3))

    monkeypatch.setattr(live, "sockets", lambda: paths)
    monkeypatch.setattr(live, "read", read)
    assert [process.pid for _, process in top._answering()] == [1, 4, 5]


# ---------------------------------------------------------------------- what is printed


def test_one_snapshot_is_one_line_of_json(shown: View, capsys: Output) -> None:
    assert main(["top", "--once", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    found = json.loads(line)
    assert found["pid"] == os.getpid()
    assert found["runs"][0]["metrics"] == shown.shows["metrics"]
    assert found["runs"][0]["moving"][0] == {"key": "k0", "source": "host", "target": "disk", "nbytes": 5}


def test_once_prints_tiers_links_and_what_moves(shown: View, capsys: Output) -> None:
    assert main(["top", "--once", "--interval", "0.1"]) == 0
    said = capsys.readouterr().out
    for text in ("net, opened by train.py, line 3", "device to disk", "steps", "moving", "k0", "12 more"):
        assert text in said


def test_it_goes_on_until_the_run_ends_and_says_so(
    shown: View, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([*range(3)])
    plain = live.read

    def read(path: Path, timeout_s: float = 3.0) -> LiveProcess:
        if next(looks, None) is None:
            raise FileNotFoundError(path)
        return plain(path, timeout_s)

    monkeypatch.setattr(live, "read", read)
    assert main(["top", "--interval", "0.1", str(os.getpid())]) == 0
    said = capsys.readouterr().out
    assert said.count("opened by") == 2
    assert f"process {os.getpid()} has ended" in said


def test_who_is_slow_to_answer_is_asked_again(shown: View, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, fails = live.read, iter([TimeoutError("slow"), TimeoutError("slow")])

    def read(path: Path, timeout_s: float = 3.0) -> LiveProcess:
        if (fault := next(fails, None)) is not None:
            raise fault
        return plain(path, timeout_s)

    path, _ = top.find(None)
    monkeypatch.setattr(live, "read", read)
    monkeypatch.setattr("tierstore.cli.top.time", SimpleNamespace(sleep=lambda _: None))
    found = top._looks(path, 1.0)()
    assert found is not None
    assert found.pid == os.getpid()
    fails = iter([TimeoutError("slow")] * 20)
    with pytest.raises(TimeoutError):
        top._looks(path, 1.0)()


def _process(at_s: float, metrics: Mapping[str, float], **more: object) -> LiveProcess:
    return LiveProcess(7, at_s, (LiveRun(name="net", metrics=metrics, **more),))  # type: ignore[arg-type]


def test_rates_are_those_of_the_interval() -> None:
    moved, hits = (
        'tierstore_traffic_bytes_total{source="a",target="b"}',
        'tierstore_tier_hits_total{tier="a"}',
    )
    quota, faults = 'tierstore_tier_capacity_bytes{tier="a"}', 'tierstore_tier_faults_total{tier="a"}'
    steps, stall = "tierstore_run_steps_total", "tierstore_run_stall_seconds_total"
    before = {moved: 1024.0**2, hits: 100, faults: 100, quota: 1000, steps: 10, stall: 5}
    after = {moved: 5 * 1024.0**2, hits: 190, faults: 110, quota: 1000, steps: 18, stall: 6}
    said = "\n".join(top_view.lines(_process(14, after), _process(10, before)))
    for text in ("1.0 MiB/s", "90.0 %", "2.5", "steps 18, 2 a second", "stall 25 %", "5.0 MiB"):
        assert text in said


def test_nothing_is_cut_off_in_eighty_columns() -> None:
    tier = {
        "capacity_bytes": 1000.4 * 1024**3,
        "charged_bytes": 999.9 * 1024**3,
        "peak_charged_bytes": 1000.0 * 1024**3,
        "hits_total": 10_000,
        "faults_total": 123_456,
        "evictions_total": 123_456,
        "refusals_total": 99_999,
    }
    metrics = {f'tierstore_tier_{name}{{tier="device"}}': value for name, value in tier.items()}
    lines = top_view.lines(_process(11, metrics), _process(10, {}), width=80)
    assert not [line for line in lines if "\u2026" in line]
    assert max(map(len, lines)) <= 80


def test_of_one_look_there_are_no_rates_but_ratios_since_the_start() -> None:
    hits, faults = 'tierstore_tier_hits_total{tier="a"}', 'tierstore_tier_faults_total{tier="a"}'
    quota, forward = 'tierstore_tier_capacity_bytes{tier="a"}', "tierstore_run_forward_seconds_total"
    once = _process(10, {hits: 3, faults: 1, quota: 0, forward: 2.0})
    said = "\n".join(top_view.lines(once, once))
    assert "75.0 %" in said
    assert "forward 100 %" in said
    assert "a second" not in said


def test_counters_that_begin_anew_are_no_negative_rates() -> None:
    moved = 'tierstore_traffic_bytes_total{source="a",target="b"}'
    said = "\n".join(top_view.lines(_process(11, {moved: 1024}), _process(10, {moved: 1024.0**3})))
    assert "1.0 KiB/s" in said


def test_a_run_that_cannot_be_looked_at_says_why_beside_the_others() -> None:
    process = LiveProcess(7, 1.0, (LiveRun(fault="broken"), LiveRun(name="[bold]net[/nope]")))
    said = "\n".join(top_view.lines(process, process))
    assert "cannot be looked at: broken" in said
    assert "[bold]net[/nope]" in said, "what a process sends is no markup"


def test_hostile_numbers_are_drawn() -> None:
    odd = {
        'tierstore_tier_capacity_bytes{tier="a"}': -1.0,
        'tierstore_tier_charged_bytes{tier="a"}': 1e299,
        'tierstore_tier_capacity_bytes{tier="b"}': 1e299,
        "tierstore_tier_capacity_bytes": 5.0,
        'tierstore_tier_capacity_bytes{tier="': 5.0,
        "tierstore_run_steps_total": -1e299,
    }
    process = _process(-1e299, odd, moving=(MovingBytes("", "", "", -(10**30)),))
    assert top_view.lines(process, _process(1e299, {}))
    assert top_view.lines(_process(1e299, odd), process)


def test_without_rich_it_says_what_to_install_and_json_works(
    shown: View, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "tierstore.cli.top_view")
    monkeypatch.delattr("tierstore.cli.top_view", raising=False)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert "pip install 'tierstore[top]'" in error_of(capsys, "--once")
    assert main(["top", "--once", "--json"]) == 0


def test_a_pipe_that_nobody_reads_any_more_ends_it_without_a_word(shown: View) -> None:
    command = [sys.executable, "-m", "tierstore.cli", "top", "--json", "--interval", "0.1"]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": os.environ["XDG_RUNTIME_DIR"],
    }
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as run:
        assert run.stdout is not None
        assert run.stderr is not None
        assert json.loads(run.stdout.readline())["pid"] == os.getpid()
        run.stdout.close()
        assert run.wait(30) == 0
        assert run.stderr.read() == ""
