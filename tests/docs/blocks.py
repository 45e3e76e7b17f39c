"""The fenced ``python`` blocks of a Markdown page, run from top to bottom as one program.

A block that begins with ``>>>`` is compared with what it prints; any other block just has to run.
"""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]

_FENCED = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF


@dataclass(frozen=True)
class Block:
    """Some lines of a page."""

    page: Path
    line: int
    text: str

    @property
    def is_session(self) -> bool:
        """Whether it shows prompts and what they print."""
        return self.text.lstrip().startswith(">>>")


def pages() -> list[Path]:
    """Return every page that has blocks to run."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if "_build" not in page.parts and any(blocks(page))]


def blocks(page: Path) -> Iterator[Block]:
    """Yield the blocks of a page from top to bottom."""
    text = page.read_text(encoding="utf-8")
    for found in _FENCED.finditer(text):
        yield Block(page, text.count("\n", 0, found.start(1)) + 1, found[1])


def run(page: Path) -> dict[str, object]:
    """Run a page; return the names that it leaves.

    Raises:
        AssertionError: a block printed something else than the page shows.
    """
    names: dict[str, object] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.is_session:
            _run_session(block, names)
        else:
            # Blank lines before it give tracebacks the line numbers of the page.
            text = "\n" * (block.line - 1) + block.text
            exec(compile(text, str(page), "exec", dont_inherit=True), names)
    return names


def _run_session(block: Block, names: dict[str, object]) -> None:
    name = str(block.page.relative_to(ROOT))
    test = doctest.DocTestParser().get_doctest(block.text, names, name, str(block.page), block.line - 1)
    report: list[str] = []
    doctest.DocTestRunner(optionflags=_OPTIONS).run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert not report, "".join(report)
