"""Two streams, and two threads with a stream each, on one store and on one offloaded model."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import tierstore as ts
from tests.accelerator import DEVICE, held, late
from tierstore.training import offload, swap
from tierstore.units import KIB, MIB

# PyTorch's advice for a parameter that is used on two streams: it says so for the plain loop as well.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")

_N = 64 * KIB


def _main() -> torch.Stream:
    return torch.accelerator.current_stream()


def _pattern(value: int) -> Tensor:
    return torch.full((_N,), value, dtype=torch.uint8)


@pytest.fixture
def store() -> Iterator[ts.Store]:
    config = ts.StoreConfig.default(
        "openreg", 4 * MIB, offload_cpu_size=16 * MIB, offload_disk_size=0, host_mem_block_size=MIB
    )
    with ts.Store(config) as store:
        yield store


def _copies_in(store: ts.Store) -> torch.Stream:
    """The stream that brings bytes to the device."""
    backend = store._engine.backends[0]
    stream: torch.Stream = backend._inward.stream  # type: ignore[attr-defined]
    return stream


# ---------------------------------------------------------------------- leases


def test_a_second_stream_that_uses_a_lease_waits_for_its_bytes(store: ts.Store) -> None:
    store.put("k", _pattern(7), tier="host")
    side = torch.Stream(DEVICE)
    with held(_copies_in(store)):
        lease = store.lease("k")
        with side:
            lease.use()
            seen = lease.tensor.clone()
    with side:
        assert torch.equal(seen.cpu(), _pattern(7))
    lease.release()


def test_bytes_stay_until_every_stream_that_uses_their_lease_has_read_them(store: ts.Store) -> None:
    store.put("k", _pattern(7), tier="host")
    side = torch.Stream(DEVICE)
    lease = store.lease("k")
    with held(side):
        with side:
            lease.use()
            seen = lease.tensor.clone()
        lease.release()
        evicted = store.evict("k", to="host")
        store.put("other", _pattern(9).to(DEVICE), tier="device")  # what would be given the same memory
        _main().synchronize()
    evicted.result(10)
    with side:
        assert torch.equal(seen.cpu(), _pattern(7))


def test_a_lease_may_be_released_on_any_stream(store: ts.Store) -> None:
    store.put("k", _pattern(7), tier="host")
    side = torch.Stream(DEVICE)
    lease = store.lease("k", write=True)
    with held(_main()):
        lease.tensor.fill_(8)  # on the stream that took the lease
        with side:
            lease.release()
        evicted = store.evict("k", to="host")
    evicted.result(10)
    assert torch.equal(store.get("k", device="cpu"), _pattern(8))


def test_what_a_second_stream_wrote_goes_down(store: ts.Store) -> None:
    store.put("k", _pattern(7), tier="host")
    side = torch.Stream(DEVICE)
    lease = store.lease("k", write=True)
    with held(side):
        with side:
            lease.use()
            lease.tensor.fill_(8)
        lease.release()
        evicted = store.evict("k", to="host")
    evicted.result(10)
    assert torch.equal(store.get("k", device="cpu"), _pattern(8))


def test_a_released_lease_can_be_used_on_no_stream(store: ts.Store) -> None:
    store.put("k", _pattern(7))
    lease = store.lease("k")
    lease.release()
    with pytest.raises(ts.UsageError, match="released"):
        lease.use()


# ---------------------------------------------------------------------- a model on two streams

_WIDTH = 128


class _Tower(nn.Module):
    """Layers that follow each other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def _leaf() -> nn.Module:
    """What shares a bundle with its siblings."""
    return nn.Linear(_WIDTH, _WIDTH)


class _Branches(nn.Module):
    """Two branches, the first on a stream of its own, if there is one.

    The side stream's branch gets a gradient that is nobody else's, hence the sine: PyTorch adds in place to
    one that two streams share (`test_a_gradient_of_two_streams_is_added_to_while_the_other_reads_it`).
    """

    def __init__(self, branch: Callable[[], nn.Module], *, are_shared: bool, are_frozen: bool) -> None:
        super().__init__()
        self.first = nn.Linear(_WIDTH, _WIDTH)
        self.left = branch()
        self.right = self.left if are_shared else branch()
        self.last = nn.Linear(_WIDTH, 4)
        self.side: torch.Stream | None = None
        for parameter in [*self.left.parameters(), *self.right.parameters()]:
            parameter.requires_grad_(not are_frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.side is None:
            return cast("Tensor", self.last(self.left(x).sin() + self.right(x)))
        here = _main()
        self.side.wait_stream(here)
        x.record_stream(self.side)
        with self.side:
            left = self.left(x)
        right = self.right(x)
        here.wait_stream(self.side)
        left.record_stream(here)
        return cast("Tensor", self.last(left.sin() + right))


Built = tuple[_Branches, torch.optim.Optimizer]


def _build(
    side: torch.Stream | None,
    branch: Callable[[], nn.Module] = _Tower,
    *,
    are_shared: bool = False,
    are_frozen: bool = False,
) -> Built:
    torch.manual_seed(0)
    model = _Branches(branch, are_shared=are_shared, are_frozen=are_frozen).to(DEVICE)
    model.side = side
    trained = [each for each in model.parameters() if each.requires_grad]
    return model, torch.optim.Adam(trained, lr=1e-2)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, stepped_on: torch.Stream | None = None, steps: int = 3
) -> list[Tensor]:
    torch.manual_seed(5)
    logged = []
    for _ in range(steps):
        loss = model(torch.randn(16, _WIDTH).to(DEVICE)).square().mean()
        loss.backward()
        logged.append(loss.detach().cpu())
        logged += [each.grad.cpu() for each in model.parameters() if each.grad is not None]
        here = _main()
        with _waited_for(here, stepped_on):
            optimizer.step()
            optimizer.zero_grad()
    return logged + [each.detach().cpu() for each in model.parameters()]


@contextlib.contextmanager
def _waited_for(here: torch.Stream, other: torch.Stream | None) -> Iterator[None]:
    """Be on ``other`` inside the context, behind ``here`` and before it."""
    if other is None:
        yield
        return
    other.wait_stream(here)
    with other:
        yield
    here.wait_stream(other)


def _late() -> contextlib.AbstractContextManager[None]:
    return late(kernel_us=50, copy_us=1500, seed=3)


def _same(expected: list[Tensor], found: list[Tensor]) -> None:
    assert len(expected) == len(found)
    for number, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert torch.equal(one, other), f"tensor {number} differs"


_TIGHT = {
    "device": "openreg",
    "max_device_memory": "1MB",
    "offload_cpu_size": "16MB",
    "offload_disk_size": 0,
    "host_mem_block_size": "1MB",
}
_OBEYED = {**_TIGHT, "max_device_memory": "16MB", "offload_param": "cpu", "auto_offload": False}
_MOVES = {"fits": {**_TIGHT, "max_device_memory": "16MB"}, "tight": _TIGHT, "obeyed": _OBEYED}

_layouts = pytest.mark.parametrize("layout", _MOVES)


@pytest.mark.parametrize("are_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("are_shared", [False, True], ids=["two", "shared"])
def test_two_branches_on_two_streams_are_ordered_without_tierstore(
    are_frozen: bool, are_shared: bool
) -> None:
    """The loop that is compared with has no race of its own."""
    expected = _train(*_build(None, are_shared=are_shared, are_frozen=are_frozen))
    for seed in range(6):
        model, optimizer = _build(torch.Stream(DEVICE), are_shared=are_shared, are_frozen=are_frozen)
        with late(kernel_us=50, seed=seed):
            _same(expected, _train(model, optimizer))


@_layouts
@pytest.mark.parametrize("branch", [_Tower, _leaf])
@pytest.mark.parametrize("are_frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("are_shared", [False, True], ids=["two", "shared"])
def test_two_branches_on_two_streams_train_as_on_one(
    layout: str, branch: Callable[[], nn.Module], are_frozen: bool, are_shared: bool
) -> None:
    expected = _train(*_build(None, branch, are_shared=are_shared, are_frozen=are_frozen))
    model, optimizer = _build(torch.Stream(DEVICE), branch, are_shared=are_shared, are_frozen=are_frozen)
    with _late(), offload(model, optimizer, _MOVES[layout]) as run:
        _same(expected, _train(model, optimizer))
        run.store.check()


@_layouts
def test_the_optimizer_may_step_on_another_stream(layout: str) -> None:
    expected = _train(*_build(None))
    model, optimizer = _build(None)
    with _late(), offload(model, optimizer, _MOVES[layout]):
        _same(expected, _train(model, optimizer, stepped_on=torch.Stream(DEVICE)))


@_layouts
def test_the_whole_loop_may_run_on_another_stream(layout: str) -> None:
    expected = _train(*_build(None, are_shared=True))
    model, optimizer = _build(torch.Stream(DEVICE), are_shared=True)
    torch.accelerator.synchronize()
    with _late(), offload(model, optimizer, _MOVES[layout]):
        with torch.Stream(DEVICE) as stream:
            found = _train(model, optimizer)
        _main().wait_stream(stream)
    _same(expected, found)


_SWAPPED = {
    "context": {"max_device_memory": "1MB"},
    "offload_config": {name: value for name, value in _TIGHT.items() if name != "max_device_memory"},
    "swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]},
}
_LAYERS = ["left.layers", "right.layers"]


def test_activations_of_two_branches_are_swapped_with_the_same_bits() -> None:
    expected = _train(*_build(None))
    model, optimizer = _build(torch.Stream(DEVICE))
    with _late(), swap(model, _SWAPPED, layers=_LAYERS) as run:
        _same(expected, _train(model, optimizer))
        assert run.stats().activations.brought > 0


class _Reread(nn.Module):
    """A side stream reads what the main one made and saved, and the main one goes on before it waits."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(_WIDTH, _WIDTH)
        self.left = nn.Linear(_WIDTH, _WIDTH)
        self.right = nn.Linear(_WIDTH, _WIDTH)
        self.side: torch.Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        shared = self.before(x).tanh()
        if self.side is None:
            return cast("Tensor", self.left(shared).sin() + self.right(shared))
        here = _main()
        self.side.wait_stream(here)
        with self.side:
            left = self.left(shared).sin()
        right = self.right(shared)
        del shared  # autograd has it until backward, so a plain loop records no stream
        for _ in range(20):
            right = right * 1.0
        here.wait_stream(self.side)
        left.record_stream(here)
        return cast("Tensor", left + right)


class _Rereading(nn.Module):
    """Such layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Reread() for _ in range(3))
        self.last = nn.Linear(_WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return cast("Tensor", self.last(x))


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), copy_us=st.integers(0, 2000))
def test_what_a_side_stream_reads_stays_as_long_as_a_graph_would_keep_it(seed: int, copy_us: int) -> None:
    expected = _train(*_rereading(None))
    with late(kernel_us=3000, copy_us=copy_us, seed=seed):
        _same(expected, _train(*_rereading(torch.Stream(DEVICE))))  # the plain loop records no stream
        model, optimizer = _rereading(torch.Stream(DEVICE))
        with swap(model, _SWAPPED, layers=["layers"]) as run:
            _same(expected, _train(model, optimizer))
            assert run.stats().activations.brought > 0


def _rereading(side: torch.Stream | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = _Rereading().to(DEVICE)
    for layer in model.layers:
        cast("_Reread", layer).side = side
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


# ---------------------------------------------------------------------- threads


def _in_threads(count: int, work: Callable[[int], None]) -> None:
    failures: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for failure in failures:
        raise failure


class _Meeting(nn.Module):
    """Two threads are inside it at the same time, each with the weights in use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(_WIDTH, _WIDTH))
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.barrier: threading.Barrier | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.barrier is not None:
            self.barrier.wait(20)
        found: Tensor = self.linear(torch.tanh(x @ self.scale))
        return found


@_layouts
def test_two_threads_with_a_stream_each_run_one_model(layout: str) -> None:
    torch.manual_seed(0)
    model = _Meeting().to(DEVICE).requires_grad_(requires_grad=False)
    inputs = [torch.randn(16, _WIDTH).to(DEVICE) for _ in range(2)]
    expected = [model(x).cpu() for x in inputs]
    model.barrier = threading.Barrier(2)

    def work(number: int) -> None:
        with torch.Stream(DEVICE), torch.no_grad():
            for _ in range(10):
                assert torch.equal(model(inputs[number]).cpu(), expected[number])

    with _late(), offload(model, None, _MOVES[layout]):
        _in_threads(2, work)
