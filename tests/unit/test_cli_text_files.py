"""Files that a command line names: bounded, whole or not there, and every wrong path a usage error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tierstore.cli.text_files import read_text, require_places, write_text
from tierstore.errors import UsageError


def test_what_was_written_is_read_and_replaces_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    for text in ("first, longer", "sécond"):
        write_text(path, text)
        assert read_text(path, 100) == text
    assert os.listdir(tmp_path) == ["run.yaml"]  # noqa: PTH208


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    (tmp_path / "long").write_bytes(b"x" * 11)
    os.mkfifo(tmp_path / "pipe")
    wrong = {
        "bytes": "UTF-8",
        "long": "at most 10",
        "pipe": "a pipe",
        "": "a directory",
        "none": "No such file",
    }
    for name, words in wrong.items():
        with pytest.raises(UsageError, match=words):
            read_text(tmp_path / name, 10)


def test_a_write_that_fails_leaves_the_former_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.yaml"
    write_text(path, "former")

    def full(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:2])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(UsageError, match="No space left"):
        write_text(path, "later")
    assert (path.read_text(), os.listdir(tmp_path)) == ("former", ["run.yaml"])  # noqa: PTH208


@pytest.mark.parametrize("name", ["no/such/run.yaml", "", ".", "a\0b"])
def test_a_place_where_no_file_can_be_is_refused_before_anything_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        require_places(["fine.yaml", name])


def test_one_file_for_two_outputs_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    require_places(["a.yaml", "a.html"])
    with pytest.raises(UsageError, match="twice"):
        require_places(["a.yaml", f"{tmp_path}/a.yaml"])


@pytest.mark.parametrize("name", ["/dev/null", "pipe", "link"])
def test_what_is_no_file_is_not_replaced_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    Path("link").symlink_to("pipe")
    with pytest.raises(UsageError, match="a device, a pipe or a socket"):
        require_places([name])
