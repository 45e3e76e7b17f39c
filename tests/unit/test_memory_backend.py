"""The reference backend beyond what the conformance suite asks of every backend."""

from __future__ import annotations

import pytest
import torch

from tierstore.errors import BackendError, ConfigError
from tierstore.spi import AddressableSlot, Medium
from tierstore_backends.memory import MemoryBackend, open_backend


def test_it_is_host_memory_that_does_not_last() -> None:
    capabilities = open_backend(capacity_bytes=1, options={}).capabilities
    assert (capabilities.medium, capabilities.is_durable, capabilities.alignment_bytes) == (
        Medium.HOST,
        False,
        1,
    )


def test_it_says_that_it_is_durable_when_told_to() -> None:
    assert open_backend(capacity_bytes=1, options={"durable": True}).capabilities.is_durable


def test_as_storage_its_slots_have_no_address() -> None:
    backend = open_backend(capacity_bytes=10, options={"storage": True})
    assert backend.capabilities.medium is Medium.STORAGE
    assert not isinstance(backend.reserve(1), AddressableSlot)


def test_copies_are_done_when_the_call_returns() -> None:
    backend = MemoryBackend(10)
    slot = backend.reserve(10)
    assert backend.write(slot, torch.ones(10, dtype=torch.uint8)).is_done
    assert backend.read(slot, torch.empty(10, dtype=torch.uint8)).is_done
    assert backend.free(slot).is_done


def test_an_unknown_option_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"no option 'path'. Accepted: durable, storage"):
        open_backend(capacity_bytes=1, options={"path": "x"})


def test_a_bad_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'durable' of the 'memory' backend is 1. Accepted: True or False"):
        open_backend(capacity_bytes=1, options={"durable": 1})


def test_a_slot_of_another_backend_is_refused() -> None:
    class Foreign:
        nbytes = 3

    error = MemoryBackend(10).write(Foreign(), torch.zeros(3, dtype=torch.uint8)).error
    assert isinstance(error, BackendError)


def test_freeing_twice_is_an_error_and_gives_nothing_back() -> None:
    backend = MemoryBackend(10)
    first, second = backend.reserve(5), backend.reserve(5)
    backend.free(first)
    assert isinstance(backend.free(first).error, BackendError)
    assert backend.reserve(5).nbytes == second.nbytes
