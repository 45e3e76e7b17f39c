"""Any YAML text: read as PyYAML's safe loader reads it, or refused with `ConfigError`, in bounded time."""

from __future__ import annotations

import math
import time

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hostile_yaml import ACTIVATIONS, DOCUMENTS
from tierstore.config import OffloadConfig
from tierstore.config.yaml_text import parse
from tierstore.errors import ConfigError
from tierstore.training.activations.config.sections import sections_of

_KEYS = st.sampled_from([*OffloadConfig().to_mapping(), "a", "b"]) | st.text(max_size=5)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**64) + 1, 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["ON", "cpu", "2024-01-31", "=", "<<", "0x10", "1:30", "1e3", ".inf", "~", "yes"])
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS, inner, max_size=4),
    max_leaves=12,
)
TOKENS = (
    *"[]{}:,-?&*!|>'\"%@`#~<=\n\t \\",
    *("\n  ", "- ", ": ", "? ", "&a ", "*a", "<<: ", "---\n", "...\n", "%YAML 1.1\n", "\\u", "\\UFFFFFFFF"),
    *("!!int ", "!!float ", "!!str ", "!!bool ", "!!set ", "!x "),
    *("a", "b", "1", "0x", "1:2", "9" * 80, "1e9", ".5", "on", "null"),
    *("offload_config", "context", "swap_config", "recompute_config"),
)
_TOKENS = st.sampled_from(TOKENS)
_SECONDS = 5
_REFUSED = object()


def _same(mine: object, theirs: object) -> bool:
    if isinstance(mine, float) and isinstance(theirs, float):
        return mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    if isinstance(mine, dict) and isinstance(theirs, dict):
        return list(mine) == list(theirs) and all(_same(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list) and isinstance(theirs, list):
        return len(mine) == len(theirs) and all(map(_same, mine, theirs))
    return type(mine) is type(theirs) and mine == theirs


def _dates_as_text(text: str) -> object:
    class Plain(yaml.SafeLoader):
        pass

    dropped = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
    Plain.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in each if tag not in dropped]
        for first, each in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    return yaml.load(text, Plain)


def _parsed(text: str) -> object:
    """Return what a text says; `_REFUSED`: it was refused, with a message of bounded length."""
    try:
        return parse(text, "text")
    except ConfigError as refused:
        return _bounded(refused, 2_000)


def _bounded(refused: ConfigError, most_chars: int) -> object:
    assert len(str(refused)) < most_chars
    return _REFUSED


def judge(text: str) -> None:
    began = time.process_time()
    found = _parsed(text)
    if found is not _REFUSED:
        assert _same(found, _dates_as_text(text))
        _configure(found)
    assert time.process_time() - began < _SECONDS


def _configure(found: object) -> None:
    if not isinstance(found, dict):
        return
    for read in (OffloadConfig.from_document, OffloadConfig.from_mapping, sections_of):
        try:
            read(found)
        except ConfigError as refused:
            _bounded(refused, 50_000)


@given(_VALUES, st.booleans())
def test_what_is_dumped_is_read_back(value: object, is_flow: bool) -> None:
    text = yaml.safe_dump(value, default_flow_style=is_flow, sort_keys=False)
    assert _same(parse(text, "text"), value)


@given(st.lists(_TOKENS, max_size=30).map("".join))
def test_any_tokens_are_read_as_pyyaml_reads_them_or_refused(text: str) -> None:
    judge(text)


@given(st.data())
def test_a_damaged_document_is_read_as_pyyaml_reads_it_or_refused(data: st.DataObject) -> None:
    text = yaml.safe_dump({"offload_config": OffloadConfig().to_mapping(), "other": data.draw(_VALUES)})
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(_TOKENS) + text[at + data.draw(st.integers(0, 3)) :]
    judge(text)


@pytest.mark.long
@settings(max_examples=30_000)
@given(st.data())
def test_a_hostile_document_with_damage_is_refused_or_read_within_seconds(data: st.DataObject) -> None:
    text, _ = data.draw(st.sampled_from([*DOCUMENTS.values(), *ACTIVATIONS.values()]))
    text = text[: data.draw(st.integers(0, min(len(text), 4_000)))]
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(text)))
        text = text[:at] + data.draw(_TOKENS) + text[at:]
    began = time.process_time()
    _configure(_parsed(text))
    assert time.process_time() - began < _SECONDS


@pytest.mark.long
@settings(max_examples=100_000)
@given(st.text(max_size=200))
def test_any_text_is_read_as_pyyaml_reads_it_or_refused(text: str) -> None:
    judge(text)
