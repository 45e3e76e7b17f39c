"""The command line of the comparisons: ``python -m bench.peers io|training|inference|tables|shards``."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from bench.peers import disk, disk_peers, inference, shards, tables, training
from bench.peers.diskjob import KIB, MIB
from bench.peers.result import Result, write, write_page
from bench.peers.turns import ModelSettings
from bench.place import PlaceError, scratch
from bench.record import Circumstances

_RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
_SCRATCH = Path("offload")  # in .gitignore; on the disk one works on, where a temporary one may be memory

Comparison = Callable[[argparse.Namespace, Path], Result]
"""Takes the command line and a directory of its own on the disk to measure."""


def _disk(words: argparse.Namespace, room: Path) -> Result:
    return disk.compare(
        disk.DiskSettings(
            scratch=room,
            peers=_chosen(words.peers.split(","), list(disk_peers.PEERS), "peer"),
            against=words.against or disk.DiskSettings.against,
            repeats=words.repeats or disk.DiskSettings.repeats,
            warmups=words.warmups,
            tensor_mib=[float(size) for size in words.sizes.split(",")],
            total_mib=words.total,
            block_bytes=words.bs * KIB,
            depth=words.iodepth,
        )
    )


def _training(words: argparse.Namespace, room: Path) -> Result:
    return training.compare(_asked(words, training.usual(room)))


def _shards(words: argparse.Namespace, room: Path) -> Result:
    return shards.compare(_asked(words, shards.usual(room)))


def _inference(words: argparse.Namespace, room: Path) -> Result:
    return inference.compare(_asked(words, inference.usual(room)))


def _asked(words: argparse.Namespace, usual: ModelSettings) -> ModelSettings:
    return replace(
        usual,
        peers=_chosen(words.peers.split(","), usual.peers, "peer"),
        against=words.against or usual.against,
        repeats=words.repeats or usual.repeats,
        warmups=words.warmups,
        units=words.steps or usual.units,
        dim=words.dim,
        host_bytes=None if words.host_quota is None else words.host_quota * MIB,
    )


def _tables(words: argparse.Namespace, room: Path) -> Result:
    usual = tables.TableSettings(room)
    return tables.compare(
        replace(
            usual,
            peers=_chosen(words.peers.split(","), usual.peers, "peer"),
            against=words.against or usual.against,
            repeats=words.repeats or usual.repeats,
            warmups=words.warmups,
            steps=words.steps or usual.steps,
            rows=words.rows,
            ids=words.ids,
        )
    )


COMPARISONS: dict[str, Comparison] = {
    "io": _disk,
    "training": _training,
    "inference": _inference,
    "tables": _tables,
    "shards": _shards,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the command line asks for; return 0 if every bar was reached, 1 if not, 2 if none ran."""
    given = list(sys.argv[1:] if argv is None else argv)
    words = _parser().parse_args(given)
    is_missed = False
    for name in _chosen(words.comparison, list(COMPARISONS), "comparison"):
        print(f"comparing {name} ...", file=sys.stderr, flush=True)
        try:
            with scratch(words.path.resolve(), "peers-") as room:
                circumstances = Circumstances.now(shlex.join(["python", "-m", "bench.peers", *given]), room)
                result = COMPARISONS[name](words, room)
        except PlaceError as error:
            print(error, file=sys.stderr)
            return 2
        print(f"\n{result.to_text()}")
        if words.write:
            write(result, circumstances, words.results)
            write_page(words.results, list(COMPARISONS))
        is_missed |= result.is_missed
    return 1 if is_missed else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers",
        description="Do the same work with tierstore and with its peers, in turns.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("comparison", nargs="*", help=f"{', '.join(COMPARISONS)}; none: all of them")
    add("--repeats", type=int, help="rounds that count")
    add("--warmups", type=int, default=1, help="rounds before them that do not")
    add("--peers", default="", help="names, separated by commas; none: all")
    add("--against", help="the peer that the ratios in the tables are against")
    add("--path", type=Path, default=_SCRATCH, help="a directory on the disk to measure")
    add("--write", action="store_true", help="record the result as JSON and as a page")
    add("--results", type=Path, default=_RESULTS, help="where to record it")
    of_io = parser.add_argument_group("io")
    of_io.add_argument("--sizes", default="1,4,16,64", help="of tensors, in MiB")
    of_io.add_argument("--total", type=float, default=512, help="MiB of all tensors of a turn")
    of_io.add_argument("--bs", type=int, default=1024, help="KiB of one request")
    of_io.add_argument("--iodepth", type=int, default=4, help="requests at a time")
    of_tables = parser.add_argument_group("tables")
    of_tables.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    of_tables.add_argument("--ids", type=int, default=16_384, help="of a batch")
    of_models = parser.add_argument_group("training, inference, tables, shards")
    of_models.add_argument(
        "--steps",
        type=int,
        help="of a turn; 10 training steps, 5 passes, 20 steps of tables or 5 of shards if not given",
    )
    of_models.add_argument("--dim", type=int, default=1024, help="the width of the model")
    of_models.add_argument("--host-quota", type=int, help="MiB that tierstore keeps in host memory")
    return parser


def _chosen(given: Sequence[str], known: Sequence[str], what: str) -> list[str]:
    """Return what was asked for, in the order in which it was; all there is if nothing was.

    Raises:
        SystemExit: one has no such name.
    """
    names = list(filter(None, given)) or list(known)
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"no {what} is called {', '.join(unknown)}; there are {', '.join(known)}")
    return names
