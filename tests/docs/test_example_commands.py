"""Commands of the examples that the documentation shows are ones that the examples take."""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs" / "how-to").glob("*.md"))]
PROGRAMS = sorted((ROOT / "docs" / "examples").glob("train_*.py"))


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield module and words of each command that starts an example."""
    for line in text.replace("\\\n", " ").splitlines():
        found = re.match(r"\s*(?:python3?|torchrun)\b.* docs/examples/(train_\w+)\.py(.*)", line)
        if found:
            yield found[1], shlex.split(found[2], comments=True)


SHOWN = [
    *(
        pytest.param(*each, id=f"{page.name}: {each[0]}")
        for page in PAGES
        for each in commands(page.read_text())
    ),
    *(pytest.param(*each, id=path.name) for path in PROGRAMS for each in commands(path.read_text())),
]


@pytest.mark.parametrize(("module", "words"), SHOWN)
def test_an_example_takes_the_command_that_is_shown(module: str, words: list[str]) -> None:
    program = importlib.import_module(module)
    program.command_line().parse_args(words)


def test_every_example_shows_how_it_is_started_and_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "run-the-examples.md").read_text()
    for path in PROGRAMS:
        assert path.stem in {module for module, _ in commands(path.read_text())}
        assert f"`{path.name}`" in page
    assert {"train_wide_deep", "train_host_device"} <= {case.values[0] for case in SHOWN}
