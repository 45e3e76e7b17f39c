"""What a tier's options say to wrappers: read by name, refused before anything opens, seen in the stats."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

import tierstore as ts
from tests.stores import numbered
from tierstore.spi import Medium
from tierstore.wrappers.bandwidth import BandwidthLimited
from tierstore.wrappers.configured import KINDS
from tierstore.wrappers.retrying import Retrying
from tierstore_backends.memory import MemoryBackend

NAMES = [name for kind in KINDS for name in kind.options]

GOOD: Mapping[str, tuple[object, ...]] = {
    "max_bandwidth": (10**5, 10**12, "2GB/s", "500MB", " 100KiB/s ", None),
    "max_read_bandwidth": ("2GB/s", None),
    "max_write_bandwidth": ("2GB/s", None),
    "retries": (0, 1, 100, None),
    "retry_wait_s": (0.001, 1, 10.0, None),
}
BAD: Mapping[str, tuple[object, ...]] = {
    "max_bandwidth": (0, -1, True, "", "fast", "2GB/h", "0GB/s", 1.5, [1]),
    "max_read_bandwidth": (0, "fast"),
    "max_write_bandwidth": (0, "fast"),
    "retries": (-1, 101, True, "3", 1.5, float("nan")),
    "retry_wait_s": (0, -1, 11, True, "1s", float("nan"), float("inf")),
}


class Noted(MemoryBackend):
    """A disk that says whether it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


def store(options: Mapping[str, object], backend: object = None, codec: str | None = None) -> ts.Store:
    disk = backend or MemoryBackend(10_000, is_storage=True)
    tiers = [
        ts.TierConfig("host", MemoryBackend(10_000), 10_000),
        ts.TierConfig("disk", disk, 10_000, options=options, codec=codec),
    ]
    return ts.Store(ts.StoreConfig(tiers))


def test_the_grids_here_know_all_options() -> None:
    assert set(GOOD) == set(BAD) == set(NAMES)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in GOOD.items() for v in values], ids=str)
def test_a_good_value_is_taken(name: str, value: object) -> None:
    needed = {"retries": 1} if name == "retry_wait_s" else {}
    with store({**needed, name: value}) as opened:
        opened.put("k", numbered(1), tier="disk")
        assert opened.get("k").equal(numbered(1))
        kinds = {kind.name for kind in KINDS if name in kind.options} if value else set()
        assert set(opened.stats().tiers["disk"].wrappers) == kinds | ({"retries"} if needed else set())


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values], ids=str)
def test_a_bad_value_is_refused_by_name_before_anything_is_opened(
    name: str, value: object, tmp_path: Path
) -> None:
    path = tmp_path / "files"
    tiers = [
        ts.TierConfig("first", "files", "1MB", options={"path": path}),
        ts.TierConfig("disk", MemoryBackend(10, is_storage=True), 10, options={name: value}),
    ]
    with pytest.raises(ts.ConfigError, match=rf"TierConfig 'disk'(?s:.)*{name}=(?s:.)*accepted") as caught:
        ts.Store(ts.StoreConfig(tiers))
    assert caught.value.__traceback__ is not None
    assert not path.exists()


def test_every_fault_is_told_at_once() -> None:
    with pytest.raises(ts.ConfigError) as caught:
        store({"retries": -1, "max_bandwidth": "fast", "max_read_bandwidth": 0})
    assert [name in str(caught.value) for name in ("retries", "max_bandwidth", "max_read_bandwidth")] == [
        True
    ] * 3


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"max_bandwidth": "1GB/s", "max_read_bandwidth": "1GB/s"}, "max_bandwidth"),
        ({"max_bandwidth": "1GB/s", "max_write_bandwidth": "1GB/s"}, "max_bandwidth"),
        ({"retry_wait_s": 1}, "retry_wait_s"),
        ({"retry_wait_s": 1, "retries": 0}, "retry_wait_s"),
    ],
)
def test_values_that_contradict_each_other_are_refused_by_name(
    options: Mapping[str, object], name: str
) -> None:
    with pytest.raises(ts.ConfigError, match=f"{name}="):
        store(options)


@pytest.mark.parametrize("options", [{"retries": 1}, {"max_bandwidth": "1GB/s"}], ids=str)
def test_a_tier_of_memory_is_refused_and_closed(options: Mapping[str, object]) -> None:
    host = Noted(10)
    assert host.capabilities.medium is Medium.HOST
    with pytest.raises(ts.ConfigError, match=r"TierConfig 'disk': .*used where they lie"):
        store(options, host)
    assert host.closed == 1


def test_other_options_are_the_backend_s_which_judges_them() -> None:
    tiers = [ts.TierConfig("disk", "memory", 10, options={"storage": True, "retries": 1, "retry": 1})]
    with pytest.raises(ts.ConfigError, match=r"no option 'retry'"):
        ts.Store(ts.StoreConfig(tiers))


def test_each_try_keeps_to_the_limit_and_a_codec_packs_before_both() -> None:
    options = {"retries": 3, "max_bandwidth": "2GB/s"}
    with store(options, codec="lz4") as opened:
        (codec,) = (b for b in opened._engine.backends if b.capabilities.medium is Medium.STORAGE)
        retrying = codec.within  # type: ignore[attr-defined]
        assert isinstance(retrying, Retrying)
        assert isinstance(retrying.within, BandwidthLimited)
        opened.put("k", torch.zeros(5_000, dtype=torch.uint8), tier="disk")
        stats = opened.stats().tiers["disk"]
        assert stats.codec is not None
        assert stats.codec.packed_tensors == 1
        assert stats.wrappers["retries"] == {"retries": 0, "recovered": 0, "given_up": 0}
        assert stats.wrappers["bandwidth"]["limit_bytes_per_s"] == 2 << 30


YAML = """
offload_config:
  offload_cpu_size: 1MB
  offload_disk_size: 1MB
  offload_path: {path}
  host_mem_block_size: 64KB
  disk_options:
    max_write_bandwidth: {rate}
    retries: 5
    retry_wait_s: 0.5
"""


@pytest.fixture
def write_yaml(tmp_path: Path) -> Callable[[str], Path]:
    """Write a configuration with a bandwidth."""

    def write(rate: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(YAML.format(path=tmp_path / "files", rate=rate))
        return path

    return write


def test_a_yaml_file_says_it_for_the_disk(write_yaml: Callable[[str], Path]) -> None:
    config = ts.OffloadConfig.from_yaml(write_yaml("800MB/s"))
    assert ts.OffloadConfig.from_mapping(config.to_mapping()) == config
    with ts.Store(dataclasses.replace(config, device="cpu").store_config()) as opened:
        opened.put("k", numbered(1), tier="disk")
        assert opened.get("k").equal(numbered(1))
        wrappers = opened.stats().tiers["disk"].wrappers
        assert wrappers["bandwidth"]["limit_bytes_per_s"] == 800 << 20
        assert set(wrappers) == {"bandwidth", "retries"}
        assert json.loads(json.dumps(opened.stats().as_dict()))["tiers"]["disk"]["wrappers"] == wrappers


def test_a_bad_value_in_a_yaml_file_is_refused_by_name_and_makes_no_files(
    write_yaml: Callable[[str], Path], tmp_path: Path
) -> None:
    config = dataclasses.replace(ts.OffloadConfig.from_yaml(write_yaml("quick")), device="cpu")
    with pytest.raises(ts.ConfigError, match="max_write_bandwidth='quick'"):
        ts.Store(config.store_config())
    assert not (tmp_path / "files").exists()
