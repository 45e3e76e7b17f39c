"""What a comparison found: figures, a table and the raw rounds; as text, as JSON, and as a page.

Knows nothing of how it was measured.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.record import Better, Circumstances, Figure, Verdict, as_markdown, as_text, summary

PAGE = "peers.md"


@dataclass(frozen=True)
class Result:
    """One comparison.

    Attributes:
        name: ``io``, ``training``, ``inference``, ``tables`` or ``shards``.
        what: the work, in a sentence that needs no other.
        tables: rows by title, each table's head first.
        figures: what is held against bars.
        left_out: peers that did not take part, with the reason.
        jobs: every peer's medians in the words of fio's JSON, and every round.
        notes: what a reader has to know to read the table.
    """

    name: str
    what: str
    tables: Mapping[str, Sequence[Sequence[str]]]
    figures: Sequence[Figure] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    jobs: Sequence[Mapping[str, object]] = ()
    notes: Sequence[str] = ()

    @property
    def is_missed(self) -> bool:
        """Whether a bar was not reached."""
        return any(figure.verdict is Verdict.MISSED for figure in self.figures)

    def to_text(self) -> str:
        """Lay it out for a terminal."""
        parts = [self.what]
        parts += [f"{title}\n{as_text(table)}" for title, table in self.tables.items()]
        parts += ["\n".join(self.notes)] if self.notes else []
        parts += (
            ["\n".join(f"left out: {name}: {why}" for name, why in self.left_out.items())]
            if self.left_out
            else []
        )
        parts += [as_text(summary(self.figures))] if self.figures else []
        return "\n\n".join(parts)


def write(result: Result, circumstances: Circumstances, directory: Path) -> Path:
    """Record it as ``peers-<name>.json``; return the path."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"peers-{result.name}.json"
    content = asdict(result) | {
        "figures": [asdict(figure) | {"better": figure.better.name} for figure in result.figures],
        "circumstances": asdict(circumstances),
    }
    path.write_text(json.dumps(content, indent=2) + "\n")
    return path


def read(path: Path) -> tuple[Result, Circumstances]:
    """Read what `write` wrote."""
    content = json.loads(path.read_text())
    circumstances = Circumstances(**content.pop("circumstances"))
    figures = [Figure(**(each | {"better": Better[each["better"]]})) for each in content.pop("figures")]
    return Result(figures=figures, **content), circumstances


def write_page(directory: Path, order: Sequence[str]) -> Path:
    """Write ``peers.md`` from every result recorded in ``directory``; return its path."""
    paths = [directory / f"peers-{name}.json" for name in order]
    recorded = [read(path) for path in paths if path.exists()]
    parts = [
        "# Beside peers",
        "Written by `python -m bench.peers --write`; do not edit.",
        "How to measure it yourself: [compare with peers](../how-to/compare-with-peers.md).",
        as_markdown(summary(figure for result, _ in recorded for figure in result.figures)),
    ]
    for result, circumstances in recorded:
        parts += [f"## {result.name}", result.what, *_section(result), _about(circumstances)]
    page = directory / PAGE
    page.write_text("\n\n".join(parts) + "\n")
    return page


def _section(result: Result) -> list[str]:
    parts = []
    for title, table in result.tables.items():
        parts += [f"### {title}", as_markdown(table)]
    for figure in result.figures:
        details = [["measured", "value"], *([name, value] for name, value in figure.details.items())]
        parts += [f"### {figure.name}", figure.what, *([as_markdown(details)] if figure.details else [])]
    notes = [*result.notes, *(f"left out: {name}: {why}" for name, why in result.left_out.items())]
    return [*parts, "\n".join(f"- {note}" for note in notes)] if notes else parts


def _about(circumstances: Circumstances) -> str:
    lines = [f"- {name.replace('_', ' ')}: {value}" for name, value in asdict(circumstances).items()]
    lines[0] = f"- command: `{circumstances.command}`"
    return "\n".join(lines)
