"""Configurations of DeepSpeed's or Accelerate's become what a run accepts, or are refused, in time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.foreign_configs import CASES, WRONG
from tests.fuzz import Judge
from tests.property.test_config_yaml import TOKENS as _TEXTS
from tests.property.test_converted_configs import judge
from tierstore.cli import accelerate_config, deepspeed_config

_MOST_CHARS = 2000

SEEDS = {
    **{name: json.dumps(given).encode() for name, (given, _) in CASES.items()},
    **{f"{name}, in YAML": yaml.safe_dump(dict(given)).encode() for name, (given, _) in CASES.items()},
    **{name: text[:_MOST_CHARS].encode() for name, (text, _) in WRONG.items()},
}
TOKENS = tuple(
    token.encode()
    for token in (*_TEXTS, *deepspeed_config.SECTIONS, *accelerate_config.SECTIONS, "offload_param")
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    yield lambda content: judge(content.decode("utf-8", "ignore"))
