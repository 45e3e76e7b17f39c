"""Configuration in YAML: read as PyYAML's safe loader reads it, or refused, in bounded time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.fuzz import Judge
from tests.hostile_yaml import ACTIVATIONS, DOCUMENTS
from tests.property.test_config_yaml import TOKENS as _TEXTS
from tests.property.test_config_yaml import judge
from tierstore.config import OffloadConfig

_MOST_CHARS = 2000

SEEDS = {
    "all options": yaml.safe_dump({"offload_config": OffloadConfig().to_mapping()}).encode(),
    **{
        name: text[:_MOST_CHARS].encode("utf-8", "surrogateescape")
        for name, (text, _) in (*DOCUMENTS.items(), *ACTIVATIONS.items())
    },
}
TOKENS = tuple(token.encode() for token in (*_TEXTS, *OffloadConfig().to_mapping()))


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    yield lambda content: judge(content.decode("utf-8", "ignore"))
