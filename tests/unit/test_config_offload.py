"""OffloadConfig: every key, alone and together, from a mapping and back."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierstore.config import OffloadConfig, StoreConfig, machine
from tierstore.errors import ConfigError

_DEFAULTS: dict[str, object] = {
    "memory_offload": "ON",
    "max_device_memory": None,
    "offload_param": None,
    "offload_checkpoint": None,
    "offload_grad": None,
    "offload_optimizer": None,
    "auto_offload": True,
    "foresee": True,
    "live_view": True,
    "offload_cpu_size": None,
    "offload_disk_size": None,
    "offload_path": "./offload/",
    "host_mem_block_size": 2**30,
    "aio_block_size": 2**20,
    "aio_queue_depth": 1024,
    "enable_aio": True,
    "aio_engine": None,
    "enable_pinned_mem": True,
    "hbm_ratio": 1.0,
    "cpu_ratio": 1.0,
    "device": None,
    "device_options": {},
    "disk_options": {},
    "eviction": "next-use",
    "checksum": True,
    "optimizer_target": "device",
    "optimizer_in_backward": False,
    "codec": None,
    "durable": False,
    "ignored": [],
    "pinned": [],
    "buffer_min_size": 2**20,
    "placement": None,
}

_Pairs = list[tuple[object, object]]  # what is given, and what is kept

_SIZE: _Pairs = [("1GB", 2**30), ("0.5GB", 2**29), (7, 7)]
_NOT_A_SIZE: list[object] = [-1, "1", "", "GB", True, 1.5, [], "-1GB", 2**63, b"1GB"]
_TARGET: _Pairs = [("cpu", "cpu"), ("CPU", "cpu"), ("Disk", "disk"), (None, None)]
_NOT_A_TARGET: list[object] = ["gpu", "", "device", 1, True, ["cpu"]]
_FLAG: _Pairs = [(True, True), (False, False)]
_NOT_A_FLAG: list[object] = [0, 1, "true", "ON", None, 1.0]
_RATIO: _Pairs = [(0.5, 0.5), (1, 1.0), (1.0, 1.0), (1e-9, 1e-9)]
_NOT_A_RATIO: list[object] = [0, 0.0, -0.5, 1.0001, 2, True, "0.5", None, float("nan"), float("inf"), 1j]

_ACCEPTED: dict[str, _Pairs] = {
    "memory_offload": [("ON", "ON"), ("OFF", "OFF")],
    "max_device_memory": [*_SIZE, (None, None)],
    **dict.fromkeys(["offload_param", "offload_checkpoint", "offload_grad", "offload_optimizer"], _TARGET),
    **dict.fromkeys(
        ["auto_offload", "foresee", "live_view", "enable_aio", "enable_pinned_mem", "checksum", "durable"],
        _FLAG,
    ),
    "optimizer_in_backward": _FLAG,
    "offload_cpu_size": [*_SIZE, (None, None)],
    "offload_disk_size": [*_SIZE, (None, None), ("0GB", 0)],
    "offload_path": [("a/b", "a/b"), (Path("a/b"), "a/b"), (["a", Path("b")], ["a", "b"]), (("a",), ["a"])],
    **dict.fromkeys(["host_mem_block_size", "aio_block_size"], _SIZE),
    "aio_queue_depth": [(1, 1), (4096, 4096)],
    "aio_engine": [(each, each) for each in ("threads", "io_uring", "aiofiles", "plain", None)],
    **dict.fromkeys(["hbm_ratio", "cpu_ratio"], _RATIO),
    "device": [
        ("cuda", "cuda"),
        ("cuda:1", "cuda:1"),
        ("emulated", "emulated"),
        ("cpu", "cpu"),
        (None, None),
        (torch.device("cuda", 1), "cuda:1"),
    ],
    "device_options": [({}, {}), ({"late_events": True}, {"late_events": True})],
    "disk_options": [({}, {}), ({"retries": 3}, {"retries": 3})],
    "eviction": [(each, each) for each in ("lru", "size-class", "next-use")],
    "optimizer_target": [("device", "device"), ("cpu", "cpu")],
    "codec": [("lz4", "lz4"), ("none", None), (None, None)],
    **{key: [([], []), (["a", r"b\.c"], ["a", r"b\.c"]), (("a",), ["a"])] for key in ["ignored", "pinned"]},
    "buffer_min_size": [*_SIZE, (None, None), (0, 0)],
    "placement": [(None, None), ({}, {}), ({"stashing": "always"}, {"stashing": "always"})],
}

_REFUSED: dict[str, list[object]] = {
    "memory_offload": ["on", "off", "", True, False, None, 1],
    "max_device_memory": [*_NOT_A_SIZE, 0, "0GB"],
    **dict.fromkeys(
        ["offload_param", "offload_checkpoint", "offload_grad", "offload_optimizer"], _NOT_A_TARGET
    ),
    **dict.fromkeys(
        ["auto_offload", "foresee", "live_view", "enable_aio", "enable_pinned_mem", "checksum", "durable"],
        _NOT_A_FLAG,
    ),
    "optimizer_in_backward": _NOT_A_FLAG,
    "offload_cpu_size": [*_NOT_A_SIZE, 0, "0GB"],
    "offload_disk_size": _NOT_A_SIZE,
    "offload_path": ["", 1, None, True, b"x", "a\0b", [], ["a", ""], ["a", 1], ["a", "./a"], ["a", "a/b"]],
    "host_mem_block_size": [*_NOT_A_SIZE, 0, None],
    "aio_block_size": [*_NOT_A_SIZE, 0, None],
    "aio_queue_depth": [0, -1, True, 1.0, "8", None],
    "aio_engine": ["", "Threads", "auto", "uring", "none", True, ["plain"]],
    **dict.fromkeys(["hbm_ratio", "cpu_ratio"], _NOT_A_RATIO),
    "device": ["", "CUDA", "cuda:", "cuda:x", "cuda 1", 0, True],
    "device_options": [None, [], "x", {1: 2}, {"device": "cuda"}],
    "disk_options": [
        None,
        [],
        "x",
        {1: 2},
        {"path": "a"},
        {"durable": True, "retries": 1},
        {"engine": "plain"},
    ],
    "eviction": ["LRU", "fifo", None, 1, ""],
    "optimizer_target": ["Device", "gpu", "disk", None, 1],
    "codec": ["", "LZ4", "zstd", "None", True, 1],
    **{key: ["a", None, [""], [1], {"a": 1}, True] for key in ["ignored", "pinned"]},
    "buffer_min_size": _NOT_A_SIZE,
    "placement": ["a.yaml", [], 1, True, {1: 2}],
}


def test_the_tables_of_this_test_cover_every_key() -> None:
    keys = [field.name for field in dataclasses.fields(OffloadConfig)]
    assert keys == list(_DEFAULTS)
    assert set(keys) == _ACCEPTED.keys() == _REFUSED.keys()


def test_the_defaults_are_those_of_the_reference() -> None:
    assert OffloadConfig().to_mapping() == _DEFAULTS


@pytest.mark.parametrize(
    ("key", "given", "kept"), [(key, *pair) for key, pairs in _ACCEPTED.items() for pair in pairs]
)
def test_a_right_value_is_kept_checked(key: str, given: object, kept: object) -> None:
    config = OffloadConfig.from_mapping({key: given})
    assert config.to_mapping() == _DEFAULTS | {key: kept}


@pytest.mark.parametrize(
    ("key", "wrong"), [(key, value) for key, values in _REFUSED.items() for value in values]
)
def test_a_wrong_value_is_refused_with_its_key_the_value_and_what_is_accepted(
    key: str, wrong: object
) -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_mapping({key: wrong})
    assert f"{key}={wrong!r}: " in str(refused.value)
    assert "ccepted: " in str(refused.value)


@pytest.mark.parametrize("key", _REFUSED)
def test_the_constructor_refuses_what_a_mapping_may_not_say(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        OffloadConfig(**{key: _REFUSED[key][0]})  # type: ignore[arg-type]


def test_every_fault_is_listed_in_one_message() -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_mapping({"hbm_ratio": 2, "checksum": "no", "ofload_path": "x", "zzz": 1})
    text = str(refused.value)
    assert "4 faults" in text
    assert all(f"\n  {key}=" in text for key in ("hbm_ratio", "checksum", "ofload_path", "zzz"))


def test_a_near_miss_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"ofload_path='x': unknown key; did you mean 'offload_path'\?"):
        OffloadConfig.from_mapping({"ofload_path": "x"})


def test_a_key_near_to_nothing_is_answered_with_the_known_keys() -> None:
    with pytest.raises(ConfigError, match=r"zzz=1: unknown key; accepted: memory_offload, .*durable"):
        OffloadConfig.from_mapping({"zzz": 1})


def test_a_long_value_is_quoted_only_at_its_beginning() -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_mapping({"offload_param": "x" * 10_000})
    assert len(str(refused.value)) < 500


@pytest.mark.parametrize("wrong", [None, "x", [("checksum", True)], 1])
def test_what_is_not_a_mapping_is_refused(wrong: object) -> None:
    with pytest.raises(ConfigError, match="a mapping of keys to values"):
        OffloadConfig.from_mapping(wrong)  # type: ignore[arg-type]


def test_a_configuration_is_frozen_and_can_be_hashed() -> None:
    config = OffloadConfig(device_options={"late_events": True})
    assert len({config, OffloadConfig(device_options={"late_events": True})}) == 1
    with pytest.raises(AttributeError):
        config.checksum = False  # type: ignore[misc]


def test_a_changed_copy_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="hbm_ratio"):
        dataclasses.replace(OffloadConfig(), hbm_ratio=3)


@pytest.mark.parametrize("key", ["max_device_memory", "device_options"])
def test_a_cpu_takes_nothing_that_is_said_of_a_device(key: str) -> None:
    value = {"max_device_memory": 5, "device_options": {"late_events": True}}[key]
    with pytest.raises(ConfigError, match=rf"{key}=.*set device to 'emulated'"):
        OffloadConfig.from_mapping({"device": "cpu", key: value})


def test_nothing_is_durable_without_a_disk() -> None:
    with pytest.raises(ConfigError, match=r"durable=True: needs a disk, and offload_disk_size=0"):
        OffloadConfig.from_mapping({"durable": True, "offload_disk_size": "0GB"})


def test_on_is_on_and_off_is_not() -> None:
    assert OffloadConfig(memory_offload="ON").is_on
    assert not OffloadConfig(memory_offload="OFF").is_on


def test_device_memory_is_known_in_bytes_or_left_to_the_device() -> None:
    assert OffloadConfig(max_device_memory="1GB").max_device_bytes == 2**30
    assert OffloadConfig().max_device_bytes is None


def test_the_reference_s_own_example_is_accepted() -> None:
    config = OffloadConfig.from_mapping(
        {
            "offload_param": "cpu",
            "auto_offload": False,
            "offload_cpu_size": "512GB",
            "offload_disk_size": "1024GB",
            "offload_path": "./offload/",
            "host_mem_block_size": "1GB",
            "enable_aio": True,
            "enable_pinned_mem": True,
        }
    )
    assert config.offload_cpu_size == 512 * 2**30


def test_a_store_configuration_has_the_same_eviction() -> None:
    config = OffloadConfig(device="cpu", offload_cpu_size="1GB", offload_disk_size=0)
    assert config.store_config().eviction == "next-use"


def test_a_store_configuration_is_the_default_one_of_the_same_keys() -> None:
    quotas: dict[str, Any] = {
        "max_device_memory": "1GB",
        "offload_cpu_size": "2GB",
        "offload_disk_size": "3GB",
    }
    config = OffloadConfig(device="emulated", eviction="lru", **quotas)
    assert config.store_config() == StoreConfig.default("emulated", **quotas)


def test_a_quota_that_the_machine_cannot_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    with pytest.raises(ConfigError, match=r"max_device_memory=5: .*'emulated'"):
        OffloadConfig(max_device_memory=5).store_config()


@st.composite
def _right_mappings(draw: st.DrawFn) -> dict[str, object]:
    keys = draw(st.sets(st.sampled_from(sorted(_ACCEPTED.keys() - {"device"}))))
    mapping: dict[str, object] = {key: draw(st.sampled_from(_ACCEPTED[key]))[0] for key in sorted(keys)}
    if mapping.get("offload_disk_size") == "0GB":
        mapping.pop("durable", None)  # see `test_nothing_is_durable_without_a_disk`
    if mapping.get("enable_aio") is False:
        mapping.pop("aio_engine", None)  # see `test_an_engine_in_the_background_needs_enable_aio`
    return mapping


@given(_right_mappings())
def test_a_mapping_read_back_is_the_same_configuration(mapping: dict[str, object]) -> None:
    config = OffloadConfig.from_mapping(mapping)
    assert OffloadConfig.from_mapping(config.to_mapping()) == config


@given(_right_mappings(), st.data())
def test_any_wrong_keys_among_right_ones_are_all_named(
    mapping: dict[str, object], data: st.DataObject
) -> None:
    wrong = data.draw(st.sets(st.sampled_from(sorted(_REFUSED)), min_size=1))
    bad = {key: data.draw(st.sampled_from(_REFUSED[key])) for key in sorted(wrong)}
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_mapping(mapping | bad)
    lines = str(refused.value).splitlines()[1:]
    assert {line.split("=")[0].strip() for line in lines} == wrong


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(_ACCEPTED)) | st.text() | st.integers(), _ANYTHING))
def test_any_mapping_makes_a_configuration_or_a_config_error(mapping: dict[str, object]) -> None:
    with contextlib.suppress(ConfigError):
        config = OffloadConfig.from_mapping(mapping)
        assert OffloadConfig.from_mapping(config.to_mapping()) == config


@pytest.mark.parametrize("engine", ["threads", "io_uring", "aiofiles"])
def test_an_engine_in_the_background_needs_enable_aio(engine: str) -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadConfig(aio_engine=engine, enable_aio=False, hbm_ratio=2)
    text = str(refused.value)
    assert "2 faults" in text
    assert f"aio_engine={engine!r}: moves bytes in the background, and enable_aio=False forbids" in text


@pytest.mark.parametrize("engine", ["plain", None])
def test_an_engine_in_the_calling_thread_needs_no_aio(engine: str | None) -> None:
    assert OffloadConfig(aio_engine=engine, enable_aio=False).aio_engine == engine


def test_an_engine_of_nearly_that_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match=r"aio_engine='io-uring': did you mean 'io_uring'\? accepted: 'thr"):
        OffloadConfig(aio_engine="io-uring")
