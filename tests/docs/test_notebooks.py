"""The notebooks of the documentation run from top to bottom, as somebody does who has just opened them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "examples" / "notebooks").glob("*.ipynb"))
_LINKED = re.compile(r"\]\(([^)#:]+)\)")
_RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
nbformat.validate(notebook)
NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
"""In a process of its own: its loop and the kernel's channels are none of the suite's."""


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    done = tmp_path / "done.ipynb"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "backends")]),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_DATA_DIR": str(tmp_path / "jupyter"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "MPLCONFIGDIR": str(tmp_path / "matplotlib"),
        "MPLBACKEND": "module://matplotlib_inline.backend_inline",
    }
    (tmp_path / "here").mkdir()
    ran = subprocess.run(
        [sys.executable, "-c", _RUN, str(path), str(done)],
        cwd=tmp_path / "here", env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-4000:]
    cells = [
        cell for cell in json.loads(done.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    assert not [each for each in (tmp_path / "here").rglob("*") if each.is_file()]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(path: Path) -> None:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell for cell in code if cell["outputs"] or cell["execution_count"] is not None] == []
    assert len({cell["id"] for cell in cells}) == len(cells)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_pages_that_a_notebook_names_are_there(path: Path) -> None:
    text = "".join("".join(cell["source"]) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"])
    linked = _LINKED.findall(text)
    assert linked
    assert [each for each in linked if not (path.parent / each).is_file()] == []


def test_there_is_one_for_training_and_one_for_the_store() -> None:
    assert [path.stem for path in NOTEBOOKS] == ["store", "train"]
