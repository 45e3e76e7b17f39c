"""TierConfig and StoreConfig: what they accept, and what the default hierarchy is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tierstore.config import StoreConfig, TierConfig, machine
from tierstore.config.checks import ENGINES
from tierstore.errors import ConfigError
from tierstore.store import Store
from tierstore_backends.files.options import EngineName


class _Instance:
    """Has a backend's members, and that is all that a configuration looks at."""

    capabilities = reserve = read = write = free = resize = close = None


def _tier(name: object = "host", **changes: object) -> TierConfig:
    values: dict[str, Any] = {"name": name, "backend": "memory", "capacity": 100} | changes
    return TierConfig(**values)


# ------------------------------------------------------------------------------ one tier


def test_a_tier_keeps_its_capacity_in_bytes() -> None:
    assert _tier(capacity="1.5GiB").capacity == 3 * 2**29


def test_a_tier_without_watermarks_is_filled_to_the_brim() -> None:
    tier = _tier(capacity=1000)
    assert (tier.high_bytes, tier.low_bytes) == (1000, 1000)


def test_low_is_as_high_unless_given() -> None:
    tier = _tier(capacity=1000, high=0.75)
    assert (tier.high_bytes, tier.low_bytes) == (750, 750)


def test_watermarks_are_shares_of_the_capacity() -> None:
    tier = _tier(capacity=1000, high=0.75, low=0.5)
    assert (tier.high_bytes, tier.low_bytes) == (750, 500)


def test_watermarks_of_the_largest_capacity_are_exact() -> None:
    tier = _tier(capacity=2**63 - 1, high=1.0, low=0.5)
    assert (tier.high_bytes, tier.low_bytes) == (2**63 - 1, 2**62 - 1)


def test_the_int_one_is_a_ratio() -> None:
    tier = _tier(high=1, low=1)
    assert (type(tier.high), type(tier.low)) == (float, float)


def test_a_backend_instance_is_accepted() -> None:
    instance = _Instance()
    assert _tier(backend=instance).backend is instance


def test_options_are_copied() -> None:
    options: dict[str, object] = {"path": "x"}
    tier = _tier(options=options)
    options["path"] = "y"
    assert tier.options == {"path": "x"}


def test_a_tier_is_frozen_and_can_be_hashed() -> None:
    tier = _tier()
    assert len({tier, _tier()}) == 1
    with pytest.raises(AttributeError):
        tier.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "wrong", "accepted"),
    [
        ("name", "", "text that is not empty"),
        ("name", 1, "text that is not empty"),
        ("name", None, "text that is not empty"),
        ("backend", "", "the name of a backend"),
        ("backend", 3, "it has no capabilities, reserve"),
        ("backend", None, "it has no capabilities, reserve"),
        ("backend", _Instance, "it is a class"),
        ("capacity", -1, "negative"),
        ("capacity", True, "a size"),
        ("capacity", 1.5, "a size"),
        ("capacity", "5 parsecs", "1.5GiB"),
        ("capacity", 2**63, "at most 9223372036854775807 bytes"),
        ("high", 0, "greater than 0 and at most 1"),
        ("high", 1.01, "greater than 0 and at most 1"),
        ("high", float("nan"), "greater than 0 and at most 1"),
        ("high", True, "greater than 0 and at most 1"),
        ("high", "0.5", "greater than 0 and at most 1"),
        ("low", -0.1, "greater than 0 and at most 1"),
        ("low", False, "greater than 0 and at most 1"),
        ("options", None, "a mapping"),
        ("options", [("path", "x")], "a mapping"),
        ("options", {1: 2}, "a mapping"),
    ],
)
def test_a_wrong_field_of_a_tier_is_refused_with_its_key_its_value_and_what_is_accepted(
    key: str, wrong: object, accepted: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        _tier(**{key: wrong})
    assert f"{key}={wrong!r}"[:100] in str(refused.value)
    assert accepted in str(refused.value)


def test_low_above_high_is_refused_naming_both() -> None:
    with pytest.raises(ConfigError, match=r"low=0\.9: .* at most high, which is 0\.8"):
        _tier(high=0.8, low=0.9)


def test_every_fault_of_a_tier_is_listed() -> None:
    with pytest.raises(ConfigError) as refused:
        _tier(name="", capacity=-1, high=2)
    assert "3 faults" in str(refused.value)
    assert all(f"\n  {key}=" in str(refused.value) for key in ("name", "capacity", "high"))


# ------------------------------------------------------------------------------ one store


def test_tiers_are_kept_in_the_order_given() -> None:
    tiers = [_tier("a"), _tier("b"), _tier("c")]
    assert StoreConfig(tiers=tiers).tiers == tuple(tiers)


@pytest.mark.parametrize("eviction", ["lru", "size-class", "next-use"])
def test_the_eviction_policies_are_accepted(eviction: str) -> None:
    assert StoreConfig([_tier()], eviction=eviction).eviction == eviction


@pytest.mark.parametrize("wrong", ["LRU", "fifo", "", None, 1])
def test_another_eviction_is_refused_listing_the_policies(wrong: object) -> None:
    with pytest.raises(ConfigError, match="accepted: 'lru', 'size-class', 'next-use'"):
        StoreConfig([_tier()], eviction=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", [[], (), None, "host", [1], [{"name": "host"}]])
def test_a_store_needs_at_least_one_tier(wrong: object) -> None:
    with pytest.raises(ConfigError, match="at least one TierConfig"):
        StoreConfig(wrong)  # type: ignore[arg-type]


def test_two_tiers_of_one_name_are_refused_naming_it() -> None:
    with pytest.raises(ConfigError, match="more than once: host"):
        StoreConfig([_tier("host"), _tier("disk"), _tier("host")])


# ------------------------------------------------------------------------------ the default hierarchy


def test_the_default_on_an_emulated_device_has_three_tiers() -> None:
    config = StoreConfig.default("emulated", "1GB", "2GB", "3GB", "somewhere")
    assert [(tier.name, tier.backend, tier.capacity) for tier in config.tiers] == [
        ("device", "device", 2**30),
        ("host", "pinned", 2 * 2**30),
        ("disk", "files", 3 * 2**30),
    ]
    assert config.eviction == "lru"


def test_the_default_on_a_cpu_has_no_device_tier() -> None:
    config = StoreConfig.default("cpu", offload_cpu_size="1GB", offload_disk_size="1GB")
    assert [tier.name for tier in config.tiers] == ["host", "disk"]


def test_a_codec_is_the_disk_tiers_alone() -> None:
    config = StoreConfig.default("emulated", "1GB", "1GB", "1GB", codec="lz4")
    assert [tier.codec for tier in config.tiers] == [None, None, "lz4"]


@pytest.mark.parametrize(("given", "kept"), [(None, None), ("none", None), ("lz4", "lz4")])
def test_a_tier_has_a_codec_or_none(given: str | None, kept: str | None) -> None:
    assert _tier(codec=given).codec == kept


@pytest.mark.parametrize(
    ("given", "hint"),
    [("lz", "did you mean 'lz4'"), ("LZ4", "did you mean 'lz4'"), ("zstd", "accepted: 'none', 'lz4'")],
)
def test_an_unknown_codec_is_refused_with_those_there_are(given: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=rf"codec='{given}': .*{hint}"):
        _tier(codec=given)


@pytest.mark.parametrize("nothing", [0, "0GB", "0B"])
def test_a_disk_of_no_bytes_is_no_tier(nothing: int | str) -> None:
    config = StoreConfig.default("cpu", offload_cpu_size="1GB", offload_disk_size=nothing)
    assert [tier.name for tier in config.tiers] == ["host"]


def test_the_default_hands_the_backends_their_options() -> None:
    config = StoreConfig.default(
        "emulated", "1GB", "1GB", "1GB", "somewhere",
        device_options={"link_bandwidth": "2GB"}, host_mem_block_size="64MB", enable_pinned_mem=False,
        aio_block_size="2MB", aio_queue_depth=7, enable_aio=False, checksum=False,
    )  # fmt: skip
    assert [tier.options for tier in config.tiers] == [
        {"device": "emulated", "link_bandwidth": "2GB"},
        {"host_mem_block_size": 64 * 2**20, "enable_pinned_mem": False},
        {
            "path": "somewhere",
            "aio_block_size": 2 * 2**20,
            "aio_queue_depth": 7,
            "enable_aio": False,
            "checksum": False,
        },
    ]


@pytest.mark.parametrize("engine", ["threads", "aiofiles", "plain"])
def test_the_engine_that_is_named_moves_the_bytes_of_the_disk(engine: str, tmp_path: Path) -> None:
    config = StoreConfig.default(
        "cpu", None, "8MB", "8MB", tmp_path, aio_engine=engine, host_mem_block_size="1MB"
    )
    with Store(config) as store:
        store.put("k", torch.arange(1000), tier="disk")
        assert torch.equal(store.get("k"), torch.arange(1000))
        assert store.stats().tiers["disk"].io["engine"] == engine


def test_the_engines_that_can_be_named_are_those_of_the_files_backend() -> None:
    assert set(ENGINES) == {engine.value for engine in EngineName} - {"auto"}


def test_without_the_name_of_an_engine_the_disk_is_left_to_choose() -> None:
    disk = StoreConfig.default("cpu", None, "8MB", "8MB").tiers[-1]
    assert "engine" not in disk.options


def test_the_ratios_are_the_high_watermarks() -> None:
    config = StoreConfig.default("emulated", "1GB", "1GB", "1GB", hbm_ratio=0.5, cpu_ratio=0.25)
    assert [tier.high for tier in config.tiers] == [0.5, 0.25, 1.0]


def test_what_is_not_given_is_asked_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "available_host_bytes", lambda: 1234)
    monkeypatch.setattr(machine, "free_disk_bytes", {"somewhere": 5678}.__getitem__)
    config = StoreConfig.default("cpu", offload_path="somewhere")
    assert [tier.capacity for tier in config.tiers] == [1234, 5678]


def test_several_directories_are_one_disk_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "free_disk_bytes", lambda *paths: {("a", "b"): 5678}[paths])
    disk = StoreConfig.default("cpu", offload_cpu_size=1, offload_path=["a", "b"]).tiers[-1]
    assert (disk.capacity, disk.options["path"]) == (5678, ["a", "b"])
    disk = StoreConfig.default("cpu", offload_cpu_size=1, offload_disk_size=1, offload_path=["a"]).tiers[-1]
    assert disk.options["path"] == "a"


def test_a_device_s_free_memory_is_its_default_quota(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "require_accelerator", lambda device: None)
    monkeypatch.setattr(machine, "free_device_bytes", {"cuda:1": 77}.__getitem__)
    config = StoreConfig.default("cuda:1", offload_cpu_size="1GB", offload_disk_size=0)
    assert (config.tiers[0].capacity, config.tiers[0].options) == (77, {"device": "cuda:1"})


def test_the_accelerator_is_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_device", lambda: "cuda")
    monkeypatch.setattr(machine, "require_accelerator", lambda device: None)
    config = StoreConfig.default(None, "1GB", "1GB", 0)
    assert config.tiers[0].options == {"device": "cuda"}


def test_without_an_accelerator_the_cpu_is_the_default_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    config = StoreConfig.default(offload_cpu_size="1GB", offload_disk_size="1GB")
    assert [tier.name for tier in config.tiers] == ["host", "disk"]


@pytest.mark.parametrize("device", ["cpu", None])
def test_device_memory_where_there_is_no_device_is_refused_with_a_hint(
    device: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "default_device", lambda: "cpu")
    with pytest.raises(ConfigError, match=r"max_device_memory=.*'emulated'"):
        StoreConfig.default(device, "1GB", "1GB", "1GB")


def test_an_emulated_device_needs_to_be_told_its_memory() -> None:
    with pytest.raises(ConfigError, match="max_device_memory=None: has to be given"):
        StoreConfig.default("emulated", offload_cpu_size="1GB")


def test_a_device_that_is_not_there_is_refused_saying_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match="device='cuda:2': torch finds 2 x 'cuda'"):
        StoreConfig.default("cuda:2", "1GB", "1GB", 0)
    with pytest.raises(ConfigError, match="device='xpu': torch finds 2 x 'cuda'"):
        StoreConfig.default("xpu", "1GB", "1GB", 0)
    assert StoreConfig.default("cuda:1", "1GB", "1GB", 0).tiers[0].name == "device"


def test_a_device_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    with pytest.raises(ConfigError, match="device='cuda': torch finds no accelerator"):
        StoreConfig.default("cuda", "1GB", "1GB", 0)


@pytest.mark.parametrize("wrong", [1, None, "yes"])
def test_durable_is_true_or_false(wrong: object) -> None:
    with pytest.raises(ConfigError, match=r"durable=.*accepted: true or false"):
        StoreConfig.default("cpu", durable=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("durable", [True, False])
def test_durable_is_an_option_of_the_disk_alone(durable: bool) -> None:
    config = StoreConfig.default("cpu", None, "1GB", "1GB", durable=durable)
    assert [tier.options.get("durable") for tier in config.tiers] == [None, durable or None]


def test_the_free_space_of_a_durable_directory_is_beside_what_it_keeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "offload" / "deep"
    inside.mkdir(parents=True)
    (inside / "kept").write_bytes(bytes(8192))
    (inside / "link").symlink_to(inside / "kept")
    monkeypatch.setattr(machine, "free_disk_bytes", lambda _: 1000)
    kept, scratch = (
        StoreConfig.default("cpu", None, "1GB", None, tmp_path / "offload", durable=durable).tiers[1]
        for durable in (True, False)
    )
    assert (kept.capacity, scratch.capacity) == (1000 + 8192, 1000)
    nothing = StoreConfig.default("cpu", offload_path=tmp_path / "none", durable=True).tiers[1]
    assert nothing.capacity == 1000


def test_an_unknown_key_of_the_default_is_refused_with_the_likely_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'cpu_ratio'"):
        StoreConfig.default("cpu", cpu_ration=0.5)


def test_the_eviction_of_the_default_can_be_chosen() -> None:
    config = StoreConfig.default("cpu", offload_cpu_size="1GB", offload_disk_size=0, eviction="size-class")
    assert config.eviction == "size-class"


# ------------------------------------------------------------------------------ the machine


def test_free_disk_is_asked_of_the_nearest_directory_that_exists(tmp_path: object) -> None:
    assert machine.free_disk_bytes(f"{tmp_path}/not/yet/there") > 0


def test_directories_on_one_disk_have_its_free_space_once(tmp_path: object) -> None:
    alone = machine.free_disk_bytes(f"{tmp_path}/a")
    assert machine.free_disk_bytes(f"{tmp_path}/a", f"{tmp_path}/b") < 1.5 * alone


def test_a_machine_has_some_memory_available() -> None:
    assert machine.available_host_bytes() > 0


def test_a_device_is_asked_for_its_own_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "get_memory_info", {"cuda:1": (5, 9)}.__getitem__)
    assert machine.free_device_bytes("cuda:1") == 5
