"""What tables larger than host memory cost: time against memory for all of it, and resident memory."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import tierstore as ts
from bench.clicks import LINES, WIDTH, Clicker, ClickSize, in_tiers
from bench.command import Question, Settings, UnmeasurableError, main
from bench.measure import Spread, ratios, take_turns
from bench.paced import equal_losses
from bench.record import Better, Figure
from tierstore.nn.embedding_table import TableStats
from wide_deep import PlainTables, TieredTables

MIB, GIB = 1024**2, 1024**3
TABLE_BYTES, HOST_BYTES = 8 * GIB, GIB
WARM_BATCHES = 150
STEPS_A_TURN = 5
RESIDENT_HOST_BYTES = 512 * MIB
TIMES_THE_QUOTA = 10
DEVICE_VOCABULARY = 200_000


def _scaled(settings: Settings, nbytes: int = 0, vocabulary: int | None = None) -> ClickSize:
    share = min(1.0, settings.scale)
    lines, width = max(8, int(LINES * share)), max(8, round(WIDTH * share / 8) * 8)
    size = ClickSize.of_bytes(int(nbytes * share), lines, width)
    return size if vocabulary is None else replace(size, vocabulary=max(1000, int(vocabulary * share)))


def table_on_disk(settings: Settings) -> Figure:
    """Train with an eighth of the tables in host memory, in turns with a run that has memory for all."""
    size = _scaled(settings, TABLE_BYTES)
    host_bytes = int(HOST_BYTES * min(1.0, settings.scale)) + size.dense_bytes
    turns, a_turn = settings.repeats + settings.warmups, settings.scaled(STEPS_A_TURN)
    roomy = ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=2 * size.table_bytes + 2 * size.dense_bytes,
        offload_disk_size=0,
    )
    tight = in_tiers(size, host_bytes, settings.scratch / "tables")
    with (
        Clicker(size, TieredTables(), roomy, steps=turns * a_turn) as memory,
        Clicker(size, TieredTables(), tight, steps=turns * a_turn) as tiers,
    ):
        for each in (memory, tiers):
            each.write_all_rows()
            each.warm(settings.scaled(WARM_BATCHES))
        before = tiers.table_stats()
        seconds = take_turns(
            [
                lambda: {"memory": memory.seconds_a_step(a_turn)},
                lambda: {"tiers": tiers.seconds_a_step(a_turn)},
            ],
            repeats=settings.repeats,
            warmups=settings.warmups,
        )
        losses = equal_losses(tiers.losses, memory.losses)
        after = tiers.table_stats()
    rates = ratios(seconds["memory"], seconds["tiers"])
    details = {
        "all in memory s": str(Spread.of(seconds["memory"])),
        "in tiers s": str(Spread.of(seconds["tiers"])),
        "samples/s against all in memory": str(rates),
        "losses": losses,
        "tables": f"{size.table_bytes / MIB:.0f} MiB, {size.vocabulary:,} ids",
        "host quota": f"{host_bytes / MIB:.0f} MiB",
        **_pages_between(before, after, turns * a_turn),
    }
    what = (
        f"samples a second of Wide&Deep, {size.lines} lines a batch, with tables of "
        f"{size.table_bytes / GIB:.2g} GiB of which {HOST_BYTES / TABLE_BYTES:.1%} fits into host memory and "
        "the rest is on disk, against a run that has memory for all"
    )
    return Figure("table-on-disk", what, rates.median, "x its rate", 0.5, 0.8, Better.HIGHER, details)


def _pages_between(first: TableStats, last: TableStats, steps: int) -> dict[str, str]:
    """Say where pages were in so many steps, and what was read and written."""
    before, after = first.row_store, last.row_store
    hits, misses = after.hits - before.hits, after.misses - before.misses
    return {
        "pages of a batch that were in memory": f"{hits / max(1, hits + misses):.1%}",
        "pages missed a step": f"{misses / steps:,.0f}",
        "pages prefetched a step": f"{(after.pages_prefetched - before.pages_prefetched) / steps:,.0f}",
        "read a step": f"{(after.page_bytes_read - before.page_bytes_read) / steps / MIB:.1f} MiB",
        "written a step": f"{(after.page_bytes_written - before.page_bytes_written) / steps / MIB:.1f} MiB",
    }


def table_resident(settings: Settings) -> Figure:
    """Train with tables of ten times the host quota in a process of its own, and look at its memory."""
    host_bytes = max(8 * MIB, int(RESIDENT_HOST_BYTES * min(1.0, settings.scale)))
    size = _scaled(settings, TIMES_THE_QUOTA * RESIDENT_HOST_BYTES)
    quota_bytes = host_bytes + size.dense_bytes
    arguments = [size.table_bytes, size.lines, size.width, settings.scaled(20, least=2), quota_bytes]
    command = [sys.executable, "-m", "bench.clicks", *map(str, arguments), str(settings.scratch / "tables")]
    done = subprocess.run(
        command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise UnmeasurableError(done.stderr)
    child = {name: int(value) for name, value in json.loads(done.stdout).items() if name != "losses"}
    over_bytes = child["peak_bytes"] - child["before_bytes"]
    details = {
        "tables": f"{child['table_bytes'] / MIB:.0f} MiB",
        "host quota": f"{quota_bytes / MIB:.0f} MiB",
        "resident at most": f"{child['peak_bytes'] / MIB:.0f} MiB",
        "of that before the run": f"{child['before_bytes'] / MIB:.0f} MiB",
        "read from disk": f"{child['page_bytes_read'] / MIB:.0f} MiB",
        "written to disk": f"{child['page_bytes_written'] / MIB:.0f} MiB",
    }
    what = (
        "resident memory of a run with tables of ten times the host quota, without what Python and torch take"
    )
    reached = over_bytes / quota_bytes
    return Figure("table-resident", what, reached, "x the quota", 1.2, 1.1, Better.LOWER, details)


def host_device_step(settings: Settings) -> Figure:
    """Train with tables on the host and the rest on an emulated device, in turns with plain PyTorch on it."""
    share = min(1.0, settings.scale)
    size = ClickSize(
        max(1000, int(DEVICE_VOCABULARY * share)),
        max(8, int(LINES * share)),
        max(8, round(WIDTH * share / 8) * 8),
    )
    turns, a_turn = settings.repeats + settings.warmups, settings.scaled(STEPS_A_TURN)
    config = ts.OffloadConfig(
        device="emulated",
        max_device_memory=2 * size.dense_bytes + 16 * size.batch_bytes,
        offload_cpu_size=2 * size.table_bytes + 2 * size.dense_bytes,
        offload_disk_size=0,
    )
    with (
        Clicker(size, PlainTables(), None, steps=turns * a_turn) as plain,
        Clicker(size, TieredTables(), config, steps=turns * a_turn) as ours,
    ):
        seconds = take_turns(
            [
                lambda: {"device": plain.seconds_a_step(a_turn)},
                lambda: {"host and device": ours.seconds_a_step(a_turn)},
            ],
            repeats=settings.repeats,
            warmups=settings.warmups,
        )
        losses = equal_losses(ours.losses, plain.losses)
    times = ratios(seconds["host and device"], seconds["device"])
    details = {f"{name} s": str(Spread.of(taken)) for name, taken in seconds.items()}
    details |= {
        "times all on the device": str(times),
        "losses": losses,
        "the original": "9 times",
    }
    what = (
        f"step of Wide&Deep, {size.vocabulary:,} ids, {size.lines} lines a batch, tables and their "
        "optimizers on the host and the rest on an emulated device, against plain PyTorch with all on it"
    )
    return Figure("host-device-step", what, times.median, "x its time", 2.0, 1.3, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {
    "table-on-disk": table_on_disk,
    "table-resident": table_resident,
    "host-device-step": host_device_step,
}

if __name__ == "__main__":
    sys.exit(main("bench.tables", QUESTIONS))
