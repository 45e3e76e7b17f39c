"""Configurations from outside: right values, or one `ConfigError`, within bounded time and memory."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostile_yaml import ACTIVATIONS, DOCUMENTS, KEY, python_mappings
from tierstore.config import OffloadConfig
from tierstore.errors import ConfigError
from tierstore.training.activations.config.recompute_config import RecomputeConfig
from tierstore.training.activations.config.sections import Sections, read_sections
from tierstore.training.activations.config.swap_config import SwapConfig

_MOST_MESSAGE_CHARS = 20_000
_MOST_BYTES = 8 * 1024 * 1024
_Make = Callable[[], dict[str, object]]


def _tables(found: Sections) -> None:
    assert found.recompute is not None
    found.recompute.tables(4, **found.layout)  # type: ignore[arg-type]


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    return path


@pytest.mark.parametrize(("text", "why"), DOCUMENTS.values(), ids=DOCUMENTS)
def test_a_hostile_document_is_refused_with_the_reason(tmp_path: Path, text: str, why: str) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_yaml(path)
    assert why in str(refused.value)
    assert str(path) in str(refused.value)
    assert len(str(refused.value)) < _MOST_MESSAGE_CHARS


@pytest.mark.parametrize("name", ["laughs", "laughs of mappings", "deep lists", "decimal digits", "too long"])
def test_a_hostile_document_takes_little_memory(tmp_path: Path, name: str) -> None:
    path = _written(tmp_path, DOCUMENTS[name][0])
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError):
            OffloadConfig.from_yaml(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < _MOST_BYTES


@pytest.mark.parametrize(("text", "why"), ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_hostile_section_on_activations_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(ConfigError) as refused:
        _tables(read_sections(_written(tmp_path, text)))
    assert why in str(refused.value)
    assert len(str(refused.value)) < _MOST_MESSAGE_CHARS


@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in python_mappings()])
def test_a_hostile_mapping_is_refused_with_a_message_of_bounded_length(make: _Make) -> None:
    for read in (OffloadConfig.from_mapping, OffloadConfig.from_document, SwapConfig.from_mapping):
        with pytest.raises(ConfigError) as refused:
            read(make() | {"swap": make()} if read == SwapConfig.from_mapping else _in_section(read, make()))
        assert len(str(refused.value)) < _MOST_MESSAGE_CHARS


def _in_section(read: object, mapping: dict[str, object]) -> dict[str, object]:
    return {"offload_config": mapping} if read == OffloadConfig.from_document else mapping


def test_a_hostile_number_of_layers_or_stages_is_refused() -> None:
    for wrong in (10**5_000, 10**12):
        with pytest.raises(ConfigError):
            RecomputeConfig(recompute=True).tables(4, wrong, wrong)
        with pytest.raises(ConfigError):
            RecomputeConfig(recompute=True).tables(4, 1, 1, offset=-wrong)


@pytest.mark.parametrize("kind", ["pipe", "directory", "device", "proc", "socket"])
def test_what_is_no_regular_file_is_refused_before_it_is_read(tmp_path: Path, kind: str) -> None:
    path = {"device": Path("/dev/zero"), "proc": Path("/proc/self/status")}.get(kind, tmp_path / "run.yaml")
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "socket":
        os.mknod(path, 0o140600)
    with pytest.raises(ConfigError, match=r"cannot be read: (it is a |the file system says)"):
        OffloadConfig.from_yaml(path)


def test_a_name_that_no_file_can_have_is_refused() -> None:
    for name in ("a\0b", "\ud800"):
        with pytest.raises(ConfigError, match="cannot be read: its name is none that a file can have"):
            OffloadConfig.from_yaml(name)


def test_what_others_write_beside_is_read_over(tmp_path: Path) -> None:
    text = (
        f"{KEY}: false\nstart: 2024-01-31\nmilestones: {{10: 0.1, 20: 0.01}}\nseed: {2**64 - 1}\n"
        "dataset: &dataset {path: x, masks: [0o17, 0b1, 1_000, 1:30]}\nevaluated: {<<: *dataset, path: y}\n"
        "again: [*dataset, *dataset]\nswap_config: {}\n= : =\n"
    )
    assert OffloadConfig.from_yaml(_written(tmp_path, text)) == OffloadConfig(checksum=False)
