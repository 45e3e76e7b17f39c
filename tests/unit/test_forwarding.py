"""A wrapper passes on whatever the backend within can do; what a backend only says is refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch

import tierstore as ts
from tierstore.spi import Backend, Capabilities, Completion, FullBackend, Medium, Record, Slot, broken_promise
from tierstore.testing.batching import Batching
from tierstore.testing.faults import Faulty, Gate, Slow
from tierstore.wrappers.forwarding import ForwardingBackend
from tierstore_backends.memory import MemoryBackend

EVERYTHING = Capabilities(
    Medium.STORAGE,
    is_durable=True,
    has_batches=True,
    has_parts=True,
    has_direct_paths=True,
    adopts=True,
    has_shrinking_slots=True,
    has_reserved_bytes=True,
    has_io_stats=True,
    has_waits=True,
)
PROMISES = [
    "is_durable",
    "has_batches",
    "has_parts",
    "has_direct_paths",
    "adopts",
    "has_reserved_bytes",
    "has_io_stats",
    "has_waits",
]
Wrap = Callable[[Backend], Backend]

SLOT = cast("Slot", object())
BUFFER = torch.zeros(1, dtype=torch.uint8)
ARGUMENTS: Mapping[str, tuple[object, ...]] = {
    "reserve": (3,),
    "read": (SLOT, BUFFER),
    "write": (SLOT, BUFFER),
    "read_many": ([SLOT], [BUFFER]),
    "write_many": ([SLOT], [BUFFER]),
    "read_parts": ([SLOT], [0], 1, BUFFER),
    "free": (SLOT,),
    "resize": (5,),
    "close": (),
    "stop_waiting": (),
    "adopt": (BUFFER,),
    "accepts": (BUFFER,),
    "recovered": (),
    "commit": ([cast("Record", object())], ["gone"]),
}


class Everything:
    """A backend that can do everything, and notes what it is asked."""

    capabilities = EVERYTHING
    reserved_bytes = 17
    io_stats = "counted"

    def __init__(self) -> None:
        self.asked: list[tuple[str, tuple[object, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name not in ARGUMENTS:
            raise AttributeError(name)

        def note(*given: object) -> object:
            self.asked.append((name, given))
            return Completion.done()

        return note


def members() -> set[str]:
    return {name for name, _ in inspect.getmembers(FullBackend) if not name.startswith("_")}


def test_the_arguments_here_are_those_of_all_members() -> None:
    assert members() == {*ARGUMENTS, "capabilities", "reserved_bytes", "io_stats"}


@pytest.mark.parametrize("name", ARGUMENTS)
@pytest.mark.parametrize("wrap", [ForwardingBackend, Faulty, Slow, lambda b: Gate(b, holds=())])
def test_what_is_asked_of_a_wrapper_reaches_the_backend(wrap: Wrap, name: str) -> None:
    within = Everything()
    getattr(wrap(cast("Backend", within)), name)(*ARGUMENTS[name])
    assert within.asked == [(name, ARGUMENTS[name])]


@pytest.mark.parametrize("wrap", [ForwardingBackend, Faulty, Gate, Slow, Batching])
def test_a_wrapper_can_do_and_counts_what_the_backend_does(wrap: Wrap) -> None:
    wrapper = cast("FullBackend", wrap(cast("Backend", Everything())))
    assert wrapper.capabilities == EVERYTHING
    assert (wrapper.reserved_bytes, wrapper.io_stats) == (17, "counted")
    assert broken_promise(wrapper) is None


@pytest.mark.parametrize("promise", PROMISES)
def test_what_a_backend_says_and_has_not_is_a_config_error_before_it_is_used(promise: str) -> None:
    closed: list[bool] = []

    class Plain:
        """The seven members, and no others."""

        def __init__(self) -> None:
            self.within = MemoryBackend(100, is_storage=True)
            self.capabilities = replace(Capabilities(Medium.STORAGE), **{promise: True})  # type: ignore[arg-type]
            self.reserve, self.free = self.within.reserve, self.within.free
            self.read, self.write, self.resize = self.within.read, self.within.write, self.within.resize

        def close(self) -> None:
            closed.append(True)

    with pytest.raises(
        ts.ConfigError, match=rf"TierConfig 'disk': the backend says {promise}=True, but has no"
    ):
        ts.Store(ts.StoreConfig([ts.TierConfig("disk", Plain(), 100)]))
    assert closed == [True]
