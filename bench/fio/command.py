"""The command line: ``python -m bench JOBFILE...``.

Exit code 0: every job ran without error; 1: one had an error, or fio could not run; 2: a job file or an
argument is wrong, and nothing ran; 130: it was interrupted.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.fio import jobfile, outside, plots, report, terminal
from bench.fio.jobfile import Entry, JobFileError, RawJob
from bench.fio.plan import Planned, plan
from bench.fio.report import Json, Outcome
from bench.fio.runner import Spaces, measure_batch
from bench.fio.shelf import Shelf
from bench.place import PlaceError, made, scratch
from bench.record import Circumstances

_ROOT = Path(__file__).resolve().parents[2]
_RESULTS = _ROOT / "docs" / "benchmarks" / "jobs"
_SCRATCH = Path("offload")  # as `bench.command` has it: ignored by git, and on the disk one works on
_FORMATS = ("normal", "json", "json+", "both")


@dataclass
class Run:
    """Everything that came of the job files given.

    Attributes:
        skipped: what did not run, and why.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    disks: dict[object, Json] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    @property
    def has_errors(self) -> bool:
        """Whether any job had an error."""
        return bool(self.failed) or any(outcome.entry["error"] for outcome in self.outcomes)


def main(argv: Sequence[str] | None = None) -> int:
    """Run job files; see the module."""
    arguments = _parser().parse_args(argv)
    try:
        batches = read_batches(arguments.jobfile, arguments.section, arguments.set)
    except JobFileError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.showcmd:
        print("\n".join(_as_command(each) for batch in batches for each in batch))
        return 0
    formats = _formats(arguments.output_format)
    try:
        with made(arguments.path) as path:
            circumstances = _circumstances(path, argv)
            run = run_batches(batches, path, has_bins="json+" in formats)
    except PlaceError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing was recorded, and what was made is removed", file=sys.stderr)
        return 130  # 128 + SIGINT, as shells count
    document = report.document(run.outcomes, list(run.disks.values()), _global_options(batches))
    _print(run, batches, document, formats, arguments.output)
    if arguments.plots:
        _draw(run, arguments.plots)
    if arguments.write:
        _record(arguments.jobfile, document, circumstances, arguments.results)
    return 1 if run.has_errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Run fio job files: ioengine=tierstore on the store, any other with fio itself.",
        epilog="Without a job file: the figures that docs/benchmarks lists; python -m bench --figure NAME.",
    )
    add = parser.add_argument
    add("jobfile", nargs="+", type=Path, help="a job file, such as those in bench/jobs")
    add("--output-format", default="normal", help=f"{', '.join(_FORMATS)}, or several with commas (normal)")
    add("--output", type=Path, help="write the results to this file, not to the terminal")
    add("--section", action="append", default=[], help="run this section only; may be repeated")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="set this key in every section")
    add("--showcmd", action="store_true", help="print each job as fio's command line would have it; run none")
    add("--plots", type=Path, metavar="DIR", help="draw what the results allow as PNG files into DIR")
    add("--path", type=Path, default=_SCRATCH, help="a directory on the disk to measure (%(default)s)")
    add("--write", action="store_true", help="record the results in docs/benchmarks/jobs")
    add("--results", type=Path, default=_RESULTS, help="where to record them")
    return parser


def _formats(text: str) -> set[str]:
    words = set(text.split(","))
    if unknown := words - set(_FORMATS):
        print(
            f"--output-format {','.join(sorted(unknown))}: accepted: {', '.join(_FORMATS)}", file=sys.stderr
        )
        raise SystemExit(2)
    return (words - {"both"}) | ({"normal", "json"} if "both" in words else set())


# ---------------------------------------------------------------------- before


def read_batches(
    paths: Sequence[Path], sections: Sequence[str] = (), settings: Sequence[str] = ()
) -> list[list[Planned]]:
    """Read job files; return their sections in the batches that run one after the other.

    Args:
        paths: files; those of one are done before those of the next begin.
        sections: names of the only ones to take; none: all.
        settings: ``key=value``, as if every section had them.

    Raises:
        JobFileError: with every fault of every file.
    """
    faults: list[str] = []
    batches: list[list[Planned]] = []
    found: set[str] = set()
    for path in paths:
        try:
            raw = [_with(settings, job) for job in jobfile.raw_jobs(jobfile.read(path))]
            found |= {job.name for job in raw}
            chosen = [job for job in raw if not sections or job.name in sections]
            batches += plan(chosen, first_group=1 + batches[-1][-1].group if batches else 0)
        except JobFileError as error:
            faults += error.faults
    if not faults and (missing := [name for name in sections if name not in found]):
        faults.append(f"no section {', '.join(missing)}; there are: {', '.join(sorted(found))}")
    if not faults and not batches:
        faults.append(f"no section in {', '.join(map(str, paths))}")
    if faults:
        raise JobFileError(faults)
    return batches


def _with(settings: Sequence[str], job: RawJob) -> RawJob:
    entries = jobfile.parse("\n".join(["[set]", *settings]), "--set")[0].entries
    return replace(job, section=replace(job.section, entries=(*job.section.entries, *entries)))


def _as_command(planned: Planned) -> str:
    merged = {"name": planned.name, **planned.merged}
    return shlex.join(["fio", *(str(Entry(f"--{key}", value)) for key, value in merged.items())])


def _global_options(batches: Sequence[Sequence[Planned]]) -> dict[str, str]:
    """Return what all sections inherit alike."""
    inherited = [each.inherited.items() for batch in batches for each in batch]
    return dict(pair for pair in inherited[0] if all(pair in other for other in inherited))


# ---------------------------------------------------------------------- running


def run_batches(batches: Sequence[Sequence[Planned]], path: Path, *, has_bins: bool = True) -> Run:
    """Run batches one after the other, in a directory under ``path`` that goes away again."""
    run = Run()
    jobs = [each.job for batch in batches for each in batch if each.job is not None]
    with scratch(path) as room:
        spaces = Spaces()
        with Shelf(room, jobs) as shelf:
            for number, batch in enumerate(batches):
                print(f"running {', '.join(each.name for each in batch)} ...", file=sys.stderr, flush=True)
                if batch[0].job is None:
                    _run_outside(run, batch, room / f"fio-{number}")
                    continue
                measured = measure_batch(batch, shelf, spaces, room)
                run.outcomes += report.outcomes(measured.finished, measured.pid, has_bins=has_bins)
                _add_disks(run, [measured.disk] if measured.disk else [])
    return run


def _run_outside(run: Run, batch: Sequence[Planned], scratch: Path) -> None:
    names = ", ".join(each.name for each in batch)
    if not outside.is_there():
        run.skipped.append(f"{names}: ioengine={batch[0].engine} needs fio, which is not installed")
        return
    try:
        answer = outside.run(batch, scratch)
    except outside.FioFailedError as error:
        run.failed.append(str(error))
        return
    run.outcomes += answer.outcomes
    _add_disks(run, answer.disks)


def _add_disks(run: Run, disks: Sequence[Json]) -> None:
    """Sum what each disk did; how busy it was is the highest share of any batch."""
    for disk in disks:
        total = run.disks.setdefault(disk["name"], dict.fromkeys(disk, 0) | {"name": disk["name"]})
        for name, value in disk.items():
            former = total.get(name, 0)
            if isinstance(value, int | float) and isinstance(former, int | float):
                total[name] = max(former, value) if name == "util" else former + value


# ---------------------------------------------------------------------- after


def _print(
    run: Run, batches: Sequence[Sequence[Planned]], document: Json, formats: set[str], output: Path | None
) -> None:
    parts = []
    if formats & {"json", "json+"}:
        parts.append(json.dumps(document, indent=2))
    if "normal" in formats:
        parts.append(terminal.heading(each for batch in batches for each in batch))
        parts.append(terminal.summary(run.outcomes, list(run.disks.values())) if run.outcomes else "")
    text = "\n\n".join(part for part in parts if part) + "\n"
    if output is None:
        print(text, end="")
    else:
        _put(output, text)
    for line in run.skipped:
        print(f"skipped {line}", file=sys.stderr)
    for line in run.failed:
        print(line, file=sys.stderr)


def _put(output: Path, text: str) -> None:
    """Write the results; where that cannot be, to the terminal, so that they are not lost."""
    try:
        output.write_text(text)
    except OSError as error:
        print(text, end="")
        print(f"the results are above, for {output} cannot be written: {error}", file=sys.stderr)


def _draw(run: Run, directory: Path) -> None:
    try:
        paths = plots.draw(run.outcomes, directory)
    except (plots.NoMatplotlibError, OSError) as error:
        print(f"no plots are drawn: {error}", file=sys.stderr)
        return
    for path in paths:
        print(f"drew {path}", file=sys.stderr)


def _circumstances(path: Path, argv: Sequence[str] | None) -> Circumstances:
    words = sys.argv[1:] if argv is None else argv
    return Circumstances.now(shlex.join(["python", "-m", "bench", *words]), path)


def _record(paths: Sequence[Path], document: Json, circumstances: Circumstances, directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ("-".join(path.stem for path in paths) + ".json")
    path.write_text(json.dumps({"circumstances": asdict(circumstances), **document}, indent=2) + "\n")
    print(f"recorded {path}", file=sys.stderr)
