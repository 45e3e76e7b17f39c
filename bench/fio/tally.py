"""Numbers of many operations as fio sums them up: latencies, percentiles, rates, depths.

Latencies are counted in fio's histogram, whose buckets are at most 1/64 wide, and a percentile is a
bucket's middle: that is what fio's tools and ours can be compared by.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

PERCENTILES = (1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 99.5, 99.9, 99.95, 99.99)
"""fio's own list."""

_BITS = 6  # buckets of a power of two: 2 ** 6
_SAMPLE_NS = 500_000_000  # fio's bwavgtime and iopsavgtime


def bucket_middles(latencies_ns: np.ndarray) -> np.ndarray:
    """Return for each latency the middle of the histogram bucket that it falls in.

    Below 128 ns every value has its own bucket; above, each power of two has 64.
    """
    values = np.asarray(latencies_ns, dtype=np.int64)
    # frexp's exponent of x is the number of its bits; exact for what a float64 holds.
    bits = np.frexp(np.maximum(values, 1).astype(np.float64))[1]
    shift = np.maximum(bits - 1 - _BITS, 0)
    floors = (values >> shift) << shift
    middles: np.ndarray = floors + np.where(shift > 0, (np.int64(1) << shift) // 2, 0)
    return middles


def histogram(latencies_ns: np.ndarray) -> dict[int, int]:
    """Count latencies by the middles of their buckets, in order."""
    middles, counts = np.unique(bucket_middles(latencies_ns), return_counts=True)
    return dict(zip(middles.tolist(), counts.tolist(), strict=True))


def percentiles(bins: dict[int, int], percents: Sequence[float] = PERCENTILES) -> dict[float, int]:
    """Return for each percentage the smallest bucket with which at least so many are counted."""
    middles, counts = np.array(list(bins)), np.cumsum(list(bins.values()))
    ranks = [percent / 100 * counts[-1] for percent in percents]
    found = np.searchsorted(counts, ranks, side="left")
    return dict(zip(percents, middles[found].tolist(), strict=True))


def latency(latencies_ns: np.ndarray) -> dict[str, object]:
    """Sum up latencies as fio's JSON does, without percentiles."""
    if not len(latencies_ns):
        return {"min": 0, "max": 0, "mean": 0.0, "stddev": 0.0, "N": 0}
    return {
        "min": int(latencies_ns.min()),
        "max": int(latencies_ns.max()),
        "mean": float(latencies_ns.mean()),
        "stddev": float(latencies_ns.std(ddof=1)) if len(latencies_ns) > 1 else 0.0,
        "N": len(latencies_ns),
    }


def latency_with_percentiles(latencies_ns: np.ndarray, *, has_bins: bool) -> dict[str, object]:
    """Sum up latencies with percentiles, and with the histogram itself for ``json+``."""
    summary = latency(latencies_ns)
    if len(latencies_ns):
        bins = histogram(latencies_ns)
        summary["percentile"] = {f"{percent:.6f}": ns for percent, ns in percentiles(bins).items()}
        if has_bins:
            summary["bins"] = {str(ns): count for ns, count in bins.items()}
    return summary


def windows(ended_ns: np.ndarray, amounts: np.ndarray, runtime_ns: int) -> np.ndarray:
    """Return the sums per second in each half second that is whole."""
    count = runtime_ns // _SAMPLE_NS
    if count == 0:
        return np.empty(0)
    numbers = ended_ns // _SAMPLE_NS
    inside = (numbers >= 0) & (numbers < count)
    sums = np.bincount(numbers[inside], weights=amounts[inside], minlength=count)
    rates: np.ndarray = sums * (1e9 / _SAMPLE_NS)
    return rates


_EDGES = (2, 4, 10, 20, 50, 100, 250, 500, 750, 1000)


def latency_shares(latencies_ns: np.ndarray) -> dict[str, dict[str, float]]:
    """Return the percentage of latencies below each of fio's limits and not below the one before."""
    edges = [edge * unit for unit in (1, 1_000, 1_000_000) for edge in _EDGES] + [2_000_000_000]
    slots = np.searchsorted(edges, latencies_ns, side="right")
    counts = np.bincount(slots, minlength=len(edges) + 1)
    shares = (100.0 * counts / max(1, len(latencies_ns))).tolist()
    names = [str(edge) for edge in _EDGES]
    return {
        "latency_ns": dict(zip(names, shares[:10], strict=True)),
        "latency_us": dict(zip(names, shares[10:20], strict=True)),
        "latency_ms": dict(zip([*names, "2000", ">=2000"], shares[20:], strict=True)),
    }


def depth_shares(depths: np.ndarray) -> dict[str, float]:
    """Return the percentage of operations that began at each depth, up to the next power of two."""
    levels = np.minimum(np.frexp(np.maximum(depths, 1).astype(np.float64))[1] - 1, 6)
    counts = np.bincount(levels, minlength=7)
    names = ("1", "2", "4", "8", "16", "32", ">=64")
    return dict(zip(names, (100.0 * counts / max(1, len(depths))).tolist(), strict=True))


def batch_shares(count: int, batch: int) -> dict[str, float]:
    """Return fio's shares of batch sizes where ``count`` operations begin ``batch`` at a time."""
    names = ("0", "4", "8", "16", "32", "64", ">=64")
    shares = dict.fromkeys(names, 0.0)
    name = next((name for name in names[1:-1] if batch <= int(name)), names[-1])
    return shares | {name: 100.0 if count else 0.0}
