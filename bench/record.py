"""A figure, the bar it has to reach, and the page that is written of it.

Knows nothing of how figures are measured.
"""

from __future__ import annotations

import datetime
import enum
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

_VERSIONS_OF = ("torch", "numpy", "xxhash", "safetensors", "psutil")


class Better(enum.Enum):
    """Which way a figure improves."""

    LOWER = "at most"
    HIGHER = "at least"


class Verdict(enum.Enum):
    """How far a figure got."""

    AIM = "aim reached"
    BAR = "bar reached"
    MISSED = "MISSED"


@dataclass(frozen=True)
class Figure:
    """One measured number with what it is held against.

    Attributes:
        name: the word that selects it on the command line.
        what: what was measured, in a sentence that needs no other.
        unit: of ``reached``, ``bar`` and ``aim``.
        details: everything else that was measured, by name, printable.
    """

    name: str
    what: str
    reached: float
    unit: str
    bar: float
    aim: float
    better: Better
    details: Mapping[str, str] = field(default_factory=dict)

    @property
    def verdict(self) -> Verdict:
        """Whether the aim or the bar was reached."""
        if self._reaches(self.aim):
            return Verdict.AIM
        return Verdict.BAR if self._reaches(self.bar) else Verdict.MISSED

    def _reaches(self, mark: float) -> bool:
        return self.reached <= mark if self.better is Better.LOWER else self.reached >= mark


@dataclass(frozen=True)
class Circumstances:
    """Where, when and with what a figure was measured."""

    command: str
    commit: str
    date: str
    machine: str
    scratch: str
    load_before: str
    versions: str

    @classmethod
    def now(cls, command: str, scratch: Path) -> Circumstances:
        """Look around.  ``scratch`` is the directory whose disk was used."""
        packages = [f"{name} {importlib.metadata.version(name)}" for name in _VERSIONS_OF]
        return cls(
            command=command,
            commit=commit_of(Path(__file__).parent),
            date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            machine=_machine(),
            scratch=_file_system(scratch),
            load_before=" ".join(f"{load:.2f}" for load in os.getloadavg()),
            versions=", ".join(
                [f"Python {platform.python_version()}", *packages, f"{torch.get_num_threads()} torch threads"]
            ),
        )


def commit_of(place: Path) -> str:
    """Return the commit of a directory's checkout, marked if the working tree differs from it."""
    head = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=place, capture_output=True, check=False
    )
    if head.returncode != 0:
        return "no commit"
    status = subprocess.run(["git", "status", "--porcelain"], cwd=place, capture_output=True, check=False)
    return head.stdout.decode().strip() + (" with changes" if status.stdout.strip() else "")


def _machine() -> str:
    cores = len(os.sched_getaffinity(0))
    memory_gib = psutil.virtual_memory().total / 1024**3
    names = [
        line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")
    ]
    device = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    name = names[0] if names else platform.machine()
    return f"{name}, {cores} cores, {memory_gib:.0f} GiB{device}, {platform.platform()}"


def _file_system(path: Path) -> str:
    """Return device and type of the file system that ``path`` is on."""
    resolved = path.resolve()
    mounts = [line.split()[:3] for line in _lines("/proc/mounts")]
    holding = [mount for mount in mounts if resolved.is_relative_to(mount[1])]
    if not holding:
        return "unknown"
    device, point, kind = max(holding, key=lambda mount: len(mount[1]))
    return f"{kind} on {device} at {point}"


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# ---------------------------------------------------------------------- pages


def summary(figures: Iterable[Figure]) -> list[list[str]]:
    """Return the table of what was reached against bar and aim, its head first."""
    rows = [["figure", "reached", "bar", "aim", "verdict"]]
    for figure in figures:
        marks = [f"{figure.better.value} {mark:g} {figure.unit}" for mark in (figure.bar, figure.aim)]
        rows.append([figure.name, f"{figure.reached:.4g} {figure.unit}", *marks, figure.verdict.value])
    return rows


def as_text(rows: Sequence[Sequence[str]]) -> str:
    """Lay a table out in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join(lines)


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    """Write a table as Markdown does."""
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *body])


def write(figure: Figure, circumstances: Circumstances, directory: Path) -> Path:
    """Record one figure as ``<name>.json``; return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{figure.name}.json"
    content = {
        "figure": asdict(figure) | {"better": figure.better.name},
        "circumstances": asdict(circumstances),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def read(path: Path) -> tuple[Figure, Circumstances]:
    """Read what `write` wrote."""
    content = json.loads(path.read_text())
    figure = content["figure"] | {"better": Better[content["figure"]["better"]]}
    return Figure(**figure), Circumstances(**content["circumstances"])


@dataclass(frozen=True)
class Page:
    """A page that is written of figures.

    Attributes:
        file: its name in the directory of results.
        title: its heading.
        about: what stands below it.
        order: names of figures; those recorded under other names are left out.
    """

    file: str
    title: str
    about: str
    order: Sequence[str]


def write_page(directory: Path, page: Page) -> Path:
    """Write a page from the figures recorded in ``directory``; return its path."""
    paths = [directory / f"{name}.json" for name in page.order]
    recorded = [read(path) for path in paths if path.exists()]
    missing = [f"`{path.stem}`" for path in paths if not path.exists()]
    parts = [
        f"# {page.title}",
        page.about,
        as_markdown(summary(figure for figure, _ in recorded)),
    ]
    parts += [f"Not measured: {', '.join(missing)}."] if missing else []
    for figure, circumstances in recorded:
        details = [["measured", "value"], *([name, value] for name, value in figure.details.items())]
        about = [f"- {name.replace('_', ' ')}: {value}" for name, value in asdict(circumstances).items()]
        about[0] = f"- command: `{circumstances.command}`"
        parts += [f"## {figure.name}", figure.what]
        parts += [as_markdown(details)] if figure.details else []
        parts += ["\n".join(about)]
    path = directory / page.file
    path.write_text("\n\n".join(parts) + "\n")
    return path
