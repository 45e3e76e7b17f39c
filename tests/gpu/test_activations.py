"""Activations on a real accelerator: memory that is adopted, swapped and recomputed, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import tierstore as ts
from tests.gpu.accelerators import ACCELERATOR, IS_SIMULATED, NAME, event, keep_busy, stream
from tierstore.training import ActivationStore, offload, swap
from tierstore.training.activations.swapping.activation_store import OffloadedTensor
from tierstore.units import GIB, MIB

pytestmark = pytest.mark.gpu

_SMALLER = 8 if IS_SIMULATED else 1  # kernels are the CPU's there
_DIM, _LAYERS, _BATCH = 1024 // _SMALLER, 8, 4096 // _SMALLER
_ALL_LAYERS = {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 2}]}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_DIM, 4 * _DIM), nn.Linear(4 * _DIM, _DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dropout(torch.nn.functional.gelu(self.up(x)))
        output: torch.Tensor = x + self.down(hidden)
        return output


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3
) -> tuple[list[torch.Tensor], int]:
    """Return the losses, and the most bytes that the device held."""
    device = ACCELERATOR
    torch.manual_seed(1)
    torch.accelerator.reset_peak_memory_stats()
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(_BATCH, _DIM, device=device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    torch.accelerator.synchronize()
    return losses, torch.accelerator.max_memory_allocated()


def _model() -> _Model:
    torch.manual_seed(0)
    return _Model()


def _document(**sections: Mapping[str, Any]) -> dict[str, object]:
    return {
        "context": {"max_device_memory": "2GB"},
        "offload_config": {"device": NAME, "offload_cpu_size": "4GB", "offload_disk_size": "0GB"},
        **sections,
    }


@pytest.fixture
def store() -> Iterator[ts.Store]:
    settings = ts.OffloadConfig(
        device=NAME, max_device_memory=2 * GIB, offload_cpu_size=4 * GIB, offload_disk_size=0
    )
    with ts.Store(settings.store_config()) as store:
        yield store


def test_memory_that_a_long_kernel_still_writes_can_be_adopted(store: ts.Store) -> None:
    assert store.device.type == NAME
    tensor = torch.zeros(16 * MIB, device=NAME)
    torch.accelerator.synchronize()
    keep_busy()
    tensor.fill_(7)
    store.adopt("k", tensor)
    store.evict("k", to="host").result(60)
    assert torch.equal(store.get("k", device="cpu"), torch.full((16 * MIB,), 7.0))


def test_what_was_adopted_is_free_when_nobody_refers_to_it(store: ts.Store) -> None:
    before = torch.accelerator.memory_allocated()
    tensor = torch.ones(16 * MIB, device=NAME)
    store.adopt("k", tensor)
    del tensor
    assert torch.accelerator.memory_allocated() >= before + 64 * MIB
    store.evict("k", to="host").result(60)
    assert torch.accelerator.memory_allocated() == before
    with store.lease("k") as lease:
        assert bool((lease.tensor == 1).all())


_SEVENS = 16 * MIB  # elements


def _kept_below(activation_store: ActivationStore) -> OffloadedTensor:
    offloaded = activation_store.keep(torch.full((_SEVENS,), 7.0, device=NAME), "k")
    offloaded.release()
    assert activation_store.store.where("k") == ("host",)
    return offloaded


def test_memory_that_another_stream_still_reads_is_not_given_back_by_a_sweep_here(store: ts.Store) -> None:
    """Its twin without an accelerator is in tests/training/test_activation_store_streams.py."""
    activation_store = ActivationStore(store)
    offloaded = _kept_below(activation_store)
    store.fetch("k").result(60)  # allocated on the current stream, whose next allocation would get it
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    side, is_read = stream(), event()
    with side:
        lent = offloaded.take()
        keep_busy()
        is_right = (lent == 7).all()
        is_read.record()
    del lent
    activation_store.sweep()  # every use has taken it: it goes down, which is done already
    other = torch.zeros(_SEVENS, device=NAME)
    assert not is_read.query()
    assert torch.accelerator.memory_allocated() >= before + other.nbytes
    torch.accelerator.synchronize()
    assert bool(is_right)
    store.evict("k", to="host").result(60)
    assert torch.accelerator.memory_allocated() < before + other.nbytes


def test_every_stream_waits_for_bytes_that_come_back(store: ts.Store) -> None:
    activation_store = ActivationStore(store)
    offloaded = _kept_below(activation_store)
    torch.accelerator.synchronize()
    lent, found = [], []
    for each in (torch.accelerator.current_stream(), stream(), stream()):
        with each:
            lent.append(offloaded.take())
            found.append((lent[-1] == 7).all())
    torch.accelerator.synchronize()
    assert all(map(bool, found))


def test_layers_that_run_on_a_side_stream_are_swapped_with_the_same_bits() -> None:
    model = _model().to(ACCELERATOR)
    plain, _ = _train(model, _sgd(model))
    model = _model().to(ACCELERATOR)
    torch.accelerator.synchronize()
    side = stream()
    with swap(model, _document(swap_config=_ALL_LAYERS)) as run, side:
        swapped, _ = _train(model, _sgd(model))
        assert run.stats().activations.brought > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))


def test_swapped_layers_give_the_same_bits_and_take_less() -> None:
    model = _model().to(ACCELERATOR)
    plain, plain_bytes = _train(model, _sgd(model))
    model = _model().to(ACCELERATOR)
    with swap(model, _document(swap_config=_ALL_LAYERS)) as run:
        swapped, swapped_bytes = _train(model, _sgd(model))
        assert run.stats().activations.released > 0
    assert all(torch.equal(a, b) for a, b in zip(plain, swapped, strict=True))
    assert IS_SIMULATED or swapped_bytes < plain_bytes  # whose copies may all come after the last kernel


@pytest.mark.parametrize(
    "recompute", [{"recompute": True}, {"recompute": [0, 1], "select_recompute": {"dropout": [2, 3]}}]
)
def test_one_document_for_all_gives_the_same_bits_within_the_budget(recompute: Mapping[str, object]) -> None:
    model = _model().to(ACCELERATOR)
    plain, _ = _train(model, _sgd(model))
    model = _model()
    optimizer = _sgd(model)
    document = _document(swap_config=_ALL_LAYERS, recompute_config=recompute)
    document["context"] = {"max_device_memory": "700MB"}
    with offload(model, optimizer, document):
        losses, peak_bytes = _train(model, optimizer)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    assert peak_bytes <= 700 * MIB
