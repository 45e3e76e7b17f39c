"""The comparisons' machinery: processes that take turns, what is measured of them, what is left out."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest

from bench.peers import command, result, usage, workers
from bench.peers.__main__ import elsewhere
from bench.peers.result import Result
from bench.peers.usage import Usage, metered
from bench.peers.workers import Absent, Company, PeerFailed, Worker, serve
from bench.record import Better, Circumstances, Figure, Verdict

MIB = 1024**2


# ---------------------------------------------------------------------- usage


def test_bytes_that_reach_the_drive_are_counted(tmp_path: Path) -> None:
    mounts = {part.mountpoint: part.fstype for part in psutil.disk_partitions(all=True)}
    holding = max((point for point in mounts if tmp_path.is_relative_to(point)), key=len)
    if mounts[holding] == "tmpfs":
        pytest.skip("temporary files are in memory here")

    def write() -> None:
        with (tmp_path / "file").open("wb") as file:
            file.write(os.urandom(4 * MIB))
            file.flush()
            os.fsync(file.fileno())

    assert 4 * MIB <= metered(write).written_bytes < 6 * MIB


def test_processor_time_of_every_thread_is_counted() -> None:
    work = metered(lambda: sum(range(2_000_000)))
    rest = metered(lambda: None)
    assert work.cpu_seconds > rest.cpu_seconds
    assert work.cpu_seconds == pytest.approx(work.seconds, rel=0.9)


def test_the_peak_begins_again_where_it_is_reset() -> None:
    block = bytearray(os.urandom(64 * MIB))
    high = usage.peak_resident_bytes()
    del block
    usage.reset_peak()
    assert usage.peak_resident_bytes() < high
    assert 0 < usage.proportional_bytes() <= usage.peak_resident_bytes()


def test_usages_add_up_and_travel() -> None:
    one = Usage(1.0, 0.5, 10, 20)
    assert one + one == Usage(2.0, 1.0, 20, 40)
    assert Usage.from_mapping(json.loads(json.dumps(one.to_mapping()))) == one


# ---------------------------------------------------------------------- one worker


def _answers(text: str, subject: workers.Subject) -> list[dict[str, object]]:
    answered = io.StringIO()
    serve(lambda _: subject, "it", io.StringIO(text), answered)
    return [json.loads(line) for line in answered.getvalue().splitlines()]


def test_a_peer_answers_line_by_line_and_is_closed() -> None:
    asked: list[tuple[str, Mapping[str, object]]] = []

    def subject(ask: str, arguments: Mapping[str, object]) -> workers.Answer:
        asked.append((ask, arguments))
        return {"n": len(asked)}

    lines = json.dumps({"ask": "turn", "with": {"a": 1}}) + "\n"
    assert _answers(lines * 2, subject) == [{"ready": "it"}, {"n": 1}, {"n": 2}]
    assert asked == [("turn", {"a": 1}), ("turn", {"a": 1}), ("close", {})]


def test_what_a_peer_raises_is_its_last_answer() -> None:
    def subject(ask: str, arguments: Mapping[str, object]) -> workers.Answer:
        raise ValueError("not enough buffers")

    lines = json.dumps({"ask": "turn", "with": {}}) + "\n"
    assert _answers(lines * 2, subject)[1:] == [{"failed": "ValueError: not enough buffers"}]


def test_a_peer_that_is_not_installed_says_what_would_help() -> None:
    with pytest.raises(Absent, match=r"no_such_library.*make peers"):
        workers.required("no_such_library")


def test_a_peer_that_raises_in_its_process_fails_with_its_words(tmp_path: Path) -> None:
    with Worker("disk", "torch.save", tmp_path / "log") as worker:
        with pytest.raises(PeerFailed, match=r"torch\.save: AssertionError"):
            worker.ask("turn")
        with pytest.raises(PeerFailed, match=r"torch\.save"):
            worker.ask("turn")


def test_a_peer_that_does_not_come_up_quotes_its_log(tmp_path: Path) -> None:
    with pytest.raises(PeerFailed, match="KeyError: 'nobody'"):
        Worker("disk", "nobody", tmp_path / "log")


# ---------------------------------------------------------------------- several


def test_who_is_absent_or_fails_is_left_out_with_the_reason_and_the_others_go_on(tmp_path: Path) -> None:
    job = {"path": str(tmp_path / "job"), "tensor_bytes": MIB, "count": 1, "block_bytes": MIB, "depth": 1}
    (tmp_path / "job" / "zarr").mkdir(parents=True)  # in zarr's way
    with Company("disk", ["torch.save", "kvikio", "zarr", "safetensors"], tmp_path / "logs") as company:
        if "kvikio" in company.names:
            pytest.skip("kvikio is installed and there is a GPU")
        company.ask_all("prepare", job)
        assert company.names == ["torch.save", "safetensors"]
        assert company.left_out["kvikio"].startswith("absent: kvikio")
        assert company.left_out["zarr"].startswith("FAILED: zarr: FileExistsError")
        assert list(company.ask_all("turn", backwards=True)) == ["safetensors", "torch.save"]
        kept = company.rounds("turn", repeats=2, warmups=1)
    assert {name: len(answers) for name, answers in kept.items()} == {"torch.save": 2, "safetensors": 2}


def test_who_is_needed_and_fails_ends_the_run(tmp_path: Path) -> None:
    with (
        Company("disk", ["torch.save"], tmp_path, needed=["torch.save"]) as company,
        pytest.raises(PeerFailed),
    ):
        company.ask_all("turn")


def test_rounds_without_one_that_counts_are_refused(tmp_path: Path) -> None:
    with (
        Company("disk", [], tmp_path) as company,
        pytest.raises(ValueError, match="repeats must be at least 1"),
    ):
        company.rounds("turn", repeats=0, warmups=1)


# ---------------------------------------------------------------------- results


def _result(reached: float) -> Result:
    return Result(
        name="io",
        what="bytes there and back",
        tables={"all": [["peer", "MiB/s"], ["fio", "7"]]},
        figures=[Figure("peers-io-speed", "speed", reached, "x", 0.9, 0.98, Better.HIGHER, {"a": "b"})],
        left_out={"kvikio": "absent: no GPU"},
        jobs=[{"jobname": "fio", "read": {"bw_bytes": 7}}],
        notes=["cold"],
    )


def test_a_result_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    around = Circumstances("python -m bench.peers io", "c", "d", "m", "s", "l", "v")
    path = result.write(_result(1.0), around, tmp_path)
    assert path.name == "peers-io.json"
    read, circumstances = result.read(path)
    assert circumstances == around
    assert read.figures[0].verdict is Verdict.AIM
    assert json.loads(path.read_text())["jobs"][0]["read"]["bw_bytes"] == 7


def test_the_page_has_tables_figures_reasons_and_the_command(tmp_path: Path) -> None:
    around = Circumstances("python -m bench.peers io", "c", "d", "m", "s", "l", "v")
    result.write(_result(0.5), around, tmp_path)
    page = result.write_page(tmp_path, ["io", "training"]).read_text()
    for part in ("| fio | 7 |", "MISSED", "kvikio: absent: no GPU", "`python -m bench.peers io`", "- cold"):
        assert part in page


def test_a_terminal_shows_who_was_left_out_and_what_was_missed() -> None:
    text = _result(0.5).to_text()
    assert "left out: kvikio: absent: no GPU" in text
    assert "MISSED" in text
    assert _result(0.5).is_missed
    assert not _result(0.9).is_missed


def test_the_peers_environment_is_moved_to_once(tmp_path: Path) -> None:
    home = tmp_path / ".venv-peers"
    assert elsewhere(home) is None
    home.symlink_to(sys.prefix)
    assert elsewhere(home) is None  # this is it, by another name
    home.unlink()
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "python").touch()
    assert elsewhere(home) == home / "bin" / "python"


def test_a_peer_that_nobody_knows_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(SystemExit, match="no peer is called fi; there are fio-psync, "):
        command.main(["io", "--peers", "fi"])
    with pytest.raises(SystemExit, match="no comparison is called oi"):
        command.main(["oi"])
