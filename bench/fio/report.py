"""Results as fio's JSON: the same keys, nesting and units; ours besides, under ``tierstore``.

An entry of ``jobs`` is a plain mapping, whether fio measured it or the store's runner, so that whatever
prints or draws treats both alike.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.fio import tally
from bench.fio.plan import Planned
from bench.fio.runner import Finished
from bench.fio.samples import Kind, Samples

Json = dict[str, object]

_NO_ETA = 2147483647  # fio's "unknown", in every finished job


@dataclass(frozen=True, slots=True)
class Outcome:
    """One entry of ``jobs``, and the sections that it reports on, for whoever prints and draws."""

    planned: Planned
    entry: Json
    threads: int
    pid: int


def outcomes(finished: Iterable[Finished], pid: int, *, has_bins: bool) -> list[Outcome]:
    """Return an entry for each thread of a job, or for all of a group where it reports as one."""
    made = []
    for group, members in itertools.groupby(finished, key=lambda each: each.planned.group):
        threads = list(members)
        del group
        while threads:
            first = threads[0]
            count = len(threads) if first.planned.is_group_reporting else 1
            part, threads = threads[:count], threads[count:]
            made.append(Outcome(first.planned, _entry(part, has_bins=has_bins), count, pid))
    return made


def _entry(threads: Sequence[Finished], *, has_bins: bool) -> Json:
    first = threads[0]
    samples = Samples.joined([each.samples for each in threads])
    runtime_ns = max(1, *(each.runtime_ns for each in threads))
    counted: Counter[str] = Counter()
    for each in threads:
        counted.update(each.counted)  # not +, which leaves out what is 0
    failed = [each for each in threads if each.error]
    entry: Json = {
        "jobname": first.planned.name,
        "groupid": first.planned.group,
        "error": failed[0].error if failed else 0,
        "eta": _NO_ETA,
        "elapsed": 1 + int(max(each.elapsed_s for each in threads)),
        "job options": dict(first.planned.options),
    }
    if first.job.description:
        entry["desc"] = first.job.description
    for kind in (Kind.READ, Kind.WRITE):
        parts = [each.samples.of(kind) for each in threads]
        entry[kind.name.lower()] = _direction(parts, runtime_ns, has_bins=has_bins)
    entry["trim"] = _direction([], runtime_ns, has_bins=False)
    syncs = samples.of(Kind.SYNC)
    entry["sync"] = {"total_ios": len(syncs), "lat_ns": _sync_latency(syncs, has_bins=has_bins)}
    # Depths and latencies are those of reads and writes.
    moved = Samples(samples.rows[samples.rows[:, 0] != Kind.SYNC])
    entry |= _usage(counted, runtime_ns, len(threads))
    entry["job_runtime"] = sum(math.ceil(each.runtime_ns / 1e6) for each in threads)
    entry["iodepth_level"] = tally.depth_shares(moved.depth)
    entry["iodepth_submit"] = tally.batch_shares(len(moved), first.job.iodepth_batch)
    entry["iodepth_complete"] = tally.batch_shares(len(moved), first.job.iodepth_batch)
    entry |= tally.latency_shares(moved.clat_ns)
    entry |= {"latency_depth": first.job.iodepth, "latency_target": 0}
    entry |= {"latency_percentile": 100.0, "latency_window": 0}
    entry["tierstore"] = _ours(threads, counted, int(moved.nbytes.sum()))
    return entry


def _sync_latency(syncs: Samples, *, has_bins: bool) -> Json:
    return tally.latency_with_percentiles(syncs.clat_ns, has_bins=has_bins)


def _direction(parts: Sequence[Samples], runtime_ns: int, *, has_bins: bool) -> Json:
    samples = Samples.joined(list(parts))
    nbytes, count = int(samples.nbytes.sum()), len(samples)
    bw_bytes = int(nbytes * 1e9 / runtime_ns) if count else 0
    entry: Json = {
        "io_bytes": nbytes,
        "io_kbytes": nbytes // 1024,
        "bw_bytes": bw_bytes,
        "bw": bw_bytes // 1024,
        "iops": count * 1e9 / runtime_ns if count else 0.0,
        "runtime": max(1, round(runtime_ns / 1e6)) if count else 0,
        "total_ios": count,
        "short_ios": 0,
        "drop_ios": 0,
        "slat_ns": tally.latency(samples.slat_ns),
        "clat_ns": tally.latency_with_percentiles(samples.clat_ns, has_bins=has_bins),
        "lat_ns": tally.latency(samples.lat_ns),
    }
    rates = [tally.windows(part.ended_ns, part.nbytes / 1024, runtime_ns) for part in parts if len(part)]
    bw = np.concatenate(rates) if rates else np.empty(0)
    rates = [tally.windows(part.ended_ns, np.ones(len(part)), runtime_ns) for part in parts if len(part)]
    iops = np.concatenate(rates) if rates else np.empty(0)
    whole = bw_bytes / 1024 or 1.0
    low, high, mean, deviation = _four(bw)
    entry |= {"bw_min": int(low), "bw_max": int(high)}
    entry |= {"bw_agg": min(100.0, 100.0 * mean * len(parts) / whole) if len(bw) else 0.0}
    entry |= {"bw_mean": mean, "bw_dev": deviation, "bw_samples": len(bw)}
    low, high, mean, deviation = _four(iops)
    entry |= {"iops_min": int(low), "iops_max": int(high), "iops_mean": mean}
    return entry | {"iops_stddev": deviation, "iops_samples": len(iops)}


def _four(values: np.ndarray) -> tuple[float, float, float, float]:
    if not len(values):
        return 0.0, 0.0, 0.0, 0.0
    deviation = float(values.std(ddof=1)) if len(values) > 1 else 0.0
    return float(values.min()), float(values.max()), float(values.mean()), deviation


def _usage(counted: Mapping[str, int], runtime_ns: int, threads: int) -> Json:
    """Return what the process used.  Threads that ran at the same time have counted the same seconds."""
    runtime_us = runtime_ns / 1e3 * threads
    return {
        "usr_cpu": 100.0 * counted["user_us"] / runtime_us,
        "sys_cpu": 100.0 * counted["system_us"] / runtime_us,
        "ctx": counted["switches"] // threads,
        "majf": counted["major_faults"] // threads,
        "minf": counted["minor_faults"] // threads,
    }


def _ours(threads: Sequence[Finished], counted: Counter[str], moved_bytes: int) -> Json:
    cpu_s = (counted["user_us"] + counted["system_us"]) / 1e6 / len(threads)
    ours: Json = {
        "version": importlib.metadata.version("tierstore"),
        "store": _store(threads[0]),
        "tiers": _tiers(threads, counted),
        "traffic": _traffic(counted, len(threads)),
        "stall_seconds": counted["stall_us"] / 1e6 / len(threads),
        "cpu_seconds": cpu_s,
        "cpu_seconds_per_gb": cpu_s / (moved_bytes / 1e9) if moved_bytes else 0.0,
        "io": {
            name.removeprefix("io."): n // len(threads) for name, n in counted.items() if name[:3] == "io."
        },
        "verified_bytes": sum(each.verified_bytes for each in threads),
    }
    messages = [each.message for each in threads if each.message]
    if messages:
        ours["errors"] = messages
    if (best := threads[0].optimum) is not None:
        tier = threads[0].job.steps.read.tier
        hits, faults = counted[f"tier.{tier}.hits"], counted[f"tier.{tier}.faults"]
        ratio = hits / max(1, hits + faults)
        ours["hit_ratio"] = ratio
        ours["optimum"] = {"hits": best.hits, "accesses": best.accesses, "hit_ratio": best.ratio}
        ours["optimum"] |= {"kind": best.kind, "reached": ratio / best.ratio if best.ratio else 1.0}  # type: ignore[operator]
    return ours


def _store(thread: Finished) -> Json:
    job = thread.job
    keys = job.store
    quotas = {f"{tier}_quota": keys.capacity_bytes(tier) for tier in keys.tiers}
    steps = {"read": job.steps.read, "write": job.steps.write}
    present = {"read": job.direction.has_reads, "write": job.direction.has_writes}
    shown = {
        name: {"op": step.op, "tier": step.tier, "from": step.origin}
        for name, step in steps.items()
        if present[name]
    }
    more = {"eviction": keys.eviction, "codec": keys.codec or "none", "files": dict(keys.options)}
    return {**quotas, **more, **shown}


def _tiers(threads: Sequence[Finished], counted: Counter[str]) -> Json:
    """Return each tier's counters.  Threads of one store at the same time have counted the same."""
    tiers: Json = {}
    for name, kept in threads[0].stats.items():
        prefix = f"tier.{name}."
        found = {
            key.removeprefix(prefix): n // len(threads)
            for key, n in counted.items()
            if key.startswith(prefix)
        }
        tiers[name] = {**kept, **found}
    return tiers


def _traffic(counted: Counter[str], threads: int) -> Json:
    """Return ``traffic.a.b.copies`` as ``{"a->b": {"copies": ...}}``."""
    nested: dict[str, dict[str, int]] = {}
    for key, number in counted.items():
        if key.startswith("traffic."):
            _, source, target, what = key.split(".")
            nested.setdefault(f"{source}->{target}", {})[what] = number // threads
    return dict(nested)


def document(made: Sequence[Outcome], disks: Sequence[Json], global_options: Mapping[str, str]) -> Json:
    """Return everything as fio's JSON."""
    now = time.time()
    return {
        "fio version": f"tierstore-{importlib.metadata.version('tierstore')}",
        "timestamp": int(now),
        "timestamp_ms": int(now * 1000),
        "time": time.strftime("%a %b %e %H:%M:%S %Y", time.localtime(now)),
        "global options": dict(global_options),
        "jobs": [outcome.entry for outcome in made],
        "disk_util": list(disks),
    }
