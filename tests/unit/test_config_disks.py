"""A quota of disk that no disk here has is said at opening, with the numbers, and is no error."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest

from tierstore.config import OffloadConfig, machine

_SIZES = machine.Usage(total=1000 << 20, free=100 << 20)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every file system have 1000 MiB, and 100 MiB free."""
    monkeypatch.setattr(shutil, "disk_usage", lambda place: _SIZES)


def told(path: Path, caplog: pytest.LogCaptureFixture, size: str | None) -> list[str]:
    with caplog.at_level(logging.WARNING, "tierstore"):
        OffloadConfig(
            device="cpu", offload_cpu_size="1MB", offload_disk_size=size, offload_path=path
        ).store_config()
    return caplog.messages


@pytest.mark.parametrize("size", ["101MB", "2GB", "100TB"])
def test_a_quota_beyond_what_is_free_is_said_with_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: str
) -> None:
    (message,) = told(tmp_path / "new", caplog, size)
    assert "offload_disk_size is " in message
    assert f"that of {tmp_path} has 100.0 MiB free of 1000.0 MiB" in message


@pytest.mark.parametrize("size", [None, "0B", "1MB", "100MB"])
def test_a_quota_that_there_is_room_for_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, size: str | None
) -> None:
    assert told(tmp_path, caplog, size) == []


def test_what_the_directory_holds_already_counts_as_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "held").write_bytes(b"x" * (2 << 20))
    assert told(tmp_path, caplog, "102MB") == []
    assert len(told(tmp_path, caplog, "103MB")) == 1


def test_a_file_system_that_does_not_say_how_large_it_is_is_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: machine.Usage(0, 0))
    assert told(tmp_path, caplog, "1GB") == []


def test_that_there_is_no_tier_on_disk_as_it_is_full_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda place: machine.Usage(1000, 0))
    (message,) = told(tmp_path, caplog, None)
    assert message == f"there is no tier on disk: the file system of '{tmp_path}' has no room"


def test_a_name_that_is_too_long_is_left_to_whoever_opens_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert told(tmp_path / ("n" * 300), caplog, "1MB") == []
