"""Wide&Deep of the examples in training, with tables whose rows lie in tiers, or with PyTorch's.

``python -m bench.clicks TABLE_BYTES LINES WIDTH STEPS HOST_BYTES PATH`` trains in a process of its own, and
prints the peak of resident memory and the losses as JSON.  For `bench.tables`, which starts it.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import tierstore as ts
from bench.resident import peak_resident_bytes
from tierstore.data import lookahead
from tierstore.nn import EmbeddingTable
from tierstore.nn.embedding_table import TableStats
from tierstore.training import Offload, offload
from wide_deep import Tables, TieredTables, WideDeep, WideDeepShape, groups_of, halved
from wide_deep_planted import Zipf, scattered
from wide_deep_steps import Batch, optimizers_of, train_step

PAGE_BYTES = 4096
STATES = 2  # tensors of the optimizers' beside each row
EXPONENT = 1.05
DIMENSION = 64
LINES = 1024
FIELDS = 39
WIDTH = 1024  # of the first hidden layer
DEVIATION = 0.01
_FILLED_ROWS = 2**15  # at a time


@dataclass(frozen=True)
class ClickSize:
    """How large a model is and what it learns.

    Attributes:
        vocabulary: rows of both tables.
        lines: of a batch.
        width: of the first hidden layer.
    """

    vocabulary: int
    lines: int = LINES
    width: int = WIDTH

    @classmethod
    def of_bytes(cls, nbytes: int, lines: int = LINES, width: int = WIDTH) -> ClickSize:
        """Return one whose tables take about so many bytes with their states, as their rows lie in pages."""
        in_a_page = [PAGE_BYTES // (each * (1 + STATES) * 4) for each in (1, DIMENSION)]
        return cls(int(nbytes / PAGE_BYTES / sum(1 / rows for rows in in_a_page)), lines, width)

    @property
    def shape(self) -> WideDeepShape:
        """The model's."""
        return WideDeepShape(self.vocabulary, FIELDS, DIMENSION, halved(self.width))

    @property
    def table_bytes(self) -> int:
        """Of both tables with their states, as their rows lie in pages."""
        pages = 0
        for width in (1, DIMENSION):
            pages += -(-self.vocabulary // (PAGE_BYTES // (width * (1 + STATES) * 4)))
        return pages * PAGE_BYTES

    @property
    def batch_bytes(self) -> int:
        """Of the deep table's rows that a batch looks up."""
        return self.lines * FIELDS * DIMENSION * 4

    @property
    def dense_bytes(self) -> int:
        """Of the other parameters with gradients and states."""
        return self.shape.dense_parameters * 4 * (2 + STATES)

    def batches(self) -> Iterator[Batch]:
        """Yield batches, always the same."""
        chance, law = np.random.default_rng(1), Zipf(self.vocabulary, EXPONENT)
        for _ in itertools.count():
            ids = scattered(law.draw(chance, self.lines * FIELDS), self.vocabulary)
            labels = chance.integers(0, 2, self.lines).astype(np.float32)
            yield Batch(
                torch.from_numpy(ids).view(self.lines, FIELDS),
                torch.ones(self.lines, FIELDS),
                torch.from_numpy(labels),
            )


class Clicker:
    """Wide&Deep in training; use as a context manager.

    Args:
        size: of it.
        tables: make its tables.
        config: how it is offloaded; ``None``: not at all.
        steps: how many there will be at most: batches are made before, as a loader's processes would.
    """

    def __init__(
        self, size: ClickSize, tables: Tables, config: ts.OffloadConfig | None, *, steps: int
    ) -> None:
        torch.manual_seed(0)
        self._model = WideDeep(size.shape, tables)
        self._optimizers = optimizers_of(groups_of(self._model))
        self._run: Offload | None = None
        if config is not None:
            self._run = offload(self._model, self._optimizers, config)
        batches = list(itertools.islice(size.batches(), steps))
        self._size = size
        own = dict.fromkeys(self._tables, 0)
        self._batches = iter(lookahead(batches, own) if own else batches)
        self._losses: list[Tensor] = []

    def write_all_rows(self) -> None:
        """Give every row of the tables a value, so that none is computed when it is looked up."""
        chance = torch.Generator().manual_seed(2)
        for table in self._tables:
            for begin in range(0, self._size.vocabulary, _FILLED_ROWS):
                ids = torch.arange(begin, min(begin + _FILLED_ROWS, self._size.vocabulary))
                table.set_rows(
                    ids, torch.empty(len(ids), table.embedding_dim).normal_(0, DEVIATION, generator=chance)
                )

    def warm(self, batches: int) -> None:
        """Look up what so many other batches name, and throw it away."""
        for batch in itertools.islice(self._size.batches(), batches):
            for table in self._tables:
                table(batch.ids)

    @property
    def _tables(self) -> Iterator[EmbeddingTable]:
        return (each for each in self._model.modules() if isinstance(each, EmbeddingTable))

    @property
    def losses(self) -> Tensor:
        """The losses of all steps so far."""
        return torch.stack(self._losses)

    def seconds_a_step(self, steps: int) -> float:
        """Train so many steps; return the seconds of one."""
        begun = time.perf_counter()
        for batch in itertools.islice(self._batches, steps):
            self._losses.append(train_step(self._model, self._optimizers, batch).wide.detach())
        return (time.perf_counter() - begun) / steps

    def table_stats(self) -> TableStats:
        """Return what the deep table did."""
        table = self._model.deep_table
        assert isinstance(table, EmbeddingTable)
        return table.stats()

    def __enter__(self) -> Clicker:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._run is not None:
            self._run.close(restore=False)


def in_tiers(size: ClickSize, host_bytes: int, path: Path) -> ts.OffloadConfig:
    """Compute on the host, with so much of its memory, and let the rest lie on disk."""
    return ts.OffloadConfig(
        device="cpu",
        offload_cpu_size=host_bytes,
        offload_disk_size=3 * size.table_bytes + 4 * size.dense_bytes,
        offload_path=str(path),
    )


def peaks(size: ClickSize, steps: int, host_bytes: int, path: Path) -> dict[str, object]:
    """Train with tables in tiers; return the peaks of resident memory before the run and in it."""
    with Clicker(ClickSize(1000, size.lines, size.width), TieredTables(), None, steps=2) as small:
        small.seconds_a_step(2)  # libraries have their own memory now
    before_bytes = peak_resident_bytes()
    with Clicker(size, TieredTables(), in_tiers(size, host_bytes, path), steps=steps) as clicker:
        clicker.write_all_rows()
        clicker.seconds_a_step(steps)
        peak_bytes = peak_resident_bytes()
        stats = clicker.table_stats().row_store
    return {
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "table_bytes": size.table_bytes,
        "page_bytes_read": stats.page_bytes_read,
        "page_bytes_written": stats.page_bytes_written,
        "losses": [float(loss).hex() for loss in clicker.losses],
    }


if __name__ == "__main__":
    nbytes, lines, width, steps, host_bytes, path = sys.argv[1:]
    size = ClickSize.of_bytes(int(nbytes), int(lines), int(width))
    print(json.dumps(peaks(size, int(steps), int(host_bytes), Path(path))))
