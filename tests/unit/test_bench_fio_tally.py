"""Sums over many operations: against numpy, and against what fio itself sums up."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.fio import tally
from bench.fio.samples import Kind, Recorder, Samples
from tests.unit.test_bench_fio_jobfile import needs_fio

_latencies = st.lists(st.integers(0, 2**45), min_size=1, max_size=300).map(np.array)


@given(_latencies)
def test_a_bucket_is_as_near_as_fios(latencies: np.ndarray) -> None:
    middles = tally.bucket_middles(latencies)
    assert np.all(middles[latencies < 128] == latencies[latencies < 128])
    assert np.all(np.abs(middles - latencies) <= latencies / 128)


@given(_latencies, st.sampled_from(tally.PERCENTILES))
def test_a_percentile_is_numpys_to_a_buckets_breadth(latencies: np.ndarray, percent: float) -> None:
    exact = np.percentile(latencies, percent, method="inverted_cdf")
    found = tally.percentiles(tally.histogram(latencies), [percent])[percent]
    assert abs(found - exact) <= exact / 64


@needs_fio
def test_percentiles_of_fios_own_histogram_are_fios(tmp_path: Path) -> None:
    command = ["fio", "--name=x", "--ioengine=null", "--size=16m", "--bs=4k", "--output-format=json+"]
    said = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    clat = json.loads(said.stdout)["jobs"][0]["read"]["clat_ns"]
    bins = {int(middle): count for middle, count in clat["bins"].items()}
    assert {f"{p:.6f}": ns for p, ns in tally.percentiles(bins).items()} == clat["percentile"]
    assert np.all(tally.bucket_middles(np.array(list(bins))) == list(bins))


@given(_latencies)
def test_a_summary_is_numpys(latencies: np.ndarray) -> None:
    summary = tally.latency(latencies)
    assert summary["N"] == len(latencies)
    assert (summary["min"], summary["max"]) == (latencies.min(), latencies.max())
    assert summary["mean"] == pytest.approx(latencies.mean())


@given(_latencies)
def test_shares_of_latencies_and_depths_sum_to_100(latencies: np.ndarray) -> None:
    shares = tally.latency_shares(latencies)
    assert sum(sum(part.values()) for part in shares.values()) == pytest.approx(100)
    assert sum(tally.depth_shares(latencies).values()) == pytest.approx(100)


@pytest.mark.parametrize(
    ("ns", "part", "edge"),
    [
        (1, "latency_ns", "2"),
        (2, "latency_ns", "4"),
        (999, "latency_ns", "1000"),
        (1_000, "latency_us", "2"),
        (2_000, "latency_us", "4"),
        (999_999, "latency_us", "1000"),
        (1_999_999_999, "latency_ms", "2000"),
        (2_000_000_000, "latency_ms", ">=2000"),
    ],
)
def test_a_latency_is_counted_below_the_next_limit(ns: int, part: str, edge: str) -> None:
    assert tally.latency_shares(np.array([ns]))[part][edge] == 100


def test_depths_are_counted_at_the_power_of_two_below() -> None:
    shares = tally.depth_shares(np.array([1, 2, 3, 4, 7, 8, 63, 64, 200, 1]))
    assert shares == {"1": 20, "2": 20, "4": 20, "8": 10, "16": 0, "32": 10, ">=64": 20}


@pytest.mark.parametrize(("batch", "name"), [(1, "4"), (4, "4"), (5, "8"), (64, "64"), (65, ">=64")])
def test_batches_are_counted_at_the_limit_above(batch: int, name: str) -> None:
    shares = tally.batch_shares(10, batch)
    assert [key for key, share in shares.items() if share] == [name]
    assert shares[name] == 100


def test_rates_are_of_whole_half_seconds() -> None:
    ended = np.array([0, 100_000_000, 600_000_000, 1_100_000_000])
    assert tally.windows(ended, np.array([1, 2, 4, 8]), 1_300_000_000).tolist() == [6, 8]


def test_what_ended_during_the_ramp_is_not_counted() -> None:
    recorder = Recorder()
    for ended_ns in (5, 10, 15):
        recorder.record(Kind.READ, ended_ns, -1, 1, 1, 1)
    kept = recorder.samples().since(10)
    assert kept.ended_ns.tolist() == [0, 5]
    assert len(Samples.joined([kept, kept])) == 4
    assert len(kept.slat_ns) == 0
