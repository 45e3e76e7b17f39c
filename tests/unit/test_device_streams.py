"""The accelerator's backend, on a device whose streams run when the test says so.

The twin of ``tests/gpu``: copies and events are queued on simulated streams, which do what real ones
may do at worst, nothing before they must.
"""

from __future__ import annotations

import collections
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tierstore.errors import BackendError, CapacityError
from tierstore.spi import AddressableSlot, Completion, Medium
from tierstore.testing.conformance import finish, pattern, succeed
from tierstore.testing.memory import DeviceBudget, OutOfDeviceMemory
from tierstore.units import MIB
from tierstore_backends.device.streams import DeviceModule, StreamDevice, find_device

_N = 1000


class SimulatedEvent:
    """Reached when the stream that recorded it comes that far."""

    def __init__(self, *, blocking: bool = False) -> None:
        self.is_blocking = blocking
        self.reached = threading.Event()
        self.error: RuntimeError | None = None

    def record(self, stream: SimulatedStream) -> None:
        if stream.is_idle:
            self.reached.set()
        else:
            stream.queue.append(self)

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        assert self.reached.wait(30)
        if self.error is not None:
            raise self.error


class _Wait:
    def __init__(self, event: SimulatedEvent) -> None:
        self.event = event


class SimulatedStream:
    """Work that is done in order when `run` is called, as far as events let it.

    Args:
        device: of a stream that the tier has made: with no work it passes events at once.  The program's own
            passes none before it runs, as if there always were some.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._is_the_programs = device is None
        self.queue: collections.deque[SimulatedEvent | _Wait | Callable[[], object]] = collections.deque()

    @property
    def is_idle(self) -> bool:
        return not self._is_the_programs and not self.queue

    def wait_event(self, event: SimulatedEvent) -> None:
        self.queue.append(_Wait(event))

    def run(self) -> None:
        while self.queue:
            match self.queue[0]:
                case _Wait() as wait:
                    if not wait.event.query():
                        return
                case SimulatedEvent() as event:
                    event.reached.set()
                case work:
                    work()
            self.queue.popleft()


class _Queueing(TorchDispatchMode):
    """Queues copies on a stream in place of doing them."""

    def __init__(self, stream: SimulatedStream) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stream = stream

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401
        if func is torch.ops.aten.empty.memory_format:  # what is allocated on a stream is there at once
            return func(*args, **(kwargs or {}))
        assert func is torch.ops.aten.copy_.default
        assert (kwargs or {}).get("non_blocking", args[2:]) in (True, (True,))
        self.stream.queue.append(lambda: func(*args, **(kwargs or {})))
        return args[0]


class Simulated:
    """A device module; its compute stream is current unless a context says otherwise."""

    def __init__(self) -> None:
        self.streams: list[SimulatedStream] = []
        self.compute = SimulatedStream()
        self.current = self.compute

    def Stream(self, device: torch.device) -> SimulatedStream:  # noqa: N802 - torch's name
        self.streams.append(SimulatedStream(device))
        return self.streams[-1]

    def Event(self, *, blocking: bool = False) -> SimulatedEvent:  # noqa: N802 - torch's name
        return SimulatedEvent(blocking=blocking)

    def current_stream(self, _device: torch.device) -> SimulatedStream:
        return self.current

    def stream(self, stream: SimulatedStream) -> AbstractContextManager[object]:
        return _Queueing(stream)

    @property
    def inward(self) -> SimulatedStream:
        return self.streams[0]

    @property
    def outward(self) -> SimulatedStream:
        return self.streams[1]

    def run_everything(self) -> None:
        everything = [self.compute, *self.streams]
        while any(stream.queue for stream in everything):
            before = [len(stream.queue) for stream in everything]
            for stream in everything:
                stream.run()
            assert [len(stream.queue) for stream in everything] != before, "the streams wait for each other"


@pytest.fixture
def module() -> Simulated:
    return Simulated()


def _open(module: Simulated, capacity_bytes: int = MIB) -> StreamDevice:
    return StreamDevice(capacity_bytes, torch.device("cpu"), cast("DeviceModule", module))


@pytest.fixture
def device(module: Simulated) -> Iterator[StreamDevice]:
    opened = _open(module)
    yield opened
    module.run_everything()
    opened.close()


def _reserve(device: StreamDevice, nbytes: int = _N) -> AddressableSlot:
    slot = device.reserve(nbytes)
    assert isinstance(slot, AddressableSlot)
    return slot


def _is_told(completion: Completion) -> bool:
    """Whether a completion comes now that its event has passed; the watcher may need a moment."""
    return finish(completion) is None


def test_it_is_a_device(device: StreamDevice) -> None:
    assert (device.capabilities.medium, device.capabilities.alignment_bytes) == (Medium.DEVICE, 512)


def test_a_write_waits_for_nothing_that_the_program_has_queued(
    device: StreamDevice, module: Simulated
) -> None:
    """Or copies would never run beside the computing that they are for."""
    module.compute.queue.append(lambda: None)
    slot = _reserve(device)
    module.compute.queue.append(lambda: None)
    write = device.write(slot, pattern(_N, seed=1))
    module.inward.run()
    assert _is_told(write)


def test_whoever_writes_first_waits_for_the_stream_that_the_memory_came_from(
    device: StreamDevice, module: Simulated
) -> None:
    """A stream of the program's may be the same one: PyTorch has no more than 32."""
    seen: list[int] = []
    slot_memory: list[torch.Tensor] = []
    module.inward.queue.append(lambda: seen.append(int(slot_memory[0].sum())))
    slot = _reserve(device)
    slot_memory.append(slot.memory.zero_())
    slot.acquire()
    module.compute.queue.append(lambda: slot.memory.fill_(1))
    module.compute.run()
    module.inward.run()
    assert seen == [0]
    module.run_everything()
    assert int(slot.memory.sum()) == _N


def test_a_write_completes_when_the_device_has_come_that_far(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    write = device.write(slot, pattern(_N, seed=1))
    assert write.is_stream_ordered
    assert not write.is_done
    module.run_everything()
    assert _is_told(write)


def test_acquire_makes_the_consumers_stream_wait_and_not_the_host(
    device: StreamDevice, module: Simulated
) -> None:
    slot, source, seen = _reserve(device), pattern(_N, seed=1), list[torch.Tensor]()
    write = device.write(slot, source)
    slot.acquire()
    module.compute.queue.append(lambda: seen.append(slot.memory.clone()))
    module.compute.run()
    assert seen == []
    module.inward.run()
    module.compute.run()
    assert torch.equal(seen[0], source)
    succeed(write)


def test_acquire_queues_nothing_when_the_bytes_are_there(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    succeed_after = device.write(slot, pattern(_N, seed=1))
    module.run_everything()
    succeed(succeed_after)
    slot.acquire()
    assert not module.compute.queue


def test_acquire_in_another_stream_waits_for_the_last_holder(device: StreamDevice, module: Simulated) -> None:
    slot, seen, other = _reserve(device), list[int](), SimulatedStream()
    slot.acquire()
    module.compute.queue.append(lambda: slot.memory.fill_(7))
    slot.release()
    module.current = other
    slot.acquire()
    other.queue.append(lambda: seen.append(int(slot.memory[0])))
    other.run()
    assert seen == []
    module.compute.run()
    other.run()
    assert seen == [7]
    module.current = module.compute


def test_a_read_waits_for_the_write_and_for_every_release(device: StreamDevice, module: Simulated) -> None:
    slot, into = _reserve(device), torch.zeros(_N, dtype=torch.uint8)
    device.write(slot, pattern(_N, seed=1))
    slot.acquire()
    module.compute.queue.append(lambda: slot.memory.fill_(7))
    slot.release()
    read = device.read(slot, into)
    assert not read.is_stream_ordered
    module.outward.run()
    module.compute.run()
    module.inward.run()
    module.outward.run()
    assert not into.any()
    module.compute.run()
    module.outward.run()
    assert _is_told(read)
    assert bool((into == 7).all())


def test_a_write_waits_for_the_last_holder_to_be_done_with_the_old_bytes(
    device: StreamDevice, module: Simulated
) -> None:
    slot, seen = _reserve(device), list[int]()
    slot.memory.zero_()
    slot.acquire()
    module.compute.queue.append(lambda: seen.append(int(slot.memory.sum())))
    slot.release()
    device.write(slot, torch.ones(_N, dtype=torch.uint8))
    module.inward.run()
    module.run_everything()
    assert seen == [0]


def test_a_read_does_not_hold_up_the_computing(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    module.compute.run()
    device.read(slot, torch.zeros(_N, dtype=torch.uint8))
    slot.acquire()
    assert not module.compute.queue


def test_memory_is_given_back_at_once_when_nothing_uses_it(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    module.compute.run()
    assert device.free(slot).is_done
    assert device.used_bytes == 0


def test_memory_is_kept_until_its_last_holder_is_done(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    slot.acquire()
    module.compute.queue.append(lambda: None)
    slot.release()
    view = slot.memory
    uses = torch._C._storage_Use_Count(view.untyped_storage()._cdata)
    free = device.free(slot)
    assert not free.is_done
    assert device.used_bytes == 1024
    assert torch._C._storage_Use_Count(view.untyped_storage()._cdata) == uses
    module.compute.run()
    succeed(free)
    assert device.used_bytes == 0


def test_a_slot_keeps_no_events_that_have_passed(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    for _ in range(100):
        slot.acquire()
        slot.release()
        module.compute.run()
    assert not module.compute.queue
    assert device.free(slot).is_done


def test_completions_of_one_direction_come_in_order(device: StreamDevice, module: Simulated) -> None:
    order: list[int] = []
    slots = [_reserve(device) for _ in range(20)]
    writes = [device.write(slot, pattern(_N, seed)) for seed, slot in enumerate(slots)]
    for number, write in enumerate(writes):
        write.add_done_callback(lambda _error, number=number: order.append(number))  # type: ignore[misc]
    module.run_everything()
    for write in writes:
        succeed(write)
    assert order == list(range(20))


def test_buffers_are_let_go_of_before_the_copy_completes(device: StreamDevice, module: Simulated) -> None:
    slot, source = _reserve(device), pattern(_N, seed=1)
    counts: list[int] = []

    def count(_error: BaseException | None = None) -> None:
        counts.append(sys.getrefcount(source))

    count()
    write = device.write(slot, source)
    write.add_done_callback(count)
    module.run_everything()
    succeed(write)
    assert counts == [counts[0]] * 2


def test_memory_is_dropped_before_its_free_completes(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    slot.acquire()
    module.compute.queue.append(lambda: None)
    slot.release()
    memory = weakref.ref(slot.memory.untyped_storage())
    is_alive: list[bool] = []
    free = device.free(slot)
    free.add_done_callback(lambda _error: is_alive.append(memory() is not None))
    assert memory() is not None
    module.compute.run()
    succeed(free)
    assert is_alive == [False]


def test_a_device_that_fails_fails_the_copy(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    write = device.write(slot, pattern(_N, seed=1))
    (ended,) = [entry for entry in module.inward.queue if isinstance(entry, SimulatedEvent)]
    ended.error = RuntimeError("an illegal memory access")
    module.run_everything()
    error = finish(write)
    assert isinstance(error, BackendError)
    assert "an illegal memory access" in str(error)
    assert isinstance(error.__cause__, RuntimeError)


def test_a_device_that_refuses_a_copy_fails_it(
    device: StreamDevice, module: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_stream: SimulatedStream) -> AbstractContextManager[object]:
        raise RuntimeError("no such stream")

    slot = _reserve(device)
    monkeypatch.setattr(module, "stream", refuse)
    assert isinstance(device.write(slot, pattern(_N, seed=1)).error, BackendError)
    assert isinstance(device.read(slot, pattern(_N, seed=1)).error, BackendError)


def test_a_callback_that_raises_does_not_stop_later_copies(
    device: StreamDevice, module: Simulated, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(_error: BaseException | None) -> None:
        raise ValueError("a bug of the engine's")

    slots = [_reserve(device), _reserve(device)]
    device.write(slots[0], pattern(_N, seed=1)).add_done_callback(fail)
    later = device.write(slots[1], pattern(_N, seed=2))
    module.run_everything()
    succeed(later)
    assert "a completion's callback failed" in caplog.text


def test_a_device_without_room_is_a_capacity_error_that_names_the_budget(device: StreamDevice) -> None:
    with DeviceBudget(100), pytest.raises(CapacityError, match=r"device budget of 1\.0 MiB") as refusal:
        device.reserve(_N)
    assert isinstance(refusal.value.__cause__, OutOfDeviceMemory)
    assert device.used_bytes == 0


def test_a_device_that_cannot_say_where_it_is_holds_nothing(
    device: StreamDevice, module: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_event: SimulatedEvent, _stream: SimulatedStream) -> None:
        raise RuntimeError("lost")

    with monkeypatch.context() as patch:
        patch.setattr(SimulatedEvent, "record", fail)
        with pytest.raises(BackendError, match="lost"):
            device.reserve(_N)
    assert device.used_bytes == 0


def test_events_do_not_spin_where_they_can_block(module: Simulated) -> None:
    device = _open(module)
    _reserve(device).release()
    (released,) = module.compute.queue
    assert isinstance(released, SimulatedEvent)
    assert released.is_blocking
    device.close()


def test_events_that_cannot_block_will_do(module: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def plain() -> SimulatedEvent:
        return SimulatedEvent()

    monkeypatch.setattr(module, "Event", plain)
    device = _open(module)
    _reserve(device).release()
    assert len(module.compute.queue) == 1
    device.close()


def test_a_foreign_slot_is_refused(device: StreamDevice) -> None:
    class Foreign:
        nbytes = 3

    assert isinstance(device.free(Foreign()).error, BackendError)
    assert isinstance(device.read(Foreign(), torch.zeros(3, dtype=torch.uint8)).error, BackendError)


def test_a_freed_slot_cannot_be_used(device: StreamDevice, module: Simulated) -> None:
    slot = _reserve(device)
    module.compute.run()
    succeed(device.free(slot))
    assert isinstance(device.free(slot).error, BackendError)
    assert isinstance(device.write(slot, pattern(_N, seed=1)).error, BackendError)
    with pytest.raises(BackendError, match="after it was freed"):
        _ = slot.memory


def test_resizing_changes_what_may_be_held(device: StreamDevice) -> None:
    device.resize(512)
    _reserve(device, 512)
    with pytest.raises(CapacityError):
        device.reserve(1)


def test_a_closed_device_refuses_what_comes_and_still_takes_back(
    device: StreamDevice, module: Simulated
) -> None:
    slot, kept = _reserve(device), _reserve(device)
    module.run_everything()
    device.close()
    device.close()
    with pytest.raises(BackendError, match="closed"):
        device.reserve(_N)
    assert "closed" in str(device.write(slot, pattern(_N, seed=1)).error)
    assert "closed" in str(device.read(slot, torch.zeros(_N, dtype=torch.uint8)).error)
    succeed(device.free(slot))
    succeed(device.free(kept))
    assert device.used_bytes == 0


def test_a_device_that_fails_at_a_free_gives_the_room_back_and_says_so(
    device: StreamDevice, module: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    slot = _reserve(device)

    def fail(_: SimulatedEvent) -> bool:
        raise RuntimeError("the device is lost")

    with monkeypatch.context() as context:
        context.setattr(SimulatedEvent, "query", fail)
        error = finish(device.free(slot))
    assert isinstance(error, BackendError)
    assert "the device is lost" in str(error)
    assert device.used_bytes == 0


def test_the_last_copy_s_callback_may_close_the_device(module: Simulated) -> None:
    device = _open(module)
    slot = _reserve(device)
    closed = threading.Event()

    def close(_: BaseException | None) -> None:
        device.close()
        closed.set()

    device.write(slot, pattern(_N, seed=1)).add_done_callback(close)
    module.run_everything()
    assert closed.wait(30)


def test_a_device_without_an_index_is_the_one_that_was_current_when_it_was_opened(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streaming = types.SimpleNamespace(
        Stream=None,
        Event=None,
        stream=None,
        is_available=lambda: True,
        device_count=lambda: 3,
        current_device=lambda: 2,
    )
    monkeypatch.setattr(torch, "get_device_module", lambda name: streaming)
    assert find_device(torch.device("cuda"))[0] == torch.device("cuda:2")
    assert find_device(torch.device("cuda:1"))[0] == torch.device("cuda:1")
    with pytest.raises(BackendError, match="torch sees 3"):
        find_device(torch.device("cuda:3"))


def test_adopted_memory_is_read_when_what_writes_it_has_run(device: StreamDevice, module: Simulated) -> None:
    memory, into = torch.zeros(_N, dtype=torch.uint8), torch.zeros(_N, dtype=torch.uint8)
    module.compute.queue.append(lambda: memory.fill_(7))
    slot = device.adopt(memory)
    assert device.used_bytes == 1024
    read = device.read(slot, into)
    module.outward.run()
    assert not into.any()
    module.run_everything()
    assert _is_told(read)
    assert bool((into == 7).all())


def test_adopted_memory_is_let_go_of_when_its_events_have_passed(
    device: StreamDevice, module: Simulated
) -> None:
    memory = torch.zeros(_N, dtype=torch.uint8)
    storage = weakref.ref(memory.untyped_storage())
    slot = device.adopt(memory)
    del memory
    free = device.free(slot)
    assert storage() is not None
    module.run_everything()
    succeed(free)
    assert storage() is None
    assert device.used_bytes == 0


@pytest.mark.parametrize(
    "memory",
    [torch.zeros(_N), torch.zeros(2, 2, dtype=torch.uint8), torch.zeros(_N, dtype=torch.uint8)[1:]],
    ids=["floats", "a-matrix", "a-part"],
)
def test_what_is_no_whole_storage_is_not_adopted(device: StreamDevice, memory: torch.Tensor) -> None:
    with pytest.raises(BackendError, match="whole storage"):
        device.adopt(memory)
    assert device.used_bytes == 0


def test_more_than_the_quota_is_not_adopted(module: Simulated) -> None:
    device = _open(module, capacity_bytes=512)
    with pytest.raises(CapacityError):
        device.adopt(torch.zeros(_N, dtype=torch.uint8))
    assert device.used_bytes == 0
    device.close()
    with pytest.raises(BackendError, match="closed"):
        device.adopt(torch.zeros(1, dtype=torch.uint8))


def test_slots_are_said_to_be_where_they_are(module: Simulated) -> None:
    place = torch.device("cuda:1")
    device = StreamDevice(MIB, place, cast("DeviceModule", module))
    assert device.capabilities.device == place
    device.close()
