"""How many pages of 4 KiB a second a reader brings from disk: random parts of blocks of 4 MiB.

Each engine has a store of its own with the same blocks, past the page cache, held for the whole measurement;
rounds take turns.  Beside them threads of Python read the same pages of an ordinary file with ``preadv``:
what the disk and the interpreter can do with nothing in between.  Bytes are compared once, before anything
counts.
"""

from __future__ import annotations

import functools
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import tierstore as ts
from bench.command import Question, Settings, main
from bench.measure import Spread, take_turns
from bench.record import Better, Figure

KIB, MIB = 1024, 1024**2
PAGE_BYTES = 4 * KIB
BLOCK_BYTES = 4 * MIB
BLOCKS = 1_024  # 4 GiB: more than a drive's own cache
READS = 20_000  # in a round
AT_ONCE = 2_000  # what a batch of training misses
IN_FLIGHT = 2  # such reads, as one is prefetched
RAW_THREADS = 32

Part = tuple[str, int]


@dataclass(frozen=True)
class Load:
    """What is read in a round: the same pages whoever reads them."""

    blocks: int
    parts: Sequence[Part]
    at_once: int

    def calls(self) -> Iterator[Sequence[Part]]:
        """Yield the parts of each call."""
        for start in range(0, len(self.parts), self.at_once):
            yield self.parts[start : start + self.at_once]


def key_of(number: int) -> str:
    """Return the key of a block."""
    return f"table/rows/log/{number}"


def block(number: int) -> torch.Tensor:
    """Return a block in which each page says whose it is."""
    pages = torch.arange(BLOCK_BYTES // PAGE_BYTES, dtype=torch.int64) + number * (BLOCK_BYTES // PAGE_BYTES)
    return pages.unsqueeze(1).expand(-1, PAGE_BYTES // 8).contiguous()


def load(settings: Settings, *, at_once: int = AT_ONCE) -> Load:
    """Return random parts, drawn from a seed."""
    blocks = settings.scaled(BLOCKS, least=4)
    chance = random.Random(14)
    pages = BLOCK_BYTES // PAGE_BYTES
    parts = [
        (key_of(chance.randrange(blocks)), chance.randrange(pages) * PAGE_BYTES)
        for _ in range(settings.scaled(READS, least=64))
    ]
    return Load(blocks, parts, at_once)


@contextmanager
def opened(path: Path, blocks: int, engine: str, *, codec: str | None = None) -> Iterator[ts.PartReader]:
    """Yield a reader that has all blocks of a store in scratch files."""
    options: dict[str, object] = {"path": str(path), "engine": engine, "direct": True}
    disk = ts.TierConfig("disk", "files", (blocks + 4) * BLOCK_BYTES, options=options, codec=codec)
    with ts.Store(ts.StoreConfig([ts.TierConfig("host", "pinned", 16 * MIB), disk])) as store:
        for number in range(blocks):
            store.put(key_of(number), block(number), tier="disk")
        with store.reader() as reader:
            reader.add(*(key_of(number) for number in range(blocks)))
            yield reader


def read_all(reader: ts.PartReader, what: Load, into: Sequence[torch.Tensor]) -> None:
    """Read every part, with as many calls in flight as there are buffers."""
    under_way: list[ts.Transfer[None]] = []
    for number, parts in enumerate(what.calls()):
        if len(under_way) == len(into):
            under_way.pop(0).result()
        under_way.append(reader.read(parts, into[number % len(into)][: len(parts)]))
    for transfer in under_way:
        transfer.result()


def verify(reader: ts.PartReader, what: Load) -> None:
    """See that each part is the page that was asked for.

    Raises:
        RuntimeError: one is not.
    """
    into = torch.empty(what.at_once, PAGE_BYTES // 8, dtype=torch.int64)
    for parts in what.calls():
        reader.read(parts, into[: len(parts)]).result()
        for row, (key, begin) in zip(into, parts, strict=False):
            page = int(key.rsplit("/", 1)[1]) * (BLOCK_BYTES // PAGE_BYTES) + begin // PAGE_BYTES
            if not bool((row == page).all()):
                raise RuntimeError(f"the page at {begin} of {key!r} is not what was put there")


def _timed(name: str, work: Callable[[], None]) -> Mapping[str, float]:
    """Return the seconds of a round, and those of the processor."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    work()
    wall_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    return {f"{name} wall": wall_s, f"{name} cpu": cpu_s}


def _raw(path: Path, what: Load) -> Callable[[], None]:
    """Return what reads the same pages of one file by threads of Python."""
    with path.open("wb") as stream:
        for number in range(what.blocks):
            stream.write(block(number).numpy().tobytes())
    fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    offsets = [int(key.rsplit("/", 1)[1]) * BLOCK_BYTES + begin for key, begin in what.parts]

    def read(own: Sequence[int]) -> None:
        memory = mmap.mmap(-1, PAGE_BYTES)
        for offset in own:
            os.preadv(fd, [memory], offset)

    def read_every() -> None:
        with ThreadPoolExecutor(RAW_THREADS) as threads:
            list(threads.map(read, [offsets[n::RAW_THREADS] for n in range(RAW_THREADS)]))

    return read_every


def _engines(path: Path) -> list[str]:
    """Return the engines that there are here."""
    found = ["threads"]
    try:
        with opened(path / "trial", 1, "io_uring"):
            found.append("io_uring")
    except ts.BackendError:
        pass
    return found


def part_reads(settings: Settings) -> Figure:
    """Read pages by each engine, and by nothing but threads."""
    what = load(settings)
    into = [torch.empty(what.at_once, PAGE_BYTES // 8, dtype=torch.int64) for _ in range(IN_FLIGHT)]
    with ExitStack() as stores:
        runs: dict[str, Callable[[], None]] = {}
        for engine in _engines(settings.scratch):
            reader = stores.enter_context(opened(settings.scratch / engine, what.blocks, engine))
            verify(reader, what)
            runs[engine] = functools.partial(read_all, reader, what, into)
        runs["preadv"] = _raw(settings.scratch / "raw.bin", what)
        seconds = take_turns(
            [functools.partial(_timed, name, work) for name, work in runs.items()],
            repeats=settings.repeats,
            warmups=settings.warmups,
        )
    count = len(what.parts)
    rates = {name: Spread.of([count / each for each in seconds[f"{name} wall"]]) for name in runs}
    details = {f"{name} (pages/s)": str(rate) for name, rate in rates.items()}
    for name in runs:
        each = Spread.of([1e6 * s / count for s in seconds[f"{name} cpu"]])
        details[f"{name}: processor time a page (us)"] = str(each)
    details["pages a call, calls in flight"] = f"{what.at_once}, {IN_FLIGHT}"
    details["blocks of 4 MiB"] = f"{what.blocks}"
    best = max((name for name in runs if name != "preadv"), key=lambda name: rates[name].median)
    details["best engine"] = best
    return Figure(
        "part-reads",
        "random 4 KiB pages a second that a reader brings from 4 GiB of scratch files, 2,000 in a call",
        rates[best].median,
        "pages/s",
        40_000,
        100_000,
        Better.HIGHER,
        details,
    )


QUESTIONS: dict[str, Question] = {"part-reads": part_reads}

if __name__ == "__main__":
    sys.exit(main("bench.parts", QUESTIONS))
