"""A tier with a codec in a store: its quota is of what is really held."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.codec_bytes import MIB, Watched, as_bytes, random, repeating
from tierstore.codec import Compressed
from tierstore.config import StoreConfig, TierConfig
from tierstore.errors import BackendError, ConfigError
from tierstore.spi import Backend
from tierstore.store import Store
from tierstore.testing.batching import Batching
from tierstore.testing.faults import Faulty
from tierstore_backends.memory import MemoryBackend

QUOTA = 10 * MIB


def store_over(disk: Backend | str, *, host: int = 4 * MIB, **options: object) -> Store:
    return Store(
        StoreConfig(
            [
                TierConfig("host", MemoryBackend(host), host),
                TierConfig("disk", disk, QUOTA, codec="lz4", options=options),
            ]
        )
    )


def compressible(number: int, nbytes: int = MIB) -> torch.Tensor:
    return repeating(nbytes, number * 1000).view(torch.int32)


def test_a_quota_holds_more_than_its_bytes_and_never_more_than_its_bytes() -> None:
    inner = Watched(QUOTA)
    with store_over(inner) as store:
        for number in range(30):
            store.put(f"k{number}", compressible(number))
            store.check()
            charged = store.stats().tiers["disk"].charged_bytes
            assert charged <= QUOTA
        store.evict(*store.keys()).result()
        disk = store.stats().tiers["disk"]
        assert disk.charged_bytes == disk.ready_bytes == inner.held_bytes < MIB
        assert inner.peak_bytes <= QUOTA
        for number in range(30):
            assert torch.equal(store.get(f"k{number}"), compressible(number))
        store.check()


def test_what_does_not_compress_fills_the_quota_as_ever() -> None:
    inner = Watched(QUOTA)
    with store_over(inner) as store:
        for number in range(8):
            store.put(f"k{number}", random(MIB, number), tier="disk")
        assert store.stats().tiers["disk"].charged_bytes == inner.held_bytes == 8 * MIB


def test_the_stats_say_what_the_codec_did() -> None:
    with store_over(Watched(QUOTA)) as store:
        store.put("packed", compressible(1), tier="disk")
        store.put("not", random(MIB), tier="disk")
        stats = store.stats()
        assert stats.tiers["host"].codec is None
        codec = stats.tiers["disk"].codec
        assert codec is not None
        assert (codec.packed_tensors, codec.skipped_tensors, codec.raw_bytes) == (1, 1, MIB)
        assert codec.held_bytes == stats.tiers["disk"].charged_bytes - MIB


def test_a_put_straight_into_the_tier_is_charged_what_it_takes() -> None:
    inner = Watched(QUOTA)
    with store_over(inner) as store:
        for number in range(30):
            store.put(f"k{number}", compressible(number), tier="disk")
        assert store.stats().tiers["disk"].charged_bytes == inner.held_bytes < MIB
        store.check()


def test_small_tensors_that_travel_together_are_charged_what_they_take() -> None:
    inner = Watched(QUOTA)
    batching = Batching(inner)
    with store_over(batching) as store:
        for number in range(40):
            store.put(f"k{number}", compressible(number, 16 * 1024))
        store.evict(*store.keys()).result()
        assert max(batching.batches) > 1
        assert store.stats().tiers["disk"].charged_bytes == inner.held_bytes < 40 * 2 * 1024
        store.fetch(*store.keys(), tier="host").result()
        for number in range(40):
            assert torch.equal(store.get(f"k{number}"), compressible(number, 16 * 1024))
        store.check()


def test_dropping_and_replacing_give_back_what_was_taken() -> None:
    inner = Watched(QUOTA)
    with store_over(inner) as store:
        store.put("k", compressible(1), tier="disk")
        store.put("k", compressible(2), tier="disk", replace=True)
        store.put("other", random(MIB), tier="disk")
        assert torch.equal(store.get("k"), compressible(2))
        store.drop("k", "other")
        store.check()
        assert store.stats().tiers["disk"].charged_bytes == 0
        assert inner.slots == []


def test_a_smaller_quota_is_one_of_what_is_held() -> None:
    inner = Watched(QUOTA)
    with store_over(inner) as store:
        for number in range(20):
            store.put(f"k{number}", compressible(number), tier="disk")
        store.resize("disk", MIB)
        assert store.stats().tiers["disk"].capacity_bytes == MIB
        assert torch.equal(store.get("k7"), compressible(7))


def test_a_write_that_fails_leaves_the_key_above_and_the_quota_free() -> None:
    memory = Watched(QUOTA)
    faulty = Faulty(memory, on=["write"], fail_at=1)
    with store_over(faulty) as store:
        store.put("k", compressible(1))
        with pytest.raises(BackendError):
            store.evict("k").result()
        assert store.where("k") == ("host",)
        store.evict("k").result()
        assert torch.equal(store.get("k"), compressible(1))
        assert store.stats().tiers["disk"].charged_bytes == memory.held_bytes
        store.check()


def test_files_take_less_of_the_disk(tmp_path: Path) -> None:
    with store_over("files", path=str(tmp_path)) as store:
        for number in range(30):
            store.put(f"k{number}", compressible(number))
        store.evict(*store.keys()).result()
        charged = store.stats().tiers["disk"].charged_bytes
        assert charged % 4096 == 0 or charged % 512 == 0
        assert charged < 2 * MIB
        files = store._engine.backends[1]
        assert isinstance(files, Compressed)
        assert files.io_stats.written_bytes < 4 * MIB  # type: ignore[attr-defined]
        for number in range(30):
            assert torch.equal(store.get(f"k{number}"), compressible(number))


def test_a_training_states_bytes_come_back(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(300_000, generator=generator).bfloat16()
    moments = torch.zeros(500_000)
    moments[:1000] = torch.randn(1000, generator=generator)
    with store_over("files", path=str(tmp_path)) as store:
        for name, value in (("weights", weights), ("moments", moments)):
            store.put(name, value)
        store.evict("weights", "moments").result()
        for name, value in (("weights", weights), ("moments", moments)):
            assert torch.equal(as_bytes(store.get(name)), as_bytes(value))
        disk = store.stats().tiers["disk"]
        assert disk.charged_bytes < 0.9 * as_bytes(weights).numel() + 40_000


def test_a_codec_in_a_tier_of_memory_is_refused_and_everything_is_closed() -> None:
    closed: list[str] = []

    class Closing(MemoryBackend):
        def close(self) -> None:
            closed.append("closed")
            super().close()

    with pytest.raises(ConfigError, match=r"TierConfig 'host': codec='lz4'"):
        Store(StoreConfig([TierConfig("host", Closing(MIB), MIB, codec="lz4")]))
    assert closed == ["closed"]


@pytest.mark.parametrize("then", ["lz4", None])
@pytest.mark.parametrize("first", ["lz4", None])
def test_a_durable_store_is_found_again_whatever_the_codec(
    tmp_path: Path, first: str | None, then: str | None
) -> None:
    def opened(codec: str | None) -> Store:
        options = {"path": str(tmp_path), "durable": True}
        return Store(
            StoreConfig(
                [
                    TierConfig("host", MemoryBackend(8 * MIB), 8 * MIB),
                    TierConfig("disk", "files", QUOTA, options=options, codec=codec),
                ]
            )
        )

    values = {"packed": compressible(1, 5 * MIB), "plain": random(MIB), "small": repeating(100)}
    with opened(first) as store:
        for key, value in values.items():
            store.put(key, value)
        store.flush()
        held = store.stats().tiers["disk"].charged_bytes
    with opened(then) as store:
        assert set(store.keys()) == set(values)
        assert store.stats().tiers["disk"].charged_bytes == held
        for key, value in values.items():
            assert torch.equal(store.get(key), value)
        store.put("packed", compressible(2), replace=True)
        store.check()
    with opened(first) as store:
        assert torch.equal(store.get("packed"), compressible(2))
        assert torch.equal(store.get("plain"), values["plain"])
