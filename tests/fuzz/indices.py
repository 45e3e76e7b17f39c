"""Indices of weights in several files: a tensor is found where they say, or they are refused."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save

from tests.fuzz import Judge, see_that_it_is_short
from tests.training.test_hostile_tensorfiles import INDICES
from tierstore.errors import UsageError
from tierstore.formats.sharded_weights import open_source

_MOST_CHARS = 2000
_HELD = {"a.safetensors": {"x": torch.arange(3.0)}, "b.safetensors": {"y": torch.ones(2)}}

SEEDS = {
    "right": b'{"metadata": {}, "weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}',
    **{name: text[:_MOST_CHARS].encode() for name, (text, _) in INDICES.items()},
}
TOKENS = (
    *(b'"weight_map"', b'"metadata"', b'"x"', b'"y"', b'"a.safetensors"', b'"b.safetensors"', b'"../'),
    *(b'"/', b"./", b"\\u0000", b"\\ud800", b"{", b"}", b":", b",", b"null", b"[", b"]"),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    for name, tensors in _HELD.items():
        (directory / name).write_bytes(save(tensors))
    path = directory / "model.safetensors.index.json"

    def judge(content: bytes) -> None:
        path.write_bytes(content)
        try:
            with open_source(path) as source:
                if source.faults:
                    return
                read = {name: source.read(name) for name in source.names}
        except UsageError as refused:
            see_that_it_is_short(refused)
            return
        held = {name: each for tensors in _HELD.values() for name, each in tensors.items()}
        assert all(each.equal(held[name]) for name, each in read.items()), read

    yield judge
