"""The activation store on a device whose streams run when the test says so: uses are waited for there."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import cast
from unittest import mock

import pytest
import torch

from tests.training.activation_stores import base, host
from tests.unit.test_device_streams import Simulated, SimulatedEvent, SimulatedStream
from tierstore import tensor_io
from tierstore.config import StoreConfig, TierConfig
from tierstore.store import Store
from tierstore.training.activations.swapping.activation_store import ActivationStore
from tierstore.units import MIB
from tierstore_backends.device.streams import DeviceModule, StreamDevice


class Current:
    """A stream as `torch.accelerator` shows it: equal to itself, and current inside the context."""

    def __init__(self, device: Simulated, stream: SimulatedStream) -> None:
        self._device, self.stream = device, stream
        self._before: list[SimulatedStream] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Current) and other.stream is self.stream

    def __hash__(self) -> int:
        return id(self.stream)

    def __enter__(self) -> None:
        self._before.append(self._device.current)
        self._device.current = self.stream

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before.pop()


@pytest.fixture
def device() -> Simulated:
    return Simulated()


@pytest.fixture
def activation_store(device: Simulated) -> Iterator[ActivationStore]:
    backend = StreamDevice(MIB, torch.device("cpu"), cast("DeviceModule", device))

    def current_stream(_: torch.device) -> Current:
        return Current(device, device.current)

    with (
        mock.patch.object(tensor_io, "current_stream", current_stream),
        Store(StoreConfig([TierConfig("device", backend, MIB), host()])) as store,
    ):
        yield ActivationStore(store)
        device.run_everything()


@contextlib.contextmanager
def on(device: Simulated, stream: SimulatedStream) -> Iterator[None]:
    """Let ``stream`` be the current one."""
    with Current(device, stream):
        yield


def _is_freed(activation_store: ActivationStore) -> bool:
    return activation_store.store.stats().tiers["device"].charged_bytes == 0


def test_memory_is_kept_until_the_stream_that_took_it_is_done_whoever_sweeps(
    activation_store: ActivationStore, device: Simulated
) -> None:
    x, other = base(), SimulatedStream()
    memory = weakref.ref(x.untyped_storage())
    offloaded = activation_store.keep(x, "k")
    device.run_everything()
    activation_store.store.fetch("k", tier="host").result()
    del x
    with on(device, other):
        lent = offloaded.take()
        other.queue.append(lambda: None)  # what reads it
    del lent
    activation_store.sweep()
    assert isinstance(other.queue[-1], SimulatedEvent)  # behind what reads it: what is freed waits for that
    device.run_everything()
    assert not offloaded.is_here
    assert memory() is not None
    assert not _is_freed(activation_store)
    other.run()
    activation_store.store.evict("k", to="host").result()
    assert memory() is None
    assert _is_freed(activation_store)
    lent = offloaded.take()
    device.run_everything()
    assert torch.equal(lent, base())


def test_memory_is_kept_until_every_stream_that_took_it_is_done(
    activation_store: ActivationStore, device: Simulated
) -> None:
    offloaded = activation_store.keep(base(), "k")
    device.run_everything()
    activation_store.store.fetch("k", tier="host").result()
    streams = [SimulatedStream(), SimulatedStream(), device.compute]
    lent = []
    for stream in streams:
        with on(device, stream):
            lent += [offloaded.take(), offloaded.take()]
            stream.queue.append(lambda: None)
    lent.clear()
    activation_store.sweep()
    assert all(isinstance(stream.queue[-1], SimulatedEvent) for stream in streams)
    for stream in streams:
        assert not _is_freed(activation_store)
        stream.run()
    activation_store.store.evict("k", to="host").result()
    assert _is_freed(activation_store)


def test_every_stream_waits_for_bytes_that_come_back(
    activation_store: ActivationStore, device: Simulated
) -> None:
    offloaded = activation_store.keep(base(), "k")
    device.run_everything()
    offloaded.release()
    device.run_everything()
    seen: list[bool] = []
    streams = [device.compute, SimulatedStream(), SimulatedStream()]
    lent = []
    for stream in streams:
        with on(device, stream):
            lent.append(offloaded.take())
            stream.queue.append(lambda: seen.append(torch.equal(lent[0], base())))
    for stream in streams:
        stream.run()
    assert seen == []
    device.inward.run()
    for stream in streams:
        stream.run()
    assert seen == [True] * 3
    assert len({each.data_ptr() for each in lent}) == 1
