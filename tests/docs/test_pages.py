"""What the documentation shows is run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import blocks


@pytest.mark.parametrize("page", blocks.pages(), ids=lambda page: str(page.relative_to(blocks.ROOT)))
def test_every_block_of_a_page_does_what_the_page_says(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks.run(page)
    left = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert left == []


def test_each_block_of_the_readme_runs_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks.blocks(blocks.ROOT / "README.md")):
        page = tmp_path / f"{number}.md"
        page.write_text(f"```python\n{block.text}```\n", encoding="utf-8")
        blocks.run(page)


def test_the_pages_that_show_code_are_found() -> None:
    found = {str(page.relative_to(blocks.ROOT)) for page in blocks.pages()}
    assert {"README.md", "docs/tutorial/index.md", "docs/how-to/write-a-backend.md"} <= found


def test_a_page_that_shows_something_else_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\n```\n\n```python\n>>> x + 1\n3\n\n```\n", encoding="utf-8")
    with pytest.raises(AssertionError, match=r"page\.md"):
        blocks.run(page)
