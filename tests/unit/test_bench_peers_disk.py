"""The disk peers: that each moves the bytes it is given, that a wrong byte shows, and what it comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from bench.peers import command, disk, disk_native, disk_peers, disk_python
from bench.peers.disk import DiskSettings, Rounds
from bench.peers.diskjob import DiskJob, Way, check
from bench.peers.usage import Usage
from bench.peers.workers import Absent
from bench.record import Verdict

MIB = 1024**2


def _job(path: Path, *, tensor_bytes: int = 2 * MIB, count: int = 2, depth: int = 2) -> DiskJob:
    return DiskJob(path, tensor_bytes, count, MIB // 2, depth)


@pytest.mark.parametrize("name", disk_peers.PEERS)
def test_each_peer_writes_and_reads_every_byte_in_every_turn(name: str, tmp_path: Path) -> None:
    try:
        subject = disk_peers.open_subject(name)
        ready = subject("prepare", _job(tmp_path).to_mapping())
    except Absent as error:
        pytest.skip(str(error))
    for _ in range(2):
        answer = subject("turn", {})
        assert answer["verified_bytes"] == 4 * MIB
        phases = ["write", "read"] + (["warm read"] if ready["way"] == Way.CACHED.value else [])
        for phase in phases:
            taken = answer[phase]
            assert isinstance(taken, Mapping)
            assert taken["seconds"] > 0
    subject("finish", {})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("offset", [0, 3 * MIB // 2, 2 * MIB - 1])
def test_one_wrong_byte_anywhere_fails_the_turn(offset: int, tmp_path: Path) -> None:
    job, peer = _job(tmp_path), disk_python.Aiofiles()
    peer.prepare(job)
    for index, tensor in enumerate(job.expected(1)):
        peer.give(index, tensor)
    peer.write()
    with job.file(1).open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    peer.read()
    with pytest.raises(AssertionError, match="tensor 1 of 2"):
        check(peer, job, 1)


def test_bytes_of_the_turn_before_are_wrong_bytes(tmp_path: Path) -> None:
    job, peer = _job(tmp_path), disk_python.torch_save()
    peer.prepare(job)
    for index, tensor in enumerate(job.expected(1)):
        peer.give(index, tensor)
    peer.write()
    peer.read()
    with pytest.raises(AssertionError, match="tensor 0"):
        check(peer, job, 2)


def test_a_turn_compares_what_was_read(tmp_path: Path) -> None:
    def load_wrong(path: str) -> torch.Tensor:
        tensor: torch.Tensor = torch.load(path)
        tensor[-1] ^= 1
        return tensor

    turns = disk_peers.Turns("wrong", disk_python.OneByOne(torch.save, load_wrong))
    turns("prepare", _job(tmp_path).to_mapping())
    with pytest.raises(AssertionError, match="not what was written"):
        turns("turn", {})


def test_no_two_tensors_of_a_job_are_alike(tmp_path: Path) -> None:
    first, second = _job(tmp_path).expected(1)
    assert not first.equal(second)


def test_a_job_travels_as_json(tmp_path: Path) -> None:
    job = _job(tmp_path)
    assert DiskJob.from_mapping(json.loads(json.dumps(job.to_mapping()))) == job


# ---------------------------------------------------------------------- fio


def test_an_engine_of_fio_that_waits_gets_as_many_jobs_as_the_depth(tmp_path: Path) -> None:
    words = disk_native.job_options(_job(tmp_path, depth=4), "psync", "read")
    assert {"--numjobs=4", "--iodepth=1", f"--size={MIB}", f"--offset_increment={MIB}", "--direct=1"} <= set(
        words
    )
    words = disk_native.job_options(_job(tmp_path, depth=4), "libaio", "read")
    assert {"--numjobs=1", "--iodepth=4", f"--size={4 * MIB}"} <= set(words)


def test_bytes_that_are_not_whole_blocks_of_fio_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not whole blocks"):
        disk_native.job_options(_job(tmp_path, depth=3), "psync", "read")


def test_fio_s_percents_are_of_the_time_of_all_its_jobs() -> None:
    job = {"usr_cpu": 5.0, "sys_cpu": 20.0, "job_runtime": 4000}
    assert disk_native.cpu_seconds_of(job) == pytest.approx(1.0)


def test_an_engine_that_this_fio_lacks_is_absent() -> None:
    with pytest.raises(Absent, match="fio"):
        disk_native.Fio("no_such_engine")


# ---------------------------------------------------------------------- what it comes to


def _rounds(seconds: list[float], cpu_seconds: float = 0.1) -> Rounds:
    phase = [Usage(each, cpu_seconds, 0, 0) for each in seconds]
    return Rounds(10**9, Way.DIRECT.value, {"write": phase, "read": phase}, 0, 0, 10**9)


def test_speed_is_held_against_the_best_engine_round_by_round_at_the_slowest_size() -> None:
    slow = {
        "tierstore": _rounds([1.0, 2.0, 4.0]),
        "fio-psync": _rounds([0.8, 1.6, 3.2]),  # each round 0.8 of ours
        "fio-libaio": _rounds([9.0, 9.0, 9.0]),
    }
    fast = {"tierstore": _rounds([1.0]), "fio-psync": _rounds([1.0])}
    (figure,) = disk.figures({"large": fast, "small": slow})
    assert figure.name == "peers-io-speed"
    assert figure.reached == pytest.approx(0.8)
    assert figure.verdict is Verdict.MISSED
    assert "small: speed of read over that of fio-psync" in figure.details


def test_processor_time_is_held_against_deepspeed_s_at_the_worst_size() -> None:
    found = {
        "small": {"tierstore": _rounds([1.0], 0.14), "deepspeed-aio": _rounds([1.0], 0.1)},
        "large": {"tierstore": _rounds([1.0], 0.10), "deepspeed-aio": _rounds([1.0], 0.1)},
    }
    (figure,) = disk.figures(found)
    assert figure.name == "peers-io-cpu"
    assert figure.reached == pytest.approx(1.4)
    assert figure.details["small: tierstore CPU s/GB"] == "0.14"


def test_without_the_peer_there_is_no_figure() -> None:
    assert disk.figures({"small": {"tierstore": _rounds([1.0])}}) == []


def test_the_table_gives_ratios_against_the_peer_that_was_named() -> None:
    head, ours, peer = disk.table({"tierstore": _rounds([1.0]), "zarr": _rounds([2.0])}, "zarr")
    assert ours[head.index("write x zarr")] == "2.00"
    assert peer[head.index("write x zarr")] == "1.00"
    assert ours[head.index("CPU s/GB")] == "0.100"
    assert disk.table({"tierstore": _rounds([1.0])}, "zarr")[1][head.index("read x zarr")] == "-"


def test_jobs_are_recorded_in_fio_s_units() -> None:
    job = disk.fio_job("all", "tierstore", _rounds([0.5]))
    assert job["read"] == {"io_bytes": 10**9, "bw_bytes": 2 * 10**9, "bw": 2 * 10**9 // 1024, "runtime": 500}


def test_jobs_keep_the_bytes_of_a_turn_whatever_the_size(tmp_path: Path) -> None:
    jobs = DiskSettings(tmp_path, tensor_mib=(1, 64), total_mib=128).jobs()
    assert [job.nbytes for job in jobs] == [128 * MIB, 128 * MIB]
    assert jobs[0].path != jobs[1].path


@pytest.mark.slow
def test_a_whole_comparison_runs_and_is_recorded(tmp_path: Path) -> None:
    words = ["io", "--sizes", "1", "--total", "4", "--repeats", "1", "--warmups", "0", "--write"]
    words += ["--peers", "tierstore,torch.save", "--against", "torch.save"]
    words += ["--path", str(tmp_path / "disk"), "--results", str(tmp_path)]
    assert command.main(words) == 0
    recorded = json.loads((tmp_path / "peers-io.json").read_text())
    assert [job["jobname"] for job in recorded["jobs"]] == [
        "tierstore: 4 tensors of 1 MiB",
        "torch.save: 4 tensors of 1 MiB",
    ]
    assert recorded["circumstances"]["command"].startswith("python -m bench.peers io --sizes 1")
    assert "torch.save" in (tmp_path / "peers.md").read_text()
    assert not (tmp_path / "disk").exists()
