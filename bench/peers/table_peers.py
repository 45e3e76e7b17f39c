"""The peers of tables by name: lookup, backward and step of one large embedding in host memory.

Each has the same rows at first, the same bags of ids and the same gradients of what was looked up, and steps
its rows as the same optimizer does.  So the rows that they end with can be compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from bench.peers import usage
from bench.peers.usage import Usage, metered
from bench.peers.workers import Absent, Answer, Subject, required
from tierstore import optim
from tierstore.nn import EmbeddingTable, Normal
from wide_deep_planted import Zipf, scattered

OURS, PLAIN, FBGEMM = "tierstore", "pytorch", "fbgemm"
ADAM, ADAGRAD = "adam", "adagrad"
LEARNING_RATE, ADAM_EPS, ADAGRAD_EPS = 1e-2, 1e-8, 1e-10
DEVIATION = 0.01  # of the rows at first
BAG = 16  # ids that are summed
SAMPLE = 64  # rows that are told in the end
_CHUNK_ROWS = 2**16


@dataclass(frozen=True)
class Work:
    """What is looked up.

    Attributes:
        rows: of the table.
        width: of a row.
        ids: of a batch.
        exponent: of Zipf's law, which draws them.
        optimizer: `ADAM` or `ADAGRAD`.
    """

    rows: int
    width: int
    ids: int
    exponent: float
    optimizer: str

    @classmethod
    def of(cls, arguments: Mapping[str, object]) -> Work:
        """Read what was asked."""
        rows, width, ids = (int(str(arguments[name])) for name in ("rows", "width", "ids"))
        return cls(rows, width, ids, float(str(arguments["exponent"])), str(arguments["optimizer"]))

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield bags of ids, ``(bags, BAG)``, and the gradient of each bag's sum, ``(bags, width)``."""
        chance = np.random.default_rng(1)
        law = Zipf(self.rows, self.exponent)
        while True:
            ids = scattered(law.draw(chance, self.ids), self.rows).reshape(-1, BAG)
            gradient = chance.standard_normal((len(ids), self.width), np.float32)
            yield torch.from_numpy(ids), torch.from_numpy(gradient)

    def table(self) -> EmbeddingTable:
        """Return the table whose rows every peer begins with."""
        return EmbeddingTable(self.rows, self.width, mode="sum", init=Normal(DEVIATION), seed=0)

    def chunks(self) -> Iterator[tuple[slice, Tensor]]:
        """Yield the rows at first, some at a time."""
        table = self.table()
        for begin in range(0, self.rows, _CHUNK_ROWS):
            part = slice(begin, min(begin + _CHUNK_ROWS, self.rows))
            yield part, table.rows(torch.arange(part.start, part.stop))


class Table(Protocol):
    """An embedding that is looked up and stepped."""

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        """Look bags up, go back with the gradient of what that gave, and step."""

    def rows(self, ids: Tensor) -> Tensor:
        """Return rows as they are."""


class _Stepped:
    """A module of PyTorch's kind with an optimizer beside it."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module = module
        self._optimizer = optimizer

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        """See `Table.step`."""
        self._module(ids).backward(gradient)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Ours(_Stepped):
    """`EmbeddingTable` with an optimizer of `tierstore.optim`; all rows are in memory before a turn."""

    def __init__(self, work: Work) -> None:
        self._table = work.table()
        for part, rows in work.chunks():
            self._table.set_rows(torch.arange(part.start, part.stop), rows)
        parameters = self._table.parameters()
        if work.optimizer == ADAM:
            super().__init__(self._table, optim.SparseAdam(parameters, LEARNING_RATE, eps=ADAM_EPS))
        else:
            super().__init__(self._table, optim.Adagrad(parameters, LEARNING_RATE, eps=ADAGRAD_EPS))

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`."""
        return self._table.rows(ids)


class Plain(_Stepped):
    """``nn.EmbeddingBag`` with sparse gradients and an optimizer of PyTorch."""

    def __init__(self, work: Work) -> None:
        self._bags = nn.EmbeddingBag(work.rows, work.width, mode="sum", sparse=True)
        for part, rows in work.chunks():
            self._bags.weight.detach()[part] = rows
        parameters = list(self._bags.parameters())
        if work.optimizer == ADAM:
            super().__init__(self._bags, torch.optim.SparseAdam(parameters, LEARNING_RATE, eps=ADAM_EPS))
        else:
            super().__init__(self._bags, torch.optim.Adagrad(parameters, LEARNING_RATE, eps=ADAGRAD_EPS))

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`."""
        return self._bags.weight.detach()[ids]


class Fused:
    """FBGEMM's table-batched embedding on the CPU, whose backward steps; it has no Adam there.

    Raises:
        Absent: it is not installed, or has no such optimizer.
    """

    def __init__(self, work: Work) -> None:
        if work.optimizer != ADAGRAD:
            raise Absent(f"fbgemm has no {work.optimizer} on the CPU")
        hint = "pip install --no-deps fbgemm-gpu-cpu, the version that was built for this PyTorch"
        library = required("fbgemm_gpu.split_table_batched_embeddings_ops_training", hint)
        place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
        self._tables = library.SplitTableBatchedEmbeddingBagsCodegen(
            [(work.rows, work.width, *place)],
            optimizer=library.OptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=ADAGRAD_EPS,
        )
        (self._weight,) = self._tables.split_embedding_weights()
        for part, rows in work.chunks():
            self._weight.detach()[part] = rows
        self._offsets = torch.arange(0, work.ids + 1, BAG)

    def step(self, ids: Tensor, gradient: Tensor) -> None:
        """See `Table.step`."""
        self._tables(ids.flatten(), self._offsets).backward(gradient)

    def rows(self, ids: Tensor) -> Tensor:
        """See `Table.rows`."""
        found: Tensor = self._weight.detach()[ids]
        return found


PEERS: dict[str, Callable[[Work], Table]] = {OURS: Ours, PLAIN: Plain, FBGEMM: Fused}


def open_subject(name: str) -> Subject:
    """Open a peer by its name."""
    return Steps(name)


class Steps:
    """Asked for turns of several steps."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, ask: str, arguments: Mapping[str, object]) -> Answer:
        """Prepare the table, make some steps, tell the rows that they touched."""
        match ask:
            case "prepare":
                return self._prepare(Work.of(arguments))
            case "turn":
                return self._turn(int(str(arguments["steps"])))
            case "finish":
                return self._finish()
            case _:
                return {}

    def _prepare(self, work: Work) -> Answer:
        idle_bytes = usage.resident_bytes()
        self._batches = work.batches()
        self._touched = np.zeros(work.rows, bool)
        self._table = PEERS[self._name](work)
        usage.reset_peak()
        return {"idle_bytes": idle_bytes}

    def _turn(self, steps: int) -> Answer:
        taken = Usage(0.0, 0.0, 0, 0)
        for _ in range(steps):
            ids, gradient = next(self._batches)
            self._touched[ids.numpy()] = True
            taken += metered(lambda ids=ids, gradient=gradient: self._table.step(ids, gradient))  # type: ignore[misc]
        return {"usage": taken.to_mapping(), "steps": steps, "peak_bytes": usage.peak_resident_bytes()}

    def _finish(self) -> Answer:
        touched = torch.from_numpy(np.flatnonzero(self._touched))
        rows = self._table.rows(touched)
        return {
            "touched": len(touched),
            "digest": hashlib.sha256(rows.numpy().tobytes()).hexdigest(),
            "sample": rows[:: max(1, len(rows) // SAMPLE)].tolist(),
        }
