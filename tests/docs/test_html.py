"""The documentation as HTML: it has a search that finds what pages say, and shows which version it is of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tierstore
from tests.docs.blocks import ROOT

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation, where warnings are errors."""
    folder = tmp_path_factory.mktemp("html")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")])}
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", "-n", "-W", "--keep-going", "-q", "-b", "html", "docs", str(folder)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr[-4000:]
    return folder


def test_a_search_finds_pages_by_their_words(html: Path) -> None:
    text = (html / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    pages, terms = index["docnames"], index["terms"]

    def found(word: str) -> set[str]:
        numbers = terms[word]
        return {pages[number] for number in ([numbers] if isinstance(numbers, int) else numbers)}

    assert "how-to/come-from-another-library" in found("deepspe")  # words are stemmed
    assert "how-to/choose-a-mode" in found("quota")
    assert (html / "search.html").is_file()


def test_every_page_has_the_search_and_the_version(html: Path) -> None:
    for name in ("index", "how-to/choose-a-mode", "reference/store"):
        page = (html / f"{name}.html").read_text(encoding="utf-8")
        assert f"tierstore {tierstore.__version__}" in page
        assert 'role="search"' in page
