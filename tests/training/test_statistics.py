"""Whatever counts in a store or a run is copied, pickled, made a dict of and given to JSON, whole."""

from __future__ import annotations

import copy
import dataclasses
import enum
import importlib
import json
import pickle
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

import tierstore as ts
from tests.training.hot_tables import hot, run_of, some_steps
from tests.training.swap_models import Llama, config, inputs, whole_layers
from tests.training.table_models import HotClicks
from tierstore.stats import plain_values
from tierstore.training import offload, swap
from tierstore.wrappers.bandwidth import BandwidthStats
from tierstore.wrappers.retrying import RetryStats
from tierstore_backends.files import open_backend
from tierstore_backends.memory import MemoryBackend

_ROOT = Path(__file__).parents[2]
_STATS = re.compile(r"^class (\w+Stats)\b", re.MULTILINE)


def _of_a_store(folder: Path) -> Iterator[object]:
    """Two drives, a codec, a limit, retries: all that a tier can count."""
    drives = [str(folder / "a"), str(folder / "b")]
    options = {"max_bandwidth": "8GB/s", "retries": 2}
    settings = ts.StoreConfig.default(
        "emulated", "1MB", "4MB", "64MB", offload_path=drives, codec="lz4", disk_options=options
    )
    with ts.Store(settings) as store:
        store.put("zeros", torch.zeros(1 << 18))
        store.evict("zeros", to="disk").result(60)
        store.get("zeros")
        stats = store.stats()
    assert {"bandwidth", "retries"} == set(stats.tiers["disk"].wrappers)
    assert stats.tiers["disk"].io["drives"]
    yield stats


def _of_files(folder: Path) -> Iterator[object]:
    """What a backend counts before a store makes plain values of it, and what stands around backends."""
    files = open_backend(capacity_bytes=64 << 20, options={"path": [str(folder / "c"), str(folder / "d")]})
    yield files.io_stats
    files.close()
    yield from (RetryStats(1, 2, 3), BandwidthStats(1 << 40, 5, 0.5))


def _of_tables(folder: Path) -> Iterator[object]:
    trial = hot("three", folder)
    some_steps(trial, 2)
    assert isinstance(trial.model, HotClicks)
    yield from (run_of(trial).stats(), trial.model.deep.stats())
    run_of(trial).close()


def _of_activations(folder: Path) -> Iterator[object]:
    model = Llama()
    with swap(model, config(folder / "swap", whole_layers())) as swapped:
        model(inputs()).sum().backward()
        yield swapped.stats()
    model = Llama()
    document = config(folder / "run", whole_layers()) | {"recompute_config": {"recompute": [2]}}
    document["swap_config"] = {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [3]}]}
    with offload(model, torch.optim.SGD(model.parameters(), lr=0.1), document) as run:
        model(inputs()).sum().backward()
        stats = run.stats()
    assert stats.activations is not None
    assert stats.recompute is not None
    yield stats


@pytest.fixture(scope="module")
def counted(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Return statistics of all kinds, each of something that counted."""
    found: list[object] = []
    for kind in (_of_a_store, _of_files, _of_tables, _of_activations):
        for stats in kind(tmp_path_factory.mktemp("counted")):
            found += _within(stats)
    return found


def _within(value: object) -> Iterator[object]:
    """Yield all dataclasses in a value, itself included."""
    if dataclasses.is_dataclass(value):
        yield value
        for each in dataclasses.fields(value):
            yield from _within(getattr(value, each.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _within(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from _within(inner)


def _kinds() -> set[type]:
    """Return every class of statistics that the sources have."""
    found = set()
    for root in (_ROOT / "tierstore", _ROOT / "backends" / "tierstore_backends"):
        for path in root.rglob("*.py"):
            for name in _STATS.findall(path.read_text(encoding="utf-8")):
                parts = path.relative_to(root.parent).with_suffix("").parts
                found.add(getattr(importlib.import_module(".".join(parts)), name))
    return found


def test_there_is_one_of_every_kind(counted: list[object]) -> None:
    of_each = {type(each) for each in counted if type(each).__name__.endswith("Stats")}
    assert of_each == _kinds()
    assert len(of_each) > 10


def test_all_are_frozen(counted: list[object]) -> None:
    changeable = [kind for kind in map(type, counted) if not kind.__dataclass_params__.frozen]  # type: ignore[attr-defined]
    assert changeable == []


def test_copies_are_equal_and_independent(counted: list[object]) -> None:
    for stats in counted:
        copied, pickled = copy.deepcopy(stats), pickle.loads(pickle.dumps(stats))
        assert copied == pickled == stats
        assert copied is not stats


def test_asdict_takes_all(counted: list[object]) -> None:
    for stats in counted:
        told = dataclasses.asdict(stats)  # type: ignore[call-overload]
        assert list(told) == [each.name for each in dataclasses.fields(stats)]  # type: ignore[arg-type]


def test_json_takes_all_as_plain_values_and_loses_nothing(counted: list[object]) -> None:
    for stats in counted:
        told: Any = stats.as_dict() if hasattr(stats, "as_dict") else dataclasses.asdict(stats)  # type: ignore[call-overload]
        text = json.dumps(told, allow_nan=False)
        assert json.loads(text) == json.loads(json.dumps(plain_values(stats)))
        assert _leaves(json.loads(text)) == _leaves(_untupled(stats))


def _leaves(value: Any) -> list[object]:  # noqa: ANN401 - plain values
    if isinstance(value, Mapping):
        return [leaf for inner in value.values() for leaf in _leaves(inner)]
    if isinstance(value, list | tuple):
        return [leaf for inner in value for leaf in _leaves(inner)]
    return [value]


def _untupled(value: object) -> object:
    """Return the fields of dataclasses as dicts, without the code that is judged."""
    if dataclasses.is_dataclass(value):
        return {each.name: _untupled(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _untupled(inner) for key, inner in value.items()}
    return [_untupled(inner) for inner in value] if isinstance(value, tuple | list) else value


# ------------------------------------------------------------------------------ whatever backends count with


class _Way(enum.Enum):
    UP = "up"


@dataclasses.dataclass(frozen=True)
class _Odd:
    """What somebody's backend may count with."""

    by_way: Mapping[object, object]
    numbers: tuple[object, ...]


def test_plain_values_are_made_of_whatever_mappings_and_numbers_there_are() -> None:
    odd = _Odd(
        MappingProxyType({_Way.UP: np.int64(3), ("host", "disk"): MappingProxyType({1: np.float32(0.5)})}),
        (True, None, Path("x"), _Way.UP, frozenset([7])),
    )
    told = plain_values(odd)
    assert told == {
        "by_way": {"up": 3, "host->disk": {"1": 0.5}},
        "numbers": (True, None, "x", "up", (7,)),
    }
    assert type(told["by_way"]["up"]) is int
    json.dumps(told)
    assert copy.deepcopy(told) == pickle.loads(pickle.dumps(told)) == told


class _OddBackend(MemoryBackend):
    """Counts with mappings that neither ``copy`` nor ``pickle`` takes."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self.capabilities = dataclasses.replace(self.capabilities, has_io_stats=True)

    @property
    def io_stats(self) -> object:
        """What it counts."""
        return _Odd(MappingProxyType({"calls": np.int64(3)}), (MappingProxyType({"a": 1}),))


def test_a_backend_may_count_with_whatever_mappings_it_has() -> None:
    with ts.Store(ts.StoreConfig([ts.TierConfig("only", _OddBackend(1 << 20), 1 << 20)])) as store:
        stats = store.stats()
    assert stats.tiers["only"].io == {"by_way": {"calls": 3}, "numbers": ({"a": 1},)}
    assert copy.deepcopy(stats) == pickle.loads(pickle.dumps(stats)) == stats
    json.dumps(stats.as_dict())
