"""Checkpoints of a run: loaded whole, or refused, and then nothing has changed.

The first byte of an input says which file of a right checkpoint the rest takes the place of.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from tests.fuzz import Judge, see_that_it_is_short
from tests.training.test_hostile_checkpoints import looked_at
from tierstore.errors import UsageError
from tierstore.training import Offload, offload
from tierstore.training.checkpoints.files import MODEL, SCALARS, STATE

_FILES = (SCALARS, STATE, MODEL)
_CONFIG = {"device": "cpu", "offload_disk_size": 0}


def _opened() -> tuple[torch.nn.Module, list[torch.optim.Optimizer], Offload]:
    model = torch.nn.Linear(2, 1)
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(model.parameters(), lr=1e-2)]
    run = offload(model, optimizers, _CONFIG)
    return model, optimizers, run


def _saved() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as folder:
        model, optimizers, run = _opened()
        with run:
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizers[0].step()
            run.save(Path(folder) / "c")
        return {name: (Path(folder) / "c" / name).read_bytes() for name in _FILES}


_RIGHT = _saved()
_TABLE = json.loads(_RIGHT[SCALARS])

SEEDS = {name: bytes([index]) + _RIGHT[name] for index, name in enumerate(_FILES)}
TOKENS = (
    *(
        b'"format"',
        b'"optimizers"',
        b'"groups"',
        b'"params"',
        b'"options"',
        b'"state"',
        b'"tensor"',
        b'"device"',
    ),
    *(b'"list"', b'"tuple"', b'"dict"', b'"exp_avg"', b'"step"', b'"lr"', b'"weight"', b'"bias"', b'"cpu"'),
    *(
        b'"meta"',
        b'"cuda:0"',
        b"null",
        b"1e999",
        b"NaN",
        b"[]",
        b"{}",
        b'"F32"',
        b'"shape"',
        b'"data_offsets"',
    ),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    model, optimizers, run = _opened()

    def judge(content: bytes) -> None:
        if not content:
            return
        name = _FILES[content[0] % len(_FILES)]
        for each, right in _RIGHT.items():
            (directory / each).write_bytes(content[1:] if each == name else right)
        before = looked_at(model, optimizers)
        try:
            run.load(directory)
        except UsageError as refused:
            see_that_it_is_short(refused)
            assert repr(looked_at(model, optimizers)) == repr(before)

    with run:
        yield judge
