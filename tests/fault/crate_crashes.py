"""Kill a process that keeps small tensors in crates of a durable store, again and again.

``python -m tests.fault.crate_crashes --trials 500 DIRECTORY``: as `tests.fault.crashes`, whose journal is the
oracle here, too.  Other keys are put and flushed beside the crates, and some flushes are the whole store's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from tests.fault.crashes import Image, Journal, main, open_store, read_journal
from tierstore.crates import Crates

_KEYS = 60


def small_bytes(version: int) -> torch.Tensor:
    """Return the bytes of a version: their number and their values follow from it."""
    rng = np.random.default_rng(version)
    nbytes = int(rng.choice([0, 1, 100, 1000, 4096, 9000]))
    return torch.from_numpy(rng.integers(0, 256 if version % 2 else 3, nbytes, dtype=np.uint8))


class CrateWorker:
    """One life: opens, checks, and changes things until it is killed.

    Args:
        directory: with the store and the journal.
        seed: of everything that is random here.
    """

    def __init__(self, directory: Path, seed: int) -> None:
        self._random = random.Random(seed)
        self._possible, _ = read_journal(directory / "journal")
        self._journal = Journal(directory / "journal")
        self._version = seed * 1_000_000
        self._store = open_store(directory, "lz4" if seed % 3 == 0 else None)
        self._crates = Crates(self._store, crate_bytes="32KiB")
        self._there: Image = {}

    def check(self) -> None:
        """Compare what is found with what the journal says: one of the images, whole, and nothing else."""
        keys = set(self._crates)
        for image in reversed([image for image in self._possible if set(image) == keys]):
            if all(
                torch.equal(self._crates.get(key), small_bytes(version)) for key, version in image.items()
            ):
                self._there = dict(image)
                self._journal.say("found", image)
                return
        wanted = [sorted(image.items()) for image in self._possible]
        raise AssertionError(f"found {sorted(keys)}, which is none of {wanted}")

    def live(self) -> None:
        """Do things at random, for ever."""
        deeds = [self._put, self._put_one, self._replace, self._write, self._evict] * 3
        deeds += [self._drop, self._flush, self._flush, self._flush_others, self._get]
        while True:
            self._random.choice(deeds)()

    def end(self) -> None:
        """Close the store as it should be."""
        with self._doing("closing", dict(self._there)):
            self._store.close()

    @contextmanager
    def _doing(self, what: str, image: Image | None = None) -> Iterator[None]:
        self._journal.say("flushing" if image is not None else what, image)
        yield
        self._journal.say("flushed" if image is not None else "between")

    def _new(self, keys: list[str]) -> Image:
        self._version += len(keys)
        return {key: self._version - number for number, key in enumerate(keys)}

    def _some(self, most: int) -> list[str]:
        return self._random.sample(sorted(self._there), k=min(most, len(self._there)))

    def _put(self, most: int = 12) -> None:
        names = {f"key {self._random.randrange(_KEYS)}" for _ in range(self._random.randint(1, most))}
        image = self._new(sorted(names - self._there.keys()))
        with self._doing("put"):
            self._crates.put_all({key: small_bytes(version) for key, version in image.items()})
        self._there |= image

    def _put_one(self) -> None:
        self._put(1)

    def _replace(self) -> None:
        image = self._new(self._some(4))
        with self._doing("replace"):
            self._crates.put_all({key: small_bytes(v) for key, v in image.items()}, replace=True)
        self._there |= image

    def _write(self) -> None:
        for key in self._some(1):
            nbytes = len(small_bytes(self._there[key]))
            version = self._new([key])[key]
            while len(small_bytes(version)) != nbytes:
                version = self._new([key])[key]
            with self._doing("write"), self._crates.lease(key, tier="host", write=True) as lease:
                lease.tensor.copy_(small_bytes(version))
            self._there[key] = version

    def _evict(self) -> None:
        with self._doing("evict"):
            self._crates.evict(*self._some(3), to="disk").result()

    def _drop(self) -> None:
        keys = self._some(10)
        with self._doing("drop"):
            self._crates.drop(*keys)
        for key in keys:
            del self._there[key]

    def _flush(self) -> None:
        with self._doing("flush", dict(self._there)):
            (self._store if self._random.random() < 0.3 else self._crates).flush()

    def _flush_others(self) -> None:
        with self._doing("flush others"):
            self._store.put("other", small_bytes(self._version), replace=True)
            self._store.flush("other")

    def _get(self) -> None:
        with self._doing("get"):
            for key in self._some(3):
                assert torch.equal(self._crates.get(key), small_bytes(self._there[key])), key


if __name__ == "__main__":
    sys.exit(main(CrateWorker, __doc__))
