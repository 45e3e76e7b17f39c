"""The command line that every module of `bench` shares, and the questions it chooses from."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.place import PlaceError, scratch
from bench.record import Circumstances, Figure, Page, Verdict, as_text, summary, write, write_page

FIGURES = (
    "lease",
    "host-copy",
    "disk",
    "small-tensors",
    "step-in-memory",
    "step-emulated",
    "step-disk",
    "step-disk-in-backward",
    "step-of-eight",
    "resident-memory",
    "resident-in-memory",
    "quota-steps",
    "quota-bytes",
    "quota-bytes-in-backward",
    "quota-nearly-all",
    "reserved",
    "growth",
    "flush-growth",
    "put-growth",
    "lease-growth",
    "idle-key",
    "part-reads",
    "cached-row-hits",
    "cached-row-bytes",
    "device-budget",
    "forwards-copied",
    "swap-peak",
    "swap-plan",
    "swap-step",
    "swap-and-recompute",
    "swap-leaks",
    "swap-save-on-cpu",
    "simulated-swap-peak",
    "simulated-swap-step",
    "simulated-swap-and-recompute",
    "simulated-step",
    "resnet50-batch",
    "table-on-disk",
    "table-resident",
    "host-device-step",
    "host-steps",
    "simulated-host-steps",
    "planned-bytes",
    "planned-peak",
    "planned-step",
    "planned-choice",
    "planned-rules",
    "planned-ideal",
    "planned-70b",
    "planned-405b",
    "watched-step",
    "trainer-lines",
    "trainer-step",
    "shards-host",
    "shards-disk",
    "gpu-link",
    "gpu-swap-peak",
    "gpu-swap-step",
    "gpu-step",
    "gpu-shards",
)
"""Every figure of `FIGURES_PAGE`, in its order."""

FIGURES_PAGE = Page(
    "figures.md",
    "Figures",
    "Written by `python -m bench --write`; do not edit. How each is measured stands in `bench/`.",
    FIGURES,
)

_RESULTS = Path(__file__).resolve().parent.parent / "docs" / "benchmarks"
_SCRATCH = Path("offload")  # in .gitignore; on the disk one works on, where a temporary one may be memory


@dataclass(frozen=True)
class Settings:
    """How a question is to be asked.

    Attributes:
        scratch: a directory of one's own on the disk to measure.
        repeats: rounds that count.
        warmups: rounds before them that do not.
        scale: share of the full number of bytes, keys or steps; below 1 for a look, not a result.
    """

    scratch: Path
    repeats: int = 5
    warmups: int = 1
    scale: float = 1.0

    def scaled(self, count: int, *, least: int = 1) -> int:
        """Return ``count`` at this scale, but at least ``least``."""
        return max(least, round(count * self.scale))


class UnmeasurableError(Exception):
    """This machine cannot answer the question.  The message says what is missing."""


Question = Callable[[Settings], Figure]
"""Measures one figure, or raises `UnmeasurableError`."""


def main(
    module: str,
    questions: dict[str, Question],
    argv: Sequence[str] | None = None,
    page: Page = FIGURES_PAGE,
) -> int:
    """Measure what the command line asks for; return 0 if every bar was reached, 1 if not, 2 if none ran.

    Args:
        module: how the command line begins, for what is printed and recorded.
        questions: by the names of their figures.
        argv: the words behind that.
        page: that is written if figures are recorded.
    """
    arguments = _parser(module, questions).parse_args(argv)
    names = arguments.figure or list(questions)
    try:
        figures = _measure(module, questions, names, arguments)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.write:
        write_page(arguments.results, page)
    print("\n" + as_text(summary(figures)))
    return 1 if any(figure.verdict is Verdict.MISSED for figure in figures) else 0


def _measure(
    module: str, questions: dict[str, Question], names: Sequence[str], arguments: argparse.Namespace
) -> list[Figure]:
    figures = []
    with scratch(arguments.path) as room:
        settings = Settings(room, arguments.repeats, arguments.warmups, arguments.scale)
        for name in names:
            print(f"measuring {name} ...", file=sys.stderr, flush=True)
            circumstances = Circumstances.now(_command(module, name, settings), room)
            try:
                figure = questions[name](settings)
            except UnmeasurableError as reason:
                print(f"\n{name}: not measured: {reason}")
                continue
            figures.append(figure)
            _print_details(figure)
            if arguments.write:
                write(figure, circumstances, arguments.results)
    return figures


def _parser(module: str, questions: dict[str, Question]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description="Measure figures against their peers."
    )
    add = parser.add_argument
    add("--figure", action="append", choices=list(questions), help="measure this one only; may be repeated")
    add("--repeats", type=int, default=5, help="rounds that count (%(default)s)")
    add("--warmups", type=int, default=1, help="rounds before them that do not (%(default)s)")
    add(
        "--scale",
        type=float,
        default=1.0,
        help="share of the full amount of work, for a quick look (%(default)s)",
    )
    add("--path", type=Path, default=_SCRATCH, help="a directory on the disk to measure (%(default)s)")
    add("--write", action="store_true", help="record the results")
    add("--results", type=Path, default=_RESULTS, help="where to record them (docs/benchmarks)")
    return parser


def _command(module: str, name: str, settings: Settings) -> str:
    """Return the command that measures this figure alone, the same way."""
    words = ["python", "-m", *module.split(), "--figure", name]
    words += ["--repeats", str(settings.repeats), "--warmups", str(settings.warmups)]
    words += ["--scale", f"{settings.scale:g}"] if settings.scale != 1 else []
    return shlex.join(words)


def _print_details(figure: Figure) -> None:
    print(f"\n{figure.name}: {figure.what}")
    for name, value in figure.details.items():
        print(f"  {name}: {value}")
