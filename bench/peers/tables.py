"""Steps of a large embedding in host memory by every peer, in turns: lookup, backward, rows stepped.

Answers two questions of ``tierstore``: how its tables compare with PyTorch's sparse embedding and optimizer,
and with FBGEMM's table-batched embedding, whose optimizer is fused into backward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.measure import ratios
from bench.peers.result import Result
from bench.peers.table_peers import ADAGRAD, ADAM, BAG, FBGEMM, OURS, PEERS, PLAIN
from bench.peers.turns import MIB, Turns, head, row, turns_of
from bench.peers.workers import Company
from bench.record import Better, Figure

OPTIMIZERS = (ADAM, ADAGRAD)
CLOSE = 1e-4
"""How far rows of a peer that rounds otherwise may be from PyTorch's; a step changes them by about 1e-2."""


@dataclass(frozen=True)
class TableSettings:
    """How the question is asked.

    Attributes:
        scratch: a directory for logs.
        peers: names, in the order of the first round.
        against: the peer that ratios in the tables are against, if it is there.
        repeats: rounds that count.
        warmups: rounds before them.
        steps: of a turn.
        rows: of the table.
        width: of a row.
        ids: of a batch.
        exponent: of Zipf's law.
    """

    scratch: Path
    peers: Sequence[str] = tuple(PEERS)
    against: str = PLAIN
    repeats: int = 7
    warmups: int = 1
    steps: int = 20
    rows: int = 1_000_000
    width: int = 64
    ids: int = 16_384
    exponent: float = 1.05

    def __post_init__(self) -> None:
        if self.ids < BAG or self.ids % BAG:
            raise ValueError(f"ids go into bags of {BAG}: there must be a multiple of that, not {self.ids}")

    def job(self, optimizer: str) -> dict[str, object]:
        """Return what peers are told."""
        return {
            "rows": self.rows,
            "width": self.width,
            "ids": self.ids,
            "exponent": self.exponent,
            "optimizer": optimizer,
        }


@dataclass(frozen=True)
class Stepped:
    """What one peer took, how many rows it touched, a digest of them all, and some."""

    turns: Turns
    touched: int
    digest: str
    sample: Sequence[Sequence[float]]


def compare(settings: TableSettings) -> Result:
    """Let all peers step in turns, once with each optimizer.

    Raises:
        Absent, PeerFailed: of tierstore itself; the others are left out.
        AssertionError: the rows differ.
    """
    found: dict[str, dict[str, Stepped]] = {}
    left_out: dict[str, str] = {}
    for optimizer in OPTIMIZERS:
        found[optimizer], missing = _turns(settings, optimizer)
        compare_rows(found[optimizer])
        left_out |= {f"{name}, {optimizer}": why for name, why in missing.items()}
    table_mib = settings.rows * settings.width * 4 / MIB
    return Result(
        name="tables",
        what=(
            f"lookup, backward and step of a table of {settings.rows:,} x {settings.width} float32 "
            f"({table_mib:.0f} MiB) in host memory, {settings.ids:,} ids a batch in bags of {BAG}, "
            f"Zipf {settings.exponent:g}; {settings.repeats} rounds of {settings.steps} steps in turns"
        ),
        tables={f"a step, {name}": _table(each, settings.against) for name, each in found.items()},
        figures=figures(found),
        left_out=left_out,
        jobs=[_job(name, optimizer, each) for optimizer, of in found.items() for name, each in of.items()],
        notes=[
            "rows of tierstore and PyTorch: equal, bit for bit",
            f"rows of fbgemm: within {CLOSE:g} of PyTorch's; it has no Adam on the CPU",
            "all rows are in memory before the first round",
        ],
    )


def _turns(settings: TableSettings, optimizer: str) -> tuple[dict[str, Stepped], Mapping[str, str]]:
    logs = settings.scratch / f"logs-{optimizer}"
    with Company("tables", settings.peers, logs, [OURS] if OURS in settings.peers else []) as company:
        ready = company.ask_all("prepare", settings.job(optimizer))
        answers = company.rounds(
            "turn", {"steps": settings.steps}, repeats=settings.repeats, warmups=settings.warmups
        )
        ends = company.ask_all("finish")
        left_out = company.left_out
    found = {}
    for name, of in answers.items():
        if name in ends:
            end = ends[name]
            sample: Sequence[Sequence[float]] = end["sample"]  # type: ignore[assignment]  # as was sent
            turns = turns_of("steps", ready[name], of)
            found[name] = Stepped(turns, int(str(end["touched"])), str(end["digest"]), sample)
    return found, left_out


def compare_rows(found: Mapping[str, Stepped]) -> None:
    """Compare the rows that peers ended with.

    Raises:
        AssertionError: tierstore's and PyTorch's differ in a bit, or another's by more than rounding.
    """
    if len({each.touched for each in found.values()}) > 1:
        raise AssertionError(f"not all touched the same rows: { {n: e.touched for n, e in found.items()} }")
    if OURS in found and PLAIN in found and found[OURS].digest != found[PLAIN].digest:
        raise AssertionError(f"the rows of {OURS} and {PLAIN} differ")
    base = next((found[name] for name in (PLAIN, OURS) if name in found), None)
    for name, each in found.items():
        assert base is not None
        difference = (torch.tensor(each.sample) - torch.tensor(base.sample)).abs().max().item()
        if not difference <= CLOSE:
            raise AssertionError(f"a row of {name} differs by {difference:g}; accepted: {CLOSE:g}")


def figures(found: Mapping[str, Mapping[str, Stepped]]) -> list[Figure]:
    """Hold a step against PyTorch's with Adam, and against fbgemm's with Adagrad."""
    return [
        figure
        for figure in (
            _figure("peers-table-pytorch", found.get(ADAM, {}), PLAIN, (1.0, 0.7)),
            _figure("peers-table-fbgemm", found.get(ADAGRAD, {}), FBGEMM, (1.5, 1.0)),
        )
        if figure is not None
    ]


_OTHERS = {
    PLAIN: "nn.EmbeddingBag(sparse=True) with torch.optim.SparseAdam",
    FBGEMM: "fbgemm's table-batched embedding with its fused Adagrad, on the CPU",
}


def _figure(name: str, found: Mapping[str, Stepped], peer: str, marks: tuple[float, float]) -> Figure | None:
    if OURS not in found or peer not in found:
        return None
    ours, theirs = found[OURS], found[peer]
    times = ratios(ours.turns.seconds(), theirs.turns.seconds())
    details = {
        "times its time": str(times),
        "rows touched": f"{ours.touched:,}",
        "peak memory": f"{ours.turns.peak_bytes / MIB:.0f} and {theirs.turns.peak_bytes / MIB:.0f} MiB",
    }
    what = f"lookup, backward and step of a table in host memory against {_OTHERS[peer]}"
    return Figure(name, what, times.median, "x its time", *marks, Better.LOWER, details)


def _table(found: Mapping[str, Stepped], against: str) -> list[list[str]]:
    base = found[against].turns if against in found else None
    rows = [[*head("step", against), "peak MiB"]]
    return rows + [
        [*row(name, each.turns, base), f"{each.turns.peak_bytes / MIB:.0f}"] for name, each in found.items()
    ]


def _job(name: str, optimizer: str, stepped: Stepped) -> dict[str, object]:
    return {
        "jobname": f"{name}, {optimizer}",
        "seconds_a_step": stepped.turns.seconds(),
        "rounds": [each.to_mapping() for each in stepped.turns.taken],
        "peak_bytes": stepped.turns.peak_bytes,
    }
