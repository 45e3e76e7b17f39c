"""Results as fio's terminal summary, printed from entries of its JSON.

Numbers are shortened as fio does it: four digits, binary and decimal units side by side.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from bench.fio.plan import Planned
from bench.fio.report import Outcome

_DIGITS = 4
_BINARY = ("", "Ki", "Mi", "Gi", "Ti", "Pi")
_DECIMAL = ("", "k", "M", "G", "T", "P")
_DIRECTIONS = ("read", "write")


def short(number: float, *, base: int, prefixes: Sequence[str], unit: str = "", first: int = 0) -> str:
    """Write a number with at most four digits, as fio does.

    Args:
        number: whole units of ``prefixes[first]``; a fraction is cut off.
        base: 1000 or 1024.
        prefixes: of the units, smallest first.
        unit: what follows the prefix.
        first: which prefix the number has to begin with.
    """
    whole, rest, power = int(number), None, first
    while len(str(whole)) > _DIGITS and power + 1 < len(prefixes):
        whole, rest = divmod(whole, base)
        power += 1
    decimals = max(0, _DIGITS - len(str(whole)) - 1)
    if rest is None:
        return f"{whole}{prefixes[power]}{unit}"
    return f"{whole + rest / base:.{decimals}f}{prefixes[power]}{unit}"


def _binary(nbytes: float, unit: str) -> str:
    """Write bytes in units of 1024: fio begins with KiB unless there are fewer bytes than that."""
    first = 1 if nbytes >= 1024 else 0
    return short(nbytes / 1024**first, base=1024, prefixes=_BINARY, unit=unit, first=first)


def _decimal(nbytes: float, unit: str) -> str:
    first = 1 if nbytes >= 1000 else 0
    return short(nbytes / 1000**first, base=1000, prefixes=_DECIMAL, unit=unit, first=first)


def _count(number: float) -> str:
    return short(number, base=1000, prefixes=_DECIMAL)


def heading(planned: Iterable[Planned]) -> str:
    """Return the lines that say what will run."""
    lines = []
    for each in planned:
        merged = each.merged
        rw = merged.get("rw", merged.get("readwrite", "read"))
        block = next(
            (merged[key] for key in ("bssplit", "bsrange", "bs", "blocksize") if key in merged), "4096"
        )
        depth = merged.get("iodepth", "1")
        lines.append(
            f"{each.name}: (g={each.group}): rw={rw}, bs={block}, ioengine={each.engine}, iodepth={depth}"
        )
        lines += ["..."] if int(merged.get("numjobs", "1")) > 1 else []
    return "\n".join(lines)


def summary(made: Sequence[Outcome], disks: Sequence[Mapping[str, Any]]) -> str:
    """Return all blocks: each job, each group of jobs, the disks."""
    blocks = [_job(outcome) for outcome in made]
    groups = itertools.groupby(made, key=lambda outcome: outcome.planned.group)
    tail = [_group(number, [outcome.entry for outcome in members]) for number, members in groups]
    if disks:
        tail.append("\n".join(["Disk stats (read/write):", *map(_disk, disks)]))
    return "\n".join(blocks) + "\n\n" + "\n\n".join(tail)


def _job(outcome: Outcome) -> str:
    entry: Mapping[str, Any] = outcome.entry
    of = f"(groupid={entry['groupid']}, jobs={outcome.threads})"
    now = time.strftime("%a %b %e %H:%M:%S %Y")
    lines = [f"{entry['jobname']}: {of}: err={entry['error']:2d}: pid={outcome.pid}: {now}"]
    if "desc" in entry:
        lines.append(f"  Description  : [{entry['desc']}]")
    for name in _DIRECTIONS:
        lines += _direction(name, entry[name]) if entry[name]["total_ios"] else []
    lines += _sync(entry["sync"]) if entry["sync"]["total_ios"] else []
    lines += [line for unit in ("ns", "us", "ms") for line in _shares(unit, entry[f"latency_{unit}"])]
    lines.append(
        f"  cpu          : usr={entry['usr_cpu']:3.2f}%, sys={entry['sys_cpu']:3.2f}%, ctx={entry['ctx']}, "
        f"majf={entry['majf']}, minf={entry['minf']}"
    )
    for label, key in (("IO depths ", "level"), ("   submit ", "submit"), ("   complete ", "complete")):
        shares = ", ".join(f"{depth}={share:3.1f}%" for depth, share in entry[f"iodepth_{key}"].items())
        lines.append(f"  {label:<13}: {shares}")
    totals = ",".join(str(entry[name]["total_ios"]) for name in (*_DIRECTIONS, "trim", "sync"))
    lines.append(f"     issued rwts: total={totals} short=0,0,0,0 dropped=0,0,0,0")
    lines.append(f"     latency   : target=0, window=0, percentile=100.00%, depth={entry['latency_depth']}")
    lines += _ours(entry["tierstore"]) if "tierstore" in entry else []
    return "\n".join(lines)


def _direction(name: str, entry: Mapping[str, Any]) -> list[str]:
    rate = f"BW={_binary(entry['bw_bytes'], 'B/s')} ({_decimal(entry['bw_bytes'], 'B/s')})"
    moved = f"({_binary(entry['io_bytes'], 'B')}/{entry['runtime']}msec)"
    lines = [f"  {name:>5}: IOPS={_count(entry['iops'])}, {rate}{moved}"]
    lines += [
        _latency(label, entry[f"{label}_ns"])
        for label in ("slat", "clat", "lat")
        if entry[f"{label}_ns"]["N"]
    ]
    if "percentile" in entry["clat_ns"]:
        lines += _percentiles("clat", entry["clat_ns"]["percentile"])
    if entry["bw_samples"]:
        bw, iops = (
            f"avg={entry[f'{name}_mean']:5.2f}, stdev={entry[f'{name}_{deviation}']:5.2f}, "
            f"samples={entry[f'{name}_samples']}"
            for name, deviation in (("bw", "dev"), ("iops", "stddev"))
        )
        bounds = f"min={entry['bw_min']:5d}, max={entry['bw_max']:5d}, per={entry['bw_agg']:3.2f}%"
        lines.append(f"   bw (  KiB/s): {bounds}, {bw}")
        lines.append(f"   iops        : min={entry['iops_min']:5d}, max={entry['iops_max']:5d}, {iops}")
    return lines


def _sync(entry: Mapping[str, Any]) -> list[str]:
    lines = ["  fsync/fdatasync/sync_file_range:", _latency("sync", entry["lat_ns"])]
    return lines + _percentiles("sync", entry["lat_ns"]["percentile"])


def _unit(low_ns: float, high_ns: float) -> tuple[str, int]:
    """Return the unit that fio chooses for numbers in this range, and its nanoseconds."""
    for unit, factor in (("msec", 1_000_000), ("usec", 1_000)):
        if low_ns > 2 * factor and high_ns > 99.999 * factor:
            return unit, factor
    return "nsec", 1


def _latency(label: str, entry: Mapping[str, Any]) -> str:
    unit, factor = _unit(entry["min"], entry["max"])
    low, high = (_count(entry[key] // factor) for key in ("min", "max"))
    mean, deviation = entry["mean"] / factor, entry["stddev"] / factor
    return f"    {label:>4} ({unit}): min={low}, max={high}, avg={mean:5.2f}, stdev={deviation:5.2f}"


def _percentiles(label: str, entry: Mapping[str, int]) -> list[str]:
    values = list(entry.values())
    unit, factor = _unit(values[0], values[-1])
    shown = [f"{value // factor}" for value in values]
    width = max(map(len, shown))
    cells = [
        f"{float(percent):5.2f}th=[{value:>{width}}]" for percent, value in zip(entry, shown, strict=True)
    ]
    rows = [cells[start : start + 4] for start in range(0, len(cells), 4)]
    lines = ["     | " + ", ".join(row) + "," for row in rows]
    lines[-1] = lines[-1][:-1]
    return [f"    {label} percentiles ({unit}):", *lines]


def _shares(unit: str, shares: Mapping[str, float]) -> list[str]:
    seen = [f"{edge}={share:3.2f}%" for edge, share in shares.items() if share > 0]
    label = {"ns": "nsec", "us": "usec", "ms": "msec"}[unit]
    return [f"  lat ({label})   : " + ", ".join(seen[at : at + 6]) for at in range(0, len(seen), 6)]


def _ours(entry: Mapping[str, Any]) -> list[str]:
    lines = [
        "  tierstore    : "
        + ", ".join(f"{k}={v}" for k, v in entry["store"].items() if not isinstance(v, dict))
    ]
    for name, tier in entry["tiers"].items():
        counts = ", ".join(f"{key}={tier[key]}" for key in ("hits", "faults", "evictions", "refusals"))
        lines.append(f"     {name:<10}: {counts}, peak={_binary(tier['peak_charged_bytes'], 'B')}")
        if codec := tier.get("codec"):
            raw, held = (_binary(codec[key], "B") for key in ("raw_bytes", "held_bytes"))
            lines.append(
                f"     codec     : {codec['packed_tensors']} tensors of {raw} packed into {held}, "
                f"{codec['skipped_tensors']} as they were"
            )
    moved = ", ".join(
        f"{way}={_binary(t['bytes'], 'B')}" for way, t in entry["traffic"].items() if t["bytes"]
    )
    lines.append(f"     moved     : {moved or 'nothing'}, verified={_binary(entry['verified_bytes'], 'B')}")
    lines.append(
        f"     cpu       : {entry['cpu_seconds']:.2f} s of the process, "
        f"{entry['cpu_seconds_per_gb']:.3f} s for each GB moved"
    )
    if "optimum" in entry:
        best = entry["optimum"]
        lines.append(
            f"     hit ratio : {entry['hit_ratio']:.4f}, optimum {best['hit_ratio']:.4f} ({best['kind']}), "
            f"reached {best['reached']:.4f}"
        )
    return lines + [f"     ERROR     : {message}" for message in entry.get("errors", ())]


def _group(number: int, entries: Sequence[Mapping[str, Any]]) -> str:
    lines = [f"Run status group {number} (all jobs):"]
    for name in _DIRECTIONS:
        parts = [entry[name] for entry in entries if entry[name]["total_ios"]]
        if not parts:
            continue
        runtimes = [part["runtime"] for part in parts]
        nbytes = sum(part["io_bytes"] for part in parts)
        total = nbytes * 1000 // max(runtimes)
        total = parts[0]["bw_bytes"] if len(parts) == 1 else total
        low, high = min(part["bw_bytes"] for part in parts), max(part["bw_bytes"] for part in parts)
        rates = (
            f"{_binary(low, 'B/s')}-{_binary(high, 'B/s')} ({_decimal(low, 'B/s')}-{_decimal(high, 'B/s')})"
        )
        lines.append(
            f"  {name.upper():>5}: bw={_binary(total, 'B/s')} ({_decimal(total, 'B/s')}), {rates}, "
            f"io={_binary(nbytes, 'B')} ({_decimal(nbytes, 'B')}), run={min(runtimes)}-{max(runtimes)}msec"
        )
    return "\n".join(lines)


def _disk(disk: Mapping[str, Any]) -> str:
    pairs = ", ".join(
        f"{label}={disk[f'read_{key}']}/{disk[f'write_{key}']}"
        for label, key in (("ios", "ios"), ("merge", "merges"), ("ticks", "ticks"))
    )
    return f"  {disk['name']}: {pairs}, in_queue={disk['in_queue']}, util={disk['util']:3.2f}%"
