"""Stores for tests of what reads parts of values, with three keys in the last tier."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import tierstore as ts
from tests.stores import memory_backends
from tierstore.config import StoreConfig, TierConfig
from tierstore.spi import Backend, Buffer, Capabilities, Completion, Slot
from tierstore.testing.backend_operations import pattern
from tierstore.wrappers.forwarding import ForwardingBackend

PATIENCE_S = 20


class Whole(ForwardingBackend):
    """A backend that reads no parts, and counts what it reads whole."""

    def __init__(self, backend: Backend) -> None:
        super().__init__(backend)
        self.capabilities_ = replace(backend.capabilities, has_parts=False)
        self.read_bytes: list[int] = []

    @property
    def capabilities(self) -> Capabilities:
        return self.capabilities_

    def read(self, slot: Slot, into: Buffer) -> Completion:
        self.read_bytes.append(slot.nbytes)
        return super().read(slot, into)


def filled(wrap: Callable[[Backend], Backend] = lambda b: b, nbytes: int = 1000) -> ts.Store:
    """Return a store with three keys in its last tier, whose bytes are those of `pattern`."""
    backends = memory_backends((10 * nbytes, 10 * nbytes))
    backends[1] = wrap(backends[1])
    store = store_of(backends, 10 * nbytes)
    for seed, key in enumerate("abc"):
        store.put(key, pattern(nbytes, seed), tier="disk")
    return store


def store_of(backends: Sequence[Backend], nbytes: int) -> ts.Store:
    names = ("host", "disk")[-len(backends) :]
    return ts.Store(
        StoreConfig([TierConfig(name, b, nbytes) for name, b in zip(names, backends, strict=True)])
    )


def part(key: str, begin: int, nbytes: int, whole_bytes: int = 1000) -> torch.Tensor:
    return pattern(whole_bytes, "abc".index(key))[begin : begin + nbytes]
