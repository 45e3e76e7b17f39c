"""What the store costs: leases, copies through host memory, the disk tier, and memory kept in reserve."""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Spread, percentile, ratios, stopwatch, take_turns
from bench.rawdisk import RawDisk
from bench.record import Better, Figure

if TYPE_CHECKING:
    from tierstore.crates import Crates

KIB, MIB = 1024, 1024**2
DISK_THREADS = 4  # what the files backend takes by default; its peer gets as many
DISK_BLOCK_BYTES = MIB
_TOGETHER = 1_000  # tensors that are put with one call


def disk_tier(path: Path, capacity_bytes: int) -> ts.TierConfig:
    """Return a disk tier with its defaults spelled out: checksums, and as many threads as its peer."""
    options = {
        "path": str(path),
        "threads": DISK_THREADS,
        "aio_block_size": DISK_BLOCK_BYTES,
        "checksum": True,
    }
    return ts.TierConfig("disk", "files", capacity_bytes, options=options)


def host_tier(capacity_bytes: int) -> ts.TierConfig:
    """Return a host tier with its defaults."""
    return ts.TierConfig("host", "pinned", capacity_bytes)


def noise(nbytes: int, seed: int = 0) -> torch.Tensor:
    """Return bytes that nothing compresses, touched."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (nbytes,), dtype=torch.uint8, generator=generator)


def align_up(nbytes: int, alignment_bytes: int) -> int:
    """Round up to a multiple."""
    return -(-nbytes // alignment_bytes) * alignment_bytes


def check_equal(found: torch.Tensor, expected: torch.Tensor, key: str) -> None:
    """Fail the run if a byte is wrong.

    Raises:
        AssertionError: it is.
    """
    if not torch.equal(found, expected):
        raise AssertionError(f"the bytes of {key!r} are not those that were put")


# ---------------------------------------------------------------------- leases


def lease(settings: Settings) -> Figure:
    """Lease and release one ready replica again and again, in one thread."""
    count = settings.scaled(20_000, least=200)
    details = {}
    medians = []
    tiers = {
        "device": ts.TierConfig("device", "device", 64 * MIB, options={"device": "emulated"}),
        "host": host_tier(64 * MIB),
    }
    for name, tier in tiers.items():
        with ts.Store(ts.StoreConfig([tier])) as store:
            store.put("k", noise(MIB))
            seconds = _lease_seconds(store, name, count)
        medians.append(percentile(seconds, 50) * 1e6)
        details[f"{name}: p50, p99, p99.9 (us)"] = ", ".join(
            f"{percentile(seconds, percent) * 1e6:.1f}" for percent in (50, 99, 99.9)
        )
    details["a dict look-up under a lock, p50 (us)"] = f"{percentile(_look_up_seconds(count), 50) * 1e6:.2f}"
    details["samples"] = f"{count} each, after {count // 10} that do not count"
    what = "lease of a ready replica and its release, one thread, p50 of the slower tier"
    return Figure("lease", what, max(medians), "us", 50, 15, Better.LOWER, details)


def _lease_seconds(store: ts.Store, tier: str, count: int) -> list[float]:
    seconds = []
    for _ in range(count + count // 10):
        begun = time.perf_counter()
        with store.lease("k", tier=tier):
            pass
        seconds.append(time.perf_counter() - begun)
    return seconds[count // 10 :]


def _look_up_seconds(count: int) -> list[float]:
    table, lock, seconds = {"k": noise(1)}, threading.Lock(), []
    for _ in range(count):
        begun = time.perf_counter()
        with lock:
            table["k"]
        seconds.append(time.perf_counter() - begun)
    return seconds


# ---------------------------------------------------------------------- through host memory


def host_copy(settings: Settings) -> Figure:
    """Put and get one tensor through the host tier, in turns with one copy between touched memory."""
    nbytes = settings.scaled(64 * MIB, least=MIB)
    source, target = noise(nbytes), noise(nbytes, seed=1)
    with ts.Store(ts.StoreConfig([host_tier(2 * nbytes)])) as store:

        def through_store() -> dict[str, float]:
            put_s = stopwatch(lambda: _put_ready(store, source))
            begun = time.perf_counter()
            tensor = store.get("k")
            get_s = time.perf_counter() - begun
            check_equal(tensor, source, "k")
            store.drop("k")
            return {"put": put_s, "get": get_s}

        def through_torch() -> dict[str, float]:
            return {"copy_": stopwatch(lambda: target.copy_(source)), "clone": stopwatch(source.clone)}

        repeats = 4 * settings.repeats  # a round takes a tenth of a second
        seconds = take_turns([through_store, through_torch], repeats=repeats, warmups=settings.warmups)
    speeds = {name: ratios(seconds["copy_"], seconds[name]) for name in ("put", "get", "clone")}
    details = {f"{name} GB/s": str(Spread.of([nbytes / s / 1e9 for s in of])) for name, of in seconds.items()}
    details |= {f"speed of {name} over copy_'s": str(speed) for name, speed in speeds.items()}
    details["note"] = (
        "get and clone() write to memory that the caller gets fresh, copy_ to memory that was touched"
    )
    what = (
        f"the slower of put and get of {nbytes / MIB:g} MiB through the host tier, against torch.Tensor.copy_"
    )
    reached = min(speeds["put"].median, speeds["get"].median)
    return Figure("host-copy", what, reached, "x its speed", 0.8, 0.95, Better.HIGHER, details)


def _put_ready(store: ts.Store, tensor: torch.Tensor) -> None:
    """Put it and see that it is there: a put that only began would be no put."""
    store.put("k", tensor)
    store.lease("k", tier="host").release()


# ---------------------------------------------------------------------- disk


class Shuttle:
    """Tensors that go from host memory to disk and back, all at once, in a store of their own.

    Use as a context manager; leaving it compares every byte.

    Args:
        path: of the disk tier.
        tensor_bytes: of each.
        count: how many.
        in_crates: whether they are in crates, or each is a key of the store's own.
    """

    def __init__(self, path: Path, tensor_bytes: int, count: int, *, in_crates: bool = False) -> None:
        self.nbytes = tensor_bytes * count
        room_bytes = align_up(tensor_bytes, 4 * KIB) * count
        if in_crates:  # directories, and what the last tensor of a crate does not fill
            room_bytes += room_bytes // 4 + MIB
        self.store = ts.Store(
            ts.StoreConfig([host_tier(room_bytes + MIB), disk_tier(path, room_bytes + MIB)])
        )
        self._bytes = noise(tensor_bytes)
        self._keys = [f"k{index}" for index in range(count)]
        self._tensors: ts.Store | Crates = self.store
        if in_crates:
            from tierstore.crates import Crates  # which versions that others are compared with may not have

            self._tensors = Crates(self.store)
        for first in range(0, count, _TOGETHER):
            self._put(
                {self._keys[n]: self._bytes.roll(n) for n in range(first, min(first + _TOGETHER, count))}
            )

    def _put(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if not isinstance(self._tensors, ts.Store):
            self._tensors.put_all(tensors, tier="host")
            return
        for key, tensor in tensors.items():
            self._tensors.put(key, tensor, tier="host")

    def evict(self) -> float:
        """Write all of them to disk; return the seconds."""
        for key in self._keys:
            # A write lease makes what disk still holds stale, so that eviction has to write.
            self._tensors.lease(key, tier="host", write=True).release()
        return stopwatch(lambda: self._tensors.evict(*self._keys, to="disk").result())

    def fetch(self) -> float:
        """Read all of them back; return the seconds."""
        return stopwatch(lambda: self._tensors.fetch(*self._keys, tier="host").result())

    def round_trip(self) -> dict[str, float]:
        """Write all of them, then read them; return the seconds of each."""
        return {"evict": self.evict(), "fetch": self.fetch()}

    def __enter__(self) -> Shuttle:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        try:
            if kind is None:
                for index, key in enumerate(self._keys):
                    check_equal(self._tensors.get(key), self._bytes.roll(index), key)
        finally:
            self.store.close()


def disk(settings: Settings) -> Figure:
    """Evict to and fetch from disk, in turns with threads over ``pwritev`` and ``preadv``."""
    details = {"threads, block": f"{DISK_THREADS}, {DISK_BLOCK_BYTES // KIB} KiB, both"}
    speeds = []
    for tensor_mib in (4, 16, 64):
        count = settings.scaled(512 // tensor_mib, least=2)
        label = f"{tensor_mib} MiB x {count}"
        nbytes = tensor_mib * MIB * count
        with (
            Shuttle(settings.scratch / f"files-{tensor_mib}", tensor_mib * MIB, count) as shuttle,
            RawDisk(
                settings.scratch / "raw", nbytes, threads=DISK_THREADS, block_bytes=DISK_BLOCK_BYTES
            ) as raw,
        ):
            seconds = take_turns(
                [shuttle.round_trip, raw.round_trip], repeats=settings.repeats, warmups=settings.warmups
            )
            details["peer"] = (
                "O_DIRECT" if raw.is_direct else "O_DIRECT is refused here: through the page cache"
            )
        for ours, peer in (("evict", "write"), ("fetch", "read")):
            speed = ratios(seconds[peer], seconds[ours])
            speeds.append(speed.median)
            details[f"{label}: speed of {ours} over {peer}'s"] = str(speed)
            for name in (ours, peer):
                details[f"{label}: {name} GB/s"] = str(Spread.of([nbytes / s / 1e9 for s in seconds[name]]))
    what = "evict to and fetch from disk with checksums, the slowest of 4, 16 and 64 MiB, against raw threads"
    return Figure("disk", what, min(speeds), "x its speed", 0.85, 0.95, Better.HIGHER, details)


def small_tensors(settings: Settings) -> Figure:
    """Send 10,000 small tensors to disk and back, in crates and as keys, in turns with large tensors."""
    small_count = settings.scaled(10_000, least=500)
    large_count = max(1, small_count * 32 * KIB // (16 * MIB))
    with (
        Shuttle(settings.scratch / "crates", 32 * KIB, small_count, in_crates=True) as crates,
        Shuttle(settings.scratch / "keys", 32 * KIB, small_count) as keys,
        Shuttle(settings.scratch / "large", 16 * MIB, large_count) as large,
    ):
        shuttles = {"crates": crates, "keys": keys, "large": large}
        runs = [
            lambda shuttle=shuttle, name=name: {
                f"{name} {way}": seconds for way, seconds in shuttle.round_trip().items()
            }
            for name, shuttle in shuttles.items()
        ]
        taken = take_turns(runs, repeats=settings.repeats, warmups=settings.warmups)
    # The bytes differ by the part of a large tensor that the small ones do not fill.
    per_byte = {
        name: [
            (a + b) / shuttle.nbytes
            for a, b in zip(taken[f"{name} evict"], taken[f"{name} fetch"], strict=True)
        ]
        for name, shuttle in shuttles.items()
    }
    details = {
        f"{name} {way} GB/s": str(Spread.of([shuttle.nbytes / s / 1e9 for s in taken[f"{name} {way}"]]))
        for name, shuttle in shuttles.items()
        for way in ("evict", "fetch")
    }
    in_crates, as_keys = (ratios(per_byte["large"], per_byte[name]) for name in ("crates", "keys"))
    details["in crates, there and back"] = str(in_crates)
    details["as keys of their own, there and back"] = str(as_keys)
    details |= _growth_of_crates(settings)
    what = f"{small_count} tensors of 32 KiB in crates, host to disk to host, against {large_count} of 16 MiB"
    return Figure("small-tensors", what, in_crates.median, "x its speed", 0.6, 0.8, Better.HIGHER, details)


def _growth_of_crates(settings: Settings) -> dict[str, str]:
    """Return what a tensor of 4 KiB in a crate costs there and back, among 10^2 to 10^5 others."""
    details = {}
    for count in (100, 1_000, 10_000, 100_000):
        scaled = settings.scaled(count, least=20)
        path = settings.scratch / f"growth-{count}"
        with Shuttle(path, 4 * KIB, scaled, in_crates=True) as shuttle:
            taken = take_turns([shuttle.round_trip], repeats=settings.repeats, warmups=settings.warmups)
        both = [1e6 * (a + b) / scaled for a, b in zip(taken["evict"], taken["fetch"], strict=True)]
        details[f"{scaled} of 4 KiB in crates, us each there and back"] = str(Spread.of(both))
    return details


# ---------------------------------------------------------------------- memory kept in reserve


class Traffic:
    """A program that puts, reads, changes and drops tensors of all sizes, at random but repeatably.

    Sizes are log-uniform from 4 KiB to a sixteenth of the host quota.
    """

    def __init__(self, path: Path, host_bytes: int) -> None:
        self.store = ts.Store(ts.StoreConfig([host_tier(host_bytes), disk_tier(path, 4 * host_bytes)]))
        self._host_bytes = host_bytes
        self._chance = random.Random(0)
        self._source = noise(host_bytes // 16)
        self._live: dict[str, tuple[torch.Tensor, bool]] = {}  # what was put, and whether it was inverted
        self._next_number = 0

    def step(self) -> None:
        """Do one of everything: the live bytes stay at about twice what the host tier holds."""
        while sum(tensor.nbytes for tensor, _ in self._live.values()) < 2 * self._host_bytes:
            self._put()
        self.store.prefetch(self._any(), tier="host")
        self._check(self._any())
        self._invert(self._any())
        self.store.evict(self._any()).result()
        for _ in range(2):
            key = self._any()
            self.store.drop(key)
            del self._live[key]

    def _put(self) -> None:
        nbytes = int(2 ** self._chance.uniform(12, math.log2(self._source.numel())))
        start = self._chance.randrange(self._source.numel() - nbytes + 1)
        self._next_number += 1
        tensor = self._source[start : start + nbytes]
        self._live[f"k{self._next_number}"] = (tensor, False)
        self.store.put(f"k{self._next_number}", tensor)

    def _check(self, key: str) -> None:
        tensor, is_inverted = self._live[key]
        check_equal(self.store.get(key), ~tensor if is_inverted else tensor, key)

    def _invert(self, key: str) -> None:
        with self.store.lease(key, tier="host", write=True) as held:
            held.tensor.bitwise_not_()
        tensor, is_inverted = self._live[key]
        self._live[key] = (tensor, not is_inverted)

    def _any(self) -> str:
        return self._chance.choice(list(self._live))

    def reserved_bytes(self) -> int:
        """Return what the host pool keeps, used or not."""
        return self.store.stats().tiers["host"].reserved_bytes

    def used_bytes(self) -> int:
        """Return what replicas take of it."""
        return self.store.stats().tiers["host"].charged_bytes


def growth(settings: Settings) -> Figure:
    """Run mixed traffic for a thousand steps more and see whether the pool grew."""
    steps = settings.scaled(1_000, least=20)
    traffic = Traffic(settings.scratch / "files", settings.scaled(256 * MIB, least=16 * MIB))
    process = psutil.Process()
    shares = []
    with traffic.store:
        for _ in range(settings.scaled(100, least=10)):
            traffic.step()
        reserved_before, resident_before = traffic.reserved_bytes(), process.memory_info().rss
        for _ in range(steps):
            traffic.step()
            shares.append(traffic.reserved_bytes() / traffic.used_bytes())
        reserved_after, resident_after = traffic.reserved_bytes(), process.memory_info().rss
    details = {
        "reserved before and after": f"{reserved_before / MIB:.1f}, {reserved_after / MIB:.1f} MiB",
        "growth of the whole process": f"{(resident_after - resident_before) / MIB:+.1f} MiB resident",
        "reserved / used": str(Spread.of(shares)),
        "tensors": "4 KiB to a sixteenth of the host quota, log-uniform; twice the quota alive",
    }
    what = f"growth of the bytes that the host pool reserves over {steps} steps of mixed traffic"
    grown = float(reserved_after - reserved_before)
    return Figure("growth", what, grown, "bytes", 0, 0, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "lease": lease,
    "host-copy": host_copy,
    "disk": disk,
    "small-tensors": small_tensors,
    "growth": growth,
}

if __name__ == "__main__":
    sys.exit(main("bench.store", QUESTIONS))
