"""Rows of a table kept on the device: how many hits of those that there can be, and how few bytes travel.

A table in a run on the emulated device keeps a twentieth of its rows there; batches of ids by Zipf's law are
looked up and stepped, each told to the table one batch ahead.  What counts as a hit is a distinct row of a
batch that did not have to be carried for it.  The peer is Belady's rule on the same batches
(`bench.optimal_cache`), which knows the future: no cache can.  So figures are the same on every machine, and
one round is enough.  Rows are compared with those of PyTorch's own sparse embedding, bit for bit.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import nn

import tierstore as ts
from bench.command import Question, Settings, main
from bench.optimal_cache import Ids, informed_hits, optimal_hits
from bench.record import Better, Figure
from tierstore.data import lookahead
from tierstore.nn import EmbeddingTable, Normal
from tierstore.optim import SparseAdam
from tierstore.training import offload
from wide_deep_planted import Zipf, scattered

MIB = 1024**2
ROWS, WIDTH, COLUMNS = 1_000_000, 64, 3  # rows, and Adam's two moments
IDS = 16_384  # of a batch
SHARE = 20  # one row in so many is kept on the device
BATCHES, WARM = 300, 100  # of which these do not count
AHEAD = 1  # batches that a table is told before
EXPONENTS = (1.05, 1.2)  # the first one is the figures'; the other one's are told beside them


def learning_rate() -> float:
    """Return how far both go in a step."""
    return 1e-2


@dataclass(frozen=True)
class Work:
    """What is looked up.

    Attributes:
        rows: of the table.
        exponent: of Zipf's law.
        batches: of ids.
        warm: how many of them come before what counts.
    """

    rows: int
    exponent: float
    batches: Sequence[torch.Tensor]
    warm: int

    @classmethod
    def of(cls, settings: Settings, exponent: float) -> Work:
        """Draw the batches, from a seed."""
        rows, ids = settings.scaled(ROWS, least=2000), settings.scaled(IDS, least=64)
        chance, law = np.random.default_rng(14), Zipf(rows, exponent)
        batches = [torch.from_numpy(scattered(law.draw(chance, ids), rows)) for _ in range(BATCHES)]
        return cls(rows, exponent, batches, WARM)

    @property
    def slots(self) -> int:
        """Rows that are kept on the device."""
        return self.rows // SHARE

    def distinct(self) -> list[Ids]:
        """Return the rows of each batch."""
        return [np.unique(batch.numpy()) for batch in self.batches]

    def counted(self, each: Ids) -> int:
        """Add up what there is of each batch that counts."""
        return int(each[self.warm :].sum())


class Sum(nn.Module):
    """A table whose rows are summed up."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.table = EmbeddingTable(
            work.rows, WIDTH, target="device", cache_rows=work.slots, init=Normal(0.01), seed=1
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return a loss of the rows of ``ids``, to which each occurrence of a row counts."""
        loss: torch.Tensor = self.table(ids).square().sum()
        return loss


@dataclass(frozen=True)
class Moved:
    """What a run carried while it counted.

    Attributes:
        rows: to the device.
        rows_back: to the host.
        nbytes: over the store's link, to the device.
        nbytes_back: likewise, to the host.
    """

    rows: int = 0
    rows_back: int = 0
    nbytes: int = 0
    nbytes_back: int = 0

    @classmethod
    def by(cls, run: ts.training.Offload) -> Moved:
        """Return what a run has carried so far."""
        stats = run.stats()
        (table,) = stats.tables.values()
        assert table.cache is not None
        up, down = (stats.traffic.get(way) for way in (("host", "device"), ("device", "host")))
        return cls(
            table.cache.rows_to_device,
            table.cache.rows_to_host,
            0 if up is None else up.nbytes,
            0 if down is None else down.nbytes,
        )

    def since(self, other: Moved) -> Moved:
        """Return what was carried since then."""
        return Moved(
            self.rows - other.rows,
            self.rows_back - other.rows_back,
            self.nbytes - other.nbytes,
            self.nbytes_back - other.nbytes_back,
        )


def train(work: Work, scratch: Path) -> Moved:
    """Train through a cache; return what was carried for the batches that count.

    Raises:
        RuntimeError: a row is not what PyTorch's embedding has.
    """
    model = Sum(work)
    optimizer = SparseAdam(model.parameters(), lr=learning_rate())
    record_bytes = COLUMNS * WIDTH * 4
    config = {
        "device": "emulated",
        "max_device_memory": 2 * work.slots * record_bytes + 256 * MIB,
        "offload_cpu_size": 2 * work.rows * record_bytes + 64 * MIB,
        "offload_disk_size": 0,
        "offload_path": str(scratch / "files"),
    }
    before = Moved()
    with offload(model, optimizer, config) as run:
        for number, ids in enumerate(lookahead(work.batches, model.table, AHEAD)):
            if number + 1 + AHEAD == work.warm:  # all before those that count are told; none after
                before = Moved.by(run)
            model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()
        moved = Moved.by(run).since(before)
        compare(work, model)
    return moved


def compare(work: Work, model: Sum) -> None:
    """See that rows are those of an embedding that was trained without a cache.

    Raises:
        RuntimeError: one is not.
    """
    plain = EmbeddingTable(work.rows, WIDTH, init=Normal(0.01), seed=1)
    every = torch.from_numpy(np.unique(np.concatenate(work.distinct())))
    twin = nn.Embedding(work.rows, WIDTH, sparse=True)
    with torch.no_grad():
        twin.weight[every] = plain.rows(every)
    optimizer = torch.optim.SparseAdam(twin.parameters(), lr=learning_rate())
    for ids in work.batches:
        twin(ids).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if not torch.equal(model.table.rows(every), twin.weight.detach()[every]):
        raise RuntimeError("rows differ from those of nn.Embedding(sparse=True) with torch.optim.SparseAdam")


@functools.cache
def _measured(settings: Settings) -> Mapping[float, tuple[Work, Moved]]:
    """Train with each exponent, once for both figures."""
    works = {exponent: Work.of(settings, exponent) for exponent in EXPONENTS}
    return {exponent: (work, train(work, settings.scratch)) for exponent, work in works.items()}


def cached_row_hits(settings: Settings) -> Figure:
    """Hold the hits of a table's cache against the most that there can be."""
    shares: dict[float, float] = {}
    details: dict[str, str] = {}
    for exponent, (work, moved) in _measured(settings).items():
        batches = work.distinct()
        asked = work.counted(np.array([len(each) for each in batches]))
        hits = asked - moved.rows
        best, bound, informed = (
            work.counted(each)
            for each in (
                optimal_hits(batches, work.slots),
                optimal_hits(batches, work.slots, may_pass_by=True),
                informed_hits(batches, work.slots),
            )
        )
        shares[exponent] = hits / best
        name = f"Zipf {exponent:g}"
        details |= {
            f"{name}: rows a batch": f"{asked / (BATCHES - work.warm):,.0f} distinct, {work.slots:,} slots",
            f"{name}: hits": f"{hits / asked:.4f} of them",
            f"{name}: optimal": f"{best / asked:.4f}; where a batch needs no slots {bound / asked:.4f}",
            f"{name}: of the optimum": f"{hits / best:.4f}",
            f"{name}: of the optimum, by a cache that knows how often each row is asked for, and not when": (
                f"{informed / best:.4f}"
            ),
        }
    return Figure(
        "cached-row-hits",
        "hit ratio of a table that keeps 5 % of its rows on the emulated device, over that of an optimal "
        "cache (Belady) on the same batches, Zipf 1.05; distinct rows of a batch count once",
        shares[EXPONENTS[0]],
        "x the optimum",
        0.85,
        0.95,
        Better.HIGHER,
        details,
    )


def cached_row_bytes(settings: Settings) -> Figure:
    """Hold the bytes that travel against those of the rows that miss."""
    record_bytes = COLUMNS * WIDTH * 4
    ratios: dict[float, float] = {}
    details: dict[str, str] = {}
    for exponent, (work, moved) in _measured(settings).items():
        batches = len(work.batches) - work.warm
        ratios[exponent] = moved.nbytes / (moved.rows * record_bytes)
        back = moved.nbytes_back / max(1, moved.rows_back * record_bytes)
        name = f"Zipf {exponent:g}"
        details |= {
            f"{name}: rows that miss, a batch": f"{moved.rows / batches:,.0f} of {record_bytes} bytes",
            f"{name}: to the device, a batch": f"{moved.nbytes / batches / MIB:.3f} MiB",
            f"{name}: over the bytes of these rows": f"{ratios[exponent]:.4f}",
            f"{name}: changed rows that go back, a batch": f"{moved.rows_back / batches:,.0f}",
            f"{name}: back, over the bytes of these rows": f"{back:.4f}",
        }
    return Figure(
        "cached-row-bytes",
        "bytes to the emulated device, a batch, of a table that keeps 5 % of its rows there, over those of "
        "the rows that miss with their state, Zipf 1.05",
        ratios[EXPONENTS[0]],
        "x their bytes",
        1.2,
        1.05,
        Better.LOWER,
        details,
    )


QUESTIONS: dict[str, Question] = {
    "cached-row-hits": cached_row_hits,
    "cached-row-bytes": cached_row_bytes,
}

if __name__ == "__main__":
    sys.exit(main("bench.cached_rows", QUESTIONS))
