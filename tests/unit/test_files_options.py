"""What a user may say about scratch files."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore.errors import ConfigError
from tierstore.units import MIB
from tierstore_backends.files import open_backend
from tierstore_backends.files.options import Direct, FilesOptions, parse_options


def test_only_the_path_is_required() -> None:
    assert parse_options({"path": "/some/where"}) == FilesOptions(path=Path("/some/where"))


def test_every_option_is_read(tmp_path: Path) -> None:
    options = parse_options(
        {
            "path": tmp_path,
            "aio_block_size": "4MB",
            "aio_queue_depth": 8,
            "enable_aio": False,
            "checksum": False,
            "threads": 2,
            "direct": True,
            "durable": True,
            "salvage": True,
        }
    )
    assert options == FilesOptions(
        path=tmp_path,
        aio_block_size=4 * MIB,
        aio_queue_depth=8,
        enable_aio=False,
        checksum=False,
        threads=2,
        direct=Direct.ALWAYS,
        durable=True,
        salvage=True,
    )


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", Direct.AUTO), (True, Direct.ALWAYS), (False, Direct.NEVER)]
)
def test_direct_has_three_values(given: object, meant: Direct) -> None:
    assert parse_options({"path": "x", "direct": given}).direct is meant


def test_a_relative_path_is_fixed_when_it_is_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = parse_options({"path": "scratch"})
    monkeypatch.chdir("/")
    assert options.path == tmp_path / "scratch"


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("path", 3),
        ("path", ""),
        ("path", b"bytes"),
        ("path", "nul\0byte"),
        ("aio_block_size", 0),
        ("aio_block_size", -1),
        ("aio_block_size", "1 parsec"),
        ("aio_block_size", 1.5),
        ("aio_block_size", True),
        ("aio_queue_depth", 0),
        ("aio_queue_depth", "8"),
        ("aio_queue_depth", True),
        ("enable_aio", 1),
        ("checksum", "yes"),
        ("threads", 0),
        ("threads", 1025),
        ("aio_block_size", "1.1GiB"),
        ("threads", 1.0),
        ("direct", "always"),
        ("direct", 1),
        ("direct", 0),
        ("durable", 1),
        ("salvage", "yes"),
    ],
)
def test_a_bad_value_is_refused_with_what_is_accepted(name: str, given: object) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_options({"path": "x", name: given})
    assert f"{name}={given!r}" in str(caught.value)
    assert "accepted" in str(caught.value).lower()


def test_a_negative_capacity_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="negative"):
        open_backend(capacity_bytes=-1, options={"path": tmp_path})


def test_all_faults_are_told_at_once_with_near_misses_and_names() -> None:
    with pytest.raises(ConfigError) as caught:
        open_backend(capacity_bytes=0, options={"aio_blocksize": 1, "threads": 0, "zzz": None})
    message = str(caught.value)
    assert "did you mean 'aio_block_size'" in message
    assert "unknown option 'zzz'; accepted: path, aio_block_size, aio_queue_depth" in message
    assert "threads=0" in message
    assert "path is missing" in message


def test_a_bad_path_is_not_called_missing_too() -> None:
    with pytest.raises(ConfigError, match="path=3") as caught:
        parse_options({"path": 3})
    assert "missing" not in str(caught.value)
