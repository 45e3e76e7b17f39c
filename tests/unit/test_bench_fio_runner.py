"""Jobs on real stores: what they move, verify, count and refuse; and what fio's own programs make of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tierstore as ts
from bench.fio import shelf
from bench.fio.command import Run, main, run_batches
from bench.fio.job import Job
from bench.fio.jobfile import parse, raw_jobs
from bench.fio.plan import plan
from bench.fio.report import document
from bench.fio.shelf import Shelf
from tests.unit.test_bench_fio_jobfile import needs_fio
from tierstore.spi import Buffer, Completion, Slot
from tierstore_backends.memory import MemoryBackend

CLOSE = ts.Store.close
HEAD = "[global]\nioengine=tierstore\nsize=1m\nbs=64k\nhost_quota=4m\ndisk_quota=8m\n"


def run(text: str, path: Path, head: str = HEAD) -> Run:
    return run_batches(plan(raw_jobs(parse(head + text))), path)


def entries(text: str, path: Path, head: str = HEAD) -> list[Any]:
    return [outcome.entry for outcome in run(text, path, head).outcomes]


# ---------------------------------------------------------------------- what is moved


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize(
    ("lines", "way", "moved"),
    [
        ("rw=read", "read", "disk->host"),
        ("rw=randread\nop=lease\nfrom=disk", "read", "disk->host"),
        ("rw=randread\nop=get", "read", "disk->caller"),
        ("rw=read\nop=get\ntier=host", "read", "host->caller"),
        ("rw=read\ndevice_quota=2m", "read", "host->device"),
        ("rw=write", "write", "host->disk"),
        ("rw=randwrite\nop=put", "write", "caller->host"),
        ("rw=randwrite\nop=put\ntier=disk", "write", "caller->disk"),
    ],
)
def test_a_job_moves_its_bytes_once_in_each_loop(
    lines: str, way: str, moved: str, depth: int, tmp_path: Path
) -> None:
    (entry,) = entries(f"[x]\n{lines}\nverify=xxhash\nloops=3\niodepth={depth}\n", tmp_path)
    assert entry["error"] == 0
    assert (entry[way]["total_ios"], entry[way]["io_bytes"]) == (48, 3 * 1024**2)
    assert entry["tierstore"]["traffic"][moved]["bytes"] == 3 * 1024**2
    assert entry["tierstore"]["verified_bytes"] >= 1024**2
    assert entry[way]["clat_ns"]["N"] == 48


@pytest.mark.parametrize("ops", ["fetch,evict", "get,put", "lease,put"])
def test_a_mix_reads_and_writes(ops: str, tmp_path: Path) -> None:
    (entry,) = entries(f"[x]\nrw=randrw\nop={ops}\nverify=md5\nloops=4\niodepth=3\n", tmp_path)
    assert entry["error"] == 0, entry["tierstore"]
    assert entry["read"]["total_ios"] + entry["write"]["total_ios"] == 64
    assert min(entry["read"]["total_ios"], entry["write"]["total_ios"]) > 16


def test_writes_that_do_not_fit_are_made_ready_in_parts(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nrw=write\nhost_quota=256k\niodepth=2\nverify=md5\n", tmp_path)
    assert entry["tierstore"]["traffic"]["host->disk"]["bytes"] == 1024**2


def test_a_batch_begins_in_one_call_and_every_tensor_counts(tmp_path: Path) -> None:
    text = "[x]\nrw=randrw\niodepth=8\niodepth_batch=4\nverify=md5\nloops=2\n"
    (entry,) = entries(text, tmp_path)
    assert entry["error"] == 0
    assert entry["read"]["total_ios"] + entry["write"]["total_ios"] == 32
    ways = entry["tierstore"]["traffic"]
    assert ways["disk->host"]["copies"] + ways["host->disk"]["copies"] == 32


def test_tensors_that_come_twice_are_made_ready_again(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nrw=randread\nrandom_distribution=zipf:1.2\nio_size=4m\n", tmp_path)
    assert entry["read"]["total_ios"] == 64
    assert entry["tierstore"]["traffic"]["disk->host"]["copies"] == 64


def test_jobs_with_one_filename_work_on_the_same_tensors(tmp_path: Path) -> None:
    text = "[w]\nrw=write\nfilename=f\n[r]\nstonewall\nrw=read\nop=get\nfilename=f\nverify=sha256\n"
    write, read = entries(text, tmp_path)
    assert write["write"]["io_bytes"] == read["read"]["io_bytes"] == 1024**2
    assert read["error"] == 0
    assert "caller->disk" not in read["tierstore"]["traffic"]


def test_jobs_that_cut_one_filename_differently_are_refused(tmp_path: Path) -> None:
    _, entry = entries("[a]\nfilename=f\n[b]\nstonewall\nfilename=f\nbs=32k\n", tmp_path)
    assert entry["error"] == 22
    assert "same size and bs" in entry["tierstore"]["errors"][0]


def test_unlink_drops_the_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[int] = []
    give = Shelf.give

    def look(self: Shelf, job: Job) -> None:
        left.append(len(self.take(job).store))
        give(self, job)

    monkeypatch.setattr(Shelf, "give", look)
    entries("[a]\n[b]\nstonewall\nunlink=1\nfilename=b\n", tmp_path)
    assert left == [16, 16]  # those of a; b's are gone again


def test_a_write_is_flushed_after_so_many_and_each_one_moves(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nrw=write\ndurable=1\nfsync=4\nend_fsync=1\nverify=md5\n", tmp_path)
    assert entry["error"] == 0
    assert entry["sync"]["total_ios"] == 5
    # A flush brings down all that could be written: what is ready is no more than comes before the next.
    assert entry["tierstore"]["tiers"]["host"]["evictions"] == 16
    assert entry["write"]["clat_ns"]["percentile"]["1.000000"] > 20_000


def test_a_flush_is_timed_with_one_tensor_to_bring_down(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nrw=write\nop=flush\ndurable=1\nverify=md5\n", tmp_path)
    assert entry["error"] == 0
    assert entry["tierstore"]["traffic"]["host->disk"]["copies"] == 16


def test_a_durable_store_is_opened_again_with_every_key(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nop=open\ndurable=1\nnumber_ios=3\n", tmp_path)
    assert (entry["error"], entry["read"]["total_ios"], entry["read"]["io_bytes"]) == (0, 3, 0)


def test_a_store_that_does_not_find_its_keys_again_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ts.Store, "flush", lambda _: None)

    def forget(store: ts.Store, *, flush: bool = True) -> None:
        del flush
        with contextlib.suppress(ts.StoreClosed):
            store.drop(*store.keys())
        CLOSE(store)

    monkeypatch.setattr(ts.Store, "close", forget)
    (entry,) = entries("[x]\nop=open\ndurable=1\nnumber_ios=3\n", tmp_path)
    assert entry["error"] == 84
    assert "found 0 keys again of 16" in entry["tierstore"]["errors"][0]


def test_what_a_codec_packed_is_reported(tmp_path: Path) -> None:
    text = "[x]\nrw=write\ncodec=lz4\nbuffer_compress_percentage=75\nverify=md5\n"
    (entry,) = entries(text, tmp_path)
    assert entry["error"] == 0
    codec = entry["tierstore"]["tiers"]["disk"]["codec"]
    assert codec["packed_tensors"] == 16
    assert codec["held_bytes"] < codec["raw_bytes"] / 2


# ---------------------------------------------------------------------- when it ends


def test_a_time_based_job_goes_on_for_its_runtime(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nop=get\ntime_based\nruntime=300ms\n", tmp_path)
    assert 300 <= entry["read"]["runtime"] < 2000
    assert entry["read"]["total_ios"] > 16


def test_a_runtime_ends_a_job_that_would_take_longer(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nop=get\nrate=1m\nio_size=100m\nruntime=200ms\n", tmp_path)
    assert entry["read"]["io_bytes"] < 1024**2


def test_what_the_ramp_moves_is_not_counted(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nop=get\nrate_iops=100\ntime_based\nruntime=200ms\nramp_time=200ms\n", tmp_path)
    assert 10 <= entry["read"]["total_ios"] <= 22
    moved = entry["tierstore"]["traffic"]["disk->caller"]["copies"]
    assert abs(moved - entry["read"]["total_ios"]) <= 1  # the one on the edge
    assert 150 <= entry["read"]["runtime"] < 1000


def test_number_ios_ends_a_job(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nop=get\nnumber_ios=5\niodepth=2\n", tmp_path)
    assert entry["read"]["total_ios"] == 5


@pytest.mark.parametrize("op", ["get", "fetch"])
def test_a_rate_is_not_surpassed(op: str, tmp_path: Path) -> None:
    (entry,) = entries(f"[x]\nop={op}\nrate=4m\niodepth=4\n", tmp_path)
    # 16 tensors, of which the first begins at once: 15/16 of the 250 ms that 1 MiB takes.
    assert entry["read"]["runtime"] >= 230


# ---------------------------------------------------------------------- what goes wrong


class Corrupting(MemoryBackend):
    """Turns one bit of everything that it reads."""

    def read(self, slot: Slot, into: Buffer) -> Completion:
        completion = super().read(slot, into)
        into[len(into) // 2] ^= 1
        return completion


class Failing(MemoryBackend):
    """Reads nothing."""

    def read(self, slot: Slot, into: Buffer) -> Completion:
        return Completion.done(ts.BackendError("the cable is out"))


def _storage(kind: type[MemoryBackend], monkeypatch: pytest.MonkeyPatch) -> None:
    disk = lambda keys, _: ts.TierConfig("disk", kind(keys.disk_bytes, is_storage=True), keys.disk_bytes)  # noqa: E731
    monkeypatch.setattr(shelf, "_disk", disk)


@pytest.mark.parametrize(
    "lines", ["op=get", "op=fetch", "op=lease", "op=fetch\niodepth=4", "op=get\niodepth=4"]
)
def test_verify_catches_a_wrong_bit(lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _storage(Corrupting, monkeypatch)
    (entry,) = entries(f"[x]\n{lines}\nverify=crc32\n", tmp_path)
    assert entry["error"] == 84
    assert "1 of 65536 bytes, the first at offset 32768" in entry["tierstore"]["errors"][0]


def test_verify_catches_what_was_written_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _storage(Corrupting, monkeypatch)
    wrong, unseen = entries(
        "[a]\nrw=write\nverify=sha1\n[b]\nstonewall\nrw=write\nverify=sha1\ndo_verify=0\n", tmp_path
    )
    assert (wrong["error"], unseen["error"]) == (84, 0)


@pytest.mark.parametrize("lines", ["op=get\niodepth=2", "op=fetch\niodepth=8"])
def test_a_job_that_fails_says_so_and_the_others_go_on(
    lines: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _storage(Failing, monkeypatch)
    bad, good = entries(f"[bad]\n{lines}\n[good]\nrw=write\n", tmp_path)
    assert bad["error"] == 5
    assert "the cable is out" in bad["tierstore"]["errors"][0]
    assert (good["error"], good["write"]["total_ios"]) == (0, 16)


def test_an_option_that_the_backend_refuses_is_the_jobs_error(tmp_path: Path) -> None:
    (entry,) = entries("[x]\nengine=none_such\n", tmp_path)
    assert entry["error"] == 22
    assert "engine" in entry["tierstore"]["errors"][0]


# ---------------------------------------------------------------------- what is counted


def test_the_hit_ratio_of_next_use_on_a_cycle_is_the_optimum(tmp_path: Path) -> None:
    text = "[x]\ntrace=cyclic\neviction=next-use\nhost_quota=50%\nloops=10\nverify=xxhash\n"
    (entry,) = entries(text, tmp_path)
    ours = entry["tierstore"]
    assert ours["optimum"]["kind"] == "Belady's MIN, exact"
    assert ours["optimum"]["reached"] == 1
    assert ours["tiers"]["host"]["hits"] == ours["optimum"]["hits"]


def test_lru_never_hits_on_a_cycle_that_is_too_large(tmp_path: Path) -> None:
    (entry,) = entries("[x]\ntrace=cyclic\neviction=lru\nhost_quota=50%\nloops=10\n", tmp_path)
    assert entry["tierstore"]["hit_ratio"] == 0
    assert entry["tierstore"]["tiers"]["host"]["faults"] == 160


def test_threads_of_a_job_are_reported_one_by_one_or_together(tmp_path: Path) -> None:
    apart = entries("[x]\nnumjobs=3\nop=get\n", tmp_path)
    (together,) = entries("[x]\nnumjobs=3\nop=get\ngroup_reporting\n", tmp_path)
    assert [each["read"]["total_ios"] for each in apart] == [16, 16, 16]
    assert together["read"]["total_ios"] == together["read"]["clat_ns"]["N"] == 48


def test_no_more_than_iodepth_are_in_flight(tmp_path: Path) -> None:
    (entry,) = entries("[x]\niodepth=4\nloops=8\n", tmp_path)
    levels = entry["iodepth_level"]
    assert levels["4"] > 50
    assert levels["8"] == levels["16"] == 0


# ---------------------------------------------------------------------- fio's own programs


def _paths(value: object, at: str = "") -> Iterator[str]:
    """Yield where a document has a key, as fio's own keys are nested."""
    if isinstance(value, dict):
        for key, inner in value.items():
            # Which options, percentiles and latencies there are differs from run to run.
            yield f"{at}/{key}"
            if key not in {"job options", "global options", "bins"}:
                yield from _paths(inner, f"{at}/{key}")
    elif isinstance(value, list) and value:
        yield from _paths(value[0], f"{at}[]")


@needs_fio
def test_the_json_has_every_key_of_fios(tmp_path: Path) -> None:
    command = ["fio", "--output-format=json+", "--name=x", "--rw=randrw", "--size=1m", "--bs=64k"]
    command += ["--ioengine=psync", "--fsync=4"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    fios = json.loads(said[said.index("{") :])
    made = run("[x]\nrw=randrw\nop=get,put\n", tmp_path)
    ours = json.loads(json.dumps(document(made.outcomes, list(made.disks.values()), {})))
    missing = set(_paths(fios)) - set(_paths(ours))
    # Of flushes there are none without a durable tier.
    assert {path for path in missing if "/sync/" not in path and "disk_util" not in path} == set()
    added = {path for path in set(_paths(ours)) - set(_paths(fios)) if "tierstore" not in path}
    assert {path for path in added if path != "/global options" and "disk_util" not in path} == set()


@pytest.mark.skipif(
    shutil.which("fio_jsonplus_clat2csv") is None, reason="fio_jsonplus_clat2csv is not installed"
)
def test_fios_own_tool_reads_the_histograms(tmp_path: Path) -> None:
    (tmp_path / "j.fio").write_text(HEAD + "[x]\nrw=randrw\nop=get,put\n[y]\nstonewall\nop=fetch\n")
    arguments = [str(tmp_path / "j.fio"), "--path", str(tmp_path), "--output-format=json+"]
    assert main([*arguments, "--output", str(tmp_path / "out.json")]) == 0
    tool = shutil.which("fio_jsonplus_clat2csv")
    assert tool is not None
    command = [sys.executable, tool, "out.json", "out.csv"]
    subprocess.run(command, cwd=tmp_path, capture_output=True, check=True)
    said = subprocess.run([*command, "--validate"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert said.stdout.count("validated") == 2
    assert (tmp_path / "out_job0.csv").read_text().count("\n") > 2
