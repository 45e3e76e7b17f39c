"""What sections mean: keys, what goes together, and which jobs run at the same time."""

from __future__ import annotations

import subprocess

import pytest

from bench.fio import keys
from bench.fio.job import Job, Step
from bench.fio.jobfile import JobFileError, parse, raw_jobs
from bench.fio.plan import Planned, plan
from bench.fio.values import Pair
from tests.unit.test_bench_fio_jobfile import needs_fio


def planned(text: str) -> list[list[Planned]]:
    return plan(raw_jobs(parse(text, "j.fio")))


def job(*lines: str) -> Job:
    ((only,),) = planned("\n".join(["[x]", "ioengine=tierstore", "size=1m", *lines]))
    assert only.job is not None
    return only.job


def faults(text: str) -> list[str]:
    with pytest.raises(JobFileError) as caught:
        planned(text)
    return list(caught.value.faults)


def test_all_unknown_keys_are_named_at_once_with_what_was_meant() -> None:
    text = (
        "[global]\nioengine=tierstore\nsize=1m\nhots_quota=1m\n[a]\nevictoin=lru\nthinktime=5\n[b]\nzzzzz=1\n"
    )
    named = faults(text)
    assert named == [
        "j.fio:4: unknown key 'hots_quota'; did you mean 'host_quota' or 'disk_quota'?",
        "j.fio:6: unknown key 'evictoin'; did you mean 'eviction'?",
        "j.fio:7: 'thinktime' is a key of fio that ioengine=tierstore does not support",
        "j.fio:9: unknown key 'zzzzz'",
    ]


def test_a_section_for_fio_may_have_all_of_fios_keys_and_none_of_ours() -> None:
    ((only,),) = planned("[x]\nioengine=psync\nthinktime=5\nsize=1m\n")
    assert only.job is None
    (fault,) = faults("[x]\nioengine=psync\nhost_quota=5\nsize=1m\n")
    assert "unknown key 'host_quota'" in fault


def test_what_a_section_for_fio_inherits_for_the_store_is_no_fault() -> None:
    text = "[global]\nhost_quota=1g\nsize=1m\n[x]\nioengine=psync\n"
    ((only,),) = planned(text)
    assert only.job is None


def test_bad_values_are_named_with_what_is_accepted() -> None:
    named = faults("[x]\nioengine=tierstore\nsize=4q\nrw=trim\nop=get,lease\niodepth=0\n")
    assert [fault.partition(":")[2].partition(":")[0] for fault in named] == ["3", "4", "5", "6"]
    assert all("accepted" in fault for fault in named)


@needs_fio
@pytest.mark.parametrize("name", sorted(name for name in keys.FIO_KEYS if name != "name"))
def test_each_key_that_we_say_is_fios_is_one(name: str) -> None:
    said = subprocess.run(["fio", f"--cmdhelp={name}"], capture_output=True, text=True, check=False)
    assert said.stdout.strip().startswith(f"{name}: "), said.stdout
    assert keys.is_fios(name)


@needs_fio
def test_the_list_of_fios_keys_holds_what_fio_lists() -> None:
    said = subprocess.run(["fio", "--cmdhelp=all"], capture_output=True, text=True, check=True)
    names = {line.partition(":")[0].strip() for line in said.stdout.splitlines() if ":" in line}
    assert {name for name in names if not keys.is_fios(name)} == set()


def test_none_of_our_keys_is_one_of_fios() -> None:
    assert [name for name in keys.OUR_KEYS if keys.is_fios(name)] == []


def test_an_alias_is_the_key_it_stands_for() -> None:
    assert job("readwrite=randread", "timeout=3").direction is keys.Direction.RANDREAD


def test_a_read_fetches_into_the_fastest_tier_from_the_one_below_unless_told_otherwise() -> None:
    assert job().steps.read == Step("fetch", "host", "disk")
    assert job("device_quota=1m").steps.read == Step("fetch", "device", "host")
    assert job("op=get").steps.read == Step("get", "disk", "disk")
    assert job("op=lease").steps.read == Step("lease", "host", keys.ANYWHERE)


def test_a_write_evicts_into_the_last_tier_from_the_one_above_unless_told_otherwise() -> None:
    assert job("rw=write").steps.write == Step("evict", "disk", "host")
    assert job("rw=write", "op=put").steps.write == Step("put", "host", keys.ANYWHERE)
    assert job("rw=write", "op=put", "tier=disk").steps.write == Step("put", "disk", keys.ANYWHERE)


def test_tiers_and_operations_may_be_pairs() -> None:
    mixed = job("rw=randrw", "op=get,evict", "tier=host,disk")
    assert mixed.steps == Pair(Step("get", "host", "host"), Step("evict", "disk", "host"))


def test_a_quota_in_percent_is_of_the_jobs_size() -> None:
    assert job("host_quota=50%").store.host_bytes == 512 * 1024


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (["size=2k"], "less than one tensor"),
        (["size=8g"], "disk_quota"),
        (["host_quota=0"], "host_quota is 0"),
        (["disk_quota=0"], "no tier below"),
        (["rw=write", "tier=host"], "no tier above"),
        (["op=lease", "tier=disk"], "not to tier=disk"),
        (["tier=device"], "tiers with a quota"),
        (["op=fetch", "tier=host", "from=host"], "both host"),
        (["rw=write", "op=put", "from=host"], "leave from out"),
        (["rw=write", "op=evict", "from=disk"], "host or device"),
        (["iodepth_batch=2"], "more than iodepth"),
        (["iodepth_batch=2", "iodepth=2", "op=get"], "one call takes one tensor"),
        (["time_based"], "needs runtime"),
        (["fsync=1", "rw=write"], "durable=1"),
        (["op=open"], "durable=1"),
        (["rw=write", "op=flush"], "durable=1"),
        (["thread=0"], "threads of one process"),
        (["trace=cyclic", "rw=randread"], "trace needs"),
        (["trace=cyclic", "iodepth=2"], "iodepth=1"),
        (["rw=rw", "bs=4k,8k"], "one size"),
        (["op=get", "tier=host", "host_quota=50%"], "does not fit into host_quota"),
        (["verify=md5", "content=zeros"], "looks like another"),
        (["rate=1m", "rate_iops=5"], "give one"),
    ],
)
def test_what_does_not_go_together_is_refused_with_the_reason(lines: list[str], reason: str) -> None:
    (fault,) = faults("\n".join(["[x]", "ioengine=tierstore", "size=1m", *lines]))
    assert fault.startswith("j.fio:1: [x] ")
    assert reason in fault


def test_size_may_be_left_out_where_files_have_one() -> None:
    ((only,),) = planned("[x]\nioengine=tierstore\nfilesize=1m\nnrfiles=3\n")
    assert only.job is not None
    assert only.job.size_bytes == 3 * 1024**2
    (fault,) = faults("[x]\nioengine=tierstore\n")
    assert "size is missing" in fault


def test_a_stonewall_begins_a_batch_and_a_group() -> None:
    text = "[global]\nioengine=tierstore\nsize=1m\n[a]\n[b]\n[c]\nstonewall\n[d]\nnew_group\n"
    batches = planned(text)
    assert [[(each.name, each.group) for each in batch] for batch in batches] == [
        [("a", 0), ("b", 0)],
        [("c", 1), ("d", 2)],
    ]


def test_jobs_of_the_store_and_of_fio_do_not_run_at_the_same_time() -> None:
    (fault,) = faults("[global]\nsize=1m\n[a]\nioengine=tierstore\n[b]\nioengine=psync\n")
    assert "let [b] wait with stonewall" in fault
    assert len(planned("[global]\nsize=1m\n[a]\nioengine=tierstore\n[b]\nioengine=psync\nstonewall\n")) == 2
