"""Bytes between a caller's tensors and the slots of a store: in for a put, out for a get, lent for a lease.

Promises: what is put is stored as `TensorSpec` says, whatever the tensor's device and view; what is got is
the caller's alone.  Knows nothing of the books: who calls has a grant, and ends it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import torch

from tierstore.core.messages import Granted
from tierstore.engine.engine import Engine
from tierstore.engine.executor import Opening
from tierstore.errors import StoreForked
from tierstore.output_buffers import OutputBufferPool
from tierstore.signals import in_one_piece, uninterrupted
from tierstore.spi import AddressableSlot, Completion
from tierstore.stats import Traffic
from tierstore.tensors import TensorSpec, bytes_of, check_known, view_bytes


class TensorIo:
    """Moves bytes between tensors and the slots of one engine.  From any thread; blocks while they move.

    No signal's handler comes in the midst of it: it would find locks of media taken if it used the store.

    Args:
        engine: whose slots.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._outputs = OutputBufferPool()
        self._lock = threading.Lock()  # guards the next
        self._got: dict[int, Traffic] = {}

    @property
    @in_one_piece
    def got(self) -> Mapping[int, Traffic]:
        """What was handed out, by the number of the tier that it came from."""
        with self._lock:
            return dict(self._got)

    def fill(self, room: Opening, tensor: torch.Tensor, spec: TensorSpec) -> None:
        """Bring a tensor's bytes into the slot that was reserved for them.

        Raises:
            BackendError: the medium failed.
        """
        if spec.nbytes == 0:
            return
        slot = self._engine.addressable(room.slot, room.tier)
        if slot is not None:
            slot.acquire()
            try:
                with torch.no_grad():
                    view_bytes(slot.memory, spec).copy_(tensor)
            finally:
                slot.release()
            return
        is_plain = tensor.device.type == "cpu" and tensor.stride() == spec.stride
        if not is_plain or tensor.is_conj() or tensor.is_neg():
            copy = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype)
            tensor = copy.copy_(tensor)
        _wait(self._engine.backends[room.tier].write(room.slot, bytes_of(tensor)))

    @uninterrupted
    def copy_out(self, granted: Granted, device: torch.device | str | None) -> torch.Tensor:
        """Return an independent copy of a replica on ``device``; None: where it was when it was put.

        Raises:
            BackendError: reading failed; ``IntegrityError`` if what the bytes mean is lost.
        """
        spec = spec_of(granted)
        target = spec.device if device is None else torch.device(device)
        if target.type != "cpu":
            out = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=target)
        else:
            out = view_bytes(self._outputs.take(spec.nbytes), spec)
        if spec.nbytes:
            self._read_into(out, granted, spec)
        check_known(granted.key, spec)  # only now: a medium that cannot read them says why
        self.count(granted.place.tier, 1, spec.nbytes)
        return out

    def _read_into(self, out: torch.Tensor, granted: Granted, spec: TensorSpec) -> None:
        source = self._engine.slot(granted)
        slot = self._engine.addressable(source, granted.place.tier)
        if slot is not None:
            slot.acquire()
            try:
                with torch.no_grad():
                    out.copy_(view_bytes(slot.memory, spec))
            finally:
                slot.release()
            return
        is_host = out.device.type == "cpu"
        host = bytes_of(out) if is_host else self._outputs.take(spec.nbytes)
        _wait(self._engine.backends[granted.place.tier].read(source, host))
        if not is_host:
            out.copy_(view_bytes(host, spec))

    def count(self, tier: int, copies: int, nbytes: int) -> None:
        """Count what was handed out of a tier."""
        with self._lock:
            former = self._got.get(tier, Traffic(0, 0))
            self._got[tier] = Traffic(former.copies + copies, former.nbytes + nbytes)

    @uninterrupted
    def lend(self, granted: Sequence[Granted]) -> tuple[dict[str, torch.Tensor], Loan]:
        """Return the replicas as tensors by key, for the current stream, and the loan: end it.

        Args:
            granted: replicas of one tier.

        Raises:
            IntegrityError: what a replica's bytes mean is lost.
        """
        tensors: dict[str, torch.Tensor] = {}
        slots: list[AddressableSlot] = []
        for replica in granted:
            spec = spec_of(replica)
            check_known(replica.key, spec)
            slot = self._engine.addressable(self._engine.slot(replica), replica.place.tier)
            assert slot is not None  # a lease is refused where bytes cannot be used in place
            slots.append(slot)
            tensors[replica.key] = view_bytes(slot.memory, spec)
        device = self._engine.backends[granted[0].place.tier].capabilities.device
        loan = Loan(slots) if current_stream(device) is None else StreamLoan(slots, device)
        try:
            loan.begin()
        except BaseException:
            loan.end()
            raise
        return tensors, loan

    def close(self) -> None:
        """Keep no memory for copies any more."""
        self._outputs.clear()


class Loan:
    """Slots of a device without streams that are lent together.  From any thread.

    Args:
        slots: of one tier.
    """

    __slots__ = ("_held", "_slots")

    def __init__(self, slots: Sequence[AddressableSlot]) -> None:
        self._slots = slots
        self._held: list[AddressableSlot] = []

    def begin(self) -> None:
        """Wait for what wrote the slots."""
        for slot in self._slots:
            self._held.append(slot)  # first: what fails half-way is released as well
            slot.acquire()

    def use(self) -> None:
        """Let the current stream use the slots as well: there are none."""

    def end(self) -> None:
        """Let go of the slots."""
        while self._held:
            self._held[-1].release()
            self._held.pop()


class StreamLoan(Loan):
    """Slots that are lent together, and the device streams that use them.  From any thread.

    1. Each of those streams waited for what wrote the slots before it used them.
    2. The slots are busy until each has done what it was told when the loan ended; so it is with the stream
       that the loan is ended on.

    Args:
        slots: of one tier.
        device: where they are.
    """

    __slots__ = ("_device", "_lock", "_streams")

    def __init__(self, slots: Sequence[AddressableSlot], device: torch.device) -> None:
        super().__init__(slots)
        self._device = device
        self._lock = threading.Lock()  # guards the next, and is held while streams are told to wait
        self._streams: list[torch.Stream] = []

    def begin(self) -> None:
        """Let the current stream use the slots."""
        self.use()

    def use(self) -> None:
        """Let the current stream use the slots from now on."""
        stream = current_stream(self._device)
        assert stream is not None  # the device has streams
        with self._lock:
            if stream in self._streams:
                return
            self._streams.append(stream)  # first: what fails half-way is released as well
            for slot in self._slots:
                slot.acquire()

    def end(self) -> None:
        """Let go of the slots."""
        stream = current_stream(self._device)
        assert stream is not None  # the device has streams
        with self._lock:
            if stream not in self._streams:
                self._streams.append(stream)
            while self._streams:
                with self._streams[-1]:
                    for slot in self._slots:
                        slot.release()
                self._streams.pop()


def current_stream(device: torch.device) -> torch.Stream | None:
    """Return the stream of ``device`` that is current in this thread; ``None``: it has none."""
    return None if device.type == "cpu" else torch.accelerator.current_stream(device.index)


def spec_of(granted: Granted) -> TensorSpec:
    """Return what kind of tensor a replica holds."""
    assert isinstance(granted.spec, TensorSpec)
    return granted.spec


def _wait(completion: Completion) -> None:
    """Block until a backend's operation has ended; if this is interrupted, nevertheless.

    Until then bytes and room are the backend's: whoever gave them back earlier would let it write into what
    is somebody else's by then.

    Raises:
        BackendError: it failed.
    """
    interrupt: BaseException | None = None
    while not completion.is_done:
        try:
            completion.wait()
        except StoreForked:
            raise  # in the child nobody moves bytes, and what moves in the parent is not the child's
        except BaseException as error:  # noqa: BLE001 - raised when the operation has ended
            interrupt = error
    if interrupt is not None:
        try:
            raise interrupt
        finally:
            del interrupt
    if completion.error is not None:
        raise completion.error
