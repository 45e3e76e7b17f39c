"""What one key costs beside many others: a flush, a put, a lease that must evict, and a key that lies idle.

Each store holds its number of keys for the whole measurement; rounds take turns, so that what slows one
down slows all of them.
"""

from __future__ import annotations

import gc
import itertools
import statistics
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Spread, objects_left_alone, percentile, ratios, stopwatch, take_turns
from bench.record import Better, Figure

KIB, MIB = 1024, 1024**2
NUMBERS_OF_KEYS = (1_000, 10_000, 100_000)
_TENSOR_BYTES = 4 * KIB


def key_of(number: int) -> str:
    """Return a key such as training makes: its length counts."""
    return f"layers.{number}.weight"


def fill(store: ts.Store, count: int, *, tier: str | None = None) -> None:
    """Put so many keys."""
    tensor = torch.zeros(_TENSOR_BYTES, dtype=torch.uint8)
    for number in range(count):
        store.put(key_of(number), tensor, tier=tier)


def durable_store(path: Path, count: int) -> ts.Store:
    """Return a durable store whose disk tier has room for so many keys, below host memory for a few."""
    disk = ts.TierConfig(
        "disk", "files", count * 2 * _TENSOR_BYTES + 64 * MIB, options={"path": str(path), "durable": True}
    )
    return ts.Store(ts.StoreConfig([ts.TierConfig("host", "pinned", 16 * MIB), disk]))


def scratch_store(path: Path, count: int) -> ts.Store:
    """Return a store of host memory for half of the keys, and of scratch files for all of them."""
    host = ts.TierConfig("host", "pinned", count // 2 * _TENSOR_BYTES)
    disk = ts.TierConfig("disk", "files", count * 2 * _TENSOR_BYTES + 64 * MIB, options={"path": str(path)})
    return ts.Store(ts.StoreConfig([host, disk]))


# ---------------------------------------------------------------------- growth


def _growth(
    settings: Settings,
    name: str,
    what: str,
    make: Callable[[Path, int], ts.Store],
    ask: Callable[[ts.Store], Callable[[], float]],
) -> Figure:
    """Ask stores of 10^3, 10^4 and 10^5 keys by turns how long something takes, in seconds."""
    counts = [settings.scaled(count, least=20) for count in NUMBERS_OF_KEYS]
    with ExitStack() as stores:
        runs = []
        for count in counts:
            store = stores.enter_context(make(settings.scratch / f"{name} {count}", count))
            fill(store, count)
            once = ask(store)
            runs.append(lambda once=once, count=count: {f"{count}": once()})
        with objects_left_alone():
            seconds = take_turns(runs, repeats=settings.repeats, warmups=settings.warmups)
    small, *_, large = (seconds[f"{count}"] for count in counts)
    growth = ratios(large, small)
    details = {
        f"beside {count:,} keys (us)": str(Spread.of([1e6 * each for each in seconds[f"{count}"]]))
        for count in counts
    }
    details["beside the most against the fewest"] = str(growth)
    return Figure(name, what, growth.median, "x", 1.3, 1.1, Better.LOWER, details)


def flush_growth(settings: Settings) -> Figure:
    """Put a key, and flush it: the commit is to cost what changed."""
    once = settings.scaled(50, least=5)
    tensor = torch.zeros(_TENSOR_BYTES, dtype=torch.uint8)

    def ask(store: ts.Store) -> Callable[[], float]:
        def flush_one() -> float:
            store.put("new", tensor, replace=True)
            return stopwatch(store.flush)

        return lambda: statistics.median(flush_one() for _ in range(once))

    what = "a flush of one changed key beside 10^5 others, against beside 10^3: medians of rounds"
    return _growth(settings, "flush-growth", what, durable_store, ask)


def put_growth(settings: Settings) -> Figure:
    """Put a key, and drop it, where there is room."""
    once = settings.scaled(2_000, least=20)
    tensor = torch.zeros(_TENSOR_BYTES, dtype=torch.uint8)

    def make(path: Path, count: int) -> ts.Store:
        host = ts.TierConfig("host", "pinned", 2 * count * _TENSOR_BYTES)
        disk = ts.TierConfig("disk", "files", 64 * MIB, options={"path": str(path)})
        return ts.Store(ts.StoreConfig([host, disk]))

    def ask(store: ts.Store) -> Callable[[], float]:
        def put_one() -> float:
            seconds = stopwatch(lambda: store.put("new", tensor))
            store.drop("new")
            return seconds

        return lambda: percentile([put_one() for _ in range(once)], 50)

    what = "a put of 4 KiB where there is room, beside 10^5 keys against beside 10^3: medians of rounds"
    return _growth(settings, "put-growth", what, make, ask)


def lease_growth(settings: Settings) -> Figure:
    """Lease keys in turn, so that each has to be fetched and another one evicted for it."""
    once = settings.scaled(500, least=10)

    def ask(store: ts.Store) -> Callable[[], float]:
        keys = itertools.cycle(list(store))
        store.evict(*store, to="disk").result()  # so that whatever is evicted is on disk already
        for key in itertools.islice(keys, len(store) // 2):
            lease_one(store, key)
        return lambda: percentile([lease_one(store, key) for key in itertools.islice(keys, once)], 50)

    def lease_one(store: ts.Store, key: str) -> float:
        return stopwatch(lambda: store.lease(key, tier="host").release())

    what = "a lease for which another key leaves full host memory, which is on disk, too: 10^5 keys, 10^3"
    return _growth(settings, "lease-growth", what, scratch_store, ask)


# ---------------------------------------------------------------------- memory


def idle_key(settings: Settings) -> Figure:
    """Put keys, evict them to disk, and see by how much a process has grown for each."""
    count = settings.scaled(100_000, least=1_000)
    details = {}
    for kind, is_durable in (("scratch", False), ("durable", True)):
        path = settings.scratch / f"idle {kind}"
        # In a process that has had others, new ones find memory that is there already.
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            each = process.submit(_idle_key_bytes, path, count, is_durable=is_durable).result()
        details[f"{kind} store (KiB)"] = f"{each / KIB:.2f}"
    details["keys"] = f"{count:,}, such as {key_of(count - 1)!r}"
    what = "resident memory that a key on disk takes in the process, without its data, in a durable store"
    return Figure("idle-key", what, each / KIB, "KiB", 2, 1, Better.LOWER, details)


def _idle_key_bytes(path: Path, count: int, *, is_durable: bool) -> float:
    options = {"path": str(path), "durable": is_durable}
    disk = ts.TierConfig("disk", "files", 2 * count * _TENSOR_BYTES, options=options)
    host = ts.TierConfig("host", "pinned", 16 * MIB)
    with ts.Store(ts.StoreConfig([host, disk])) as store:
        fill(store, 1_000, tier="disk")
        store.drop(*(key_of(number) for number in range(1_000)))
        before = _resident_bytes()
        fill(store, count, tier="disk")
        if is_durable:
            store.flush()
        return (_resident_bytes() - before) / count


def _resident_bytes() -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


QUESTIONS: dict[str, Question] = {
    "flush-growth": flush_growth,
    "put-growth": put_growth,
    "lease-growth": lease_growth,
    "idle-key": idle_key,
}

if __name__ == "__main__":
    sys.exit(main("bench.keys", QUESTIONS))
