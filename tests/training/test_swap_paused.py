"""A context in which swap does nothing: what is saved in it stays, as plain PyTorch keeps it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.training.one_budget import document
from tests.training.swap_models import Layer, Llama, config, every_store, inputs, swapping, whole_layers
from tests.training.twins import assert_equal_lists
from tierstore.training import Swap, offload, swap

Pause = Callable[[], contextlib.AbstractContextManager[None]]


class Interrupted(BaseException):
    """Ends a pass where it is."""


def step(model: nn.Module, number: int = 0) -> Tensor:
    loss: Tensor = model(inputs(number)).square().mean()
    loss.backward()
    return loss.detach()


def kept(swapped: Swap, act: Callable[[], object]) -> int:
    """Return how many activations were kept while something ran."""
    before = swapped.stats().activations.kept
    act()
    return swapped.stats().activations.kept - before


@every_store
def test_passes_inside_the_context_keep_what_they_save(tmp_path: Path, store: str) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers(), store)) as swapped:
        outside = kept(swapped, lambda: step(model))
        assert outside > 0
        with swapped.paused():
            assert kept(swapped, lambda: step(model)) == 0
            with swapped.paused():
                assert kept(swapped, lambda: step(model)) == 0
            assert kept(swapped, lambda: step(model)) == 0
        assert kept(swapped, lambda: step(model)) == outside


class Pausing(Layer):
    """A layer half of which runs inside a pause."""

    pause: Pause = contextlib.nullcontext

    def forward(self, x: Tensor) -> Tensor:
        """Transform ``(batch, length, dim)``."""
        x = x + self.attention(self.attention_norm(x)).exp().sigmoid()
        with self.pause():
            x = x + self.feed_forward(self.ffn_norm(x))
        output: Tensor = x.sin() * x
        return output


def build() -> Llama:
    torch.manual_seed(0)
    model = Llama()
    model.layers = nn.ModuleList(Pausing() for _ in range(4))
    return model


def pause_in(model: Llama, pause: Pause) -> None:
    """Let a half of every other layer run inside a pause."""
    for layer in model.layers[1::2]:
        assert isinstance(layer, Pausing)
        layer.pause = pause


def several_in_flight(model: Llama, pause: Pause) -> list[Tensor]:
    """Do passes inside and outside of pauses, whose backwards run in another order."""
    torch.manual_seed(1)
    losses = []
    for number in range(4):
        with pause() if number % 2 else contextlib.nullcontext():
            losses.append(model(inputs(number)).square().mean())
    with pause():
        for number in (2, 1):
            losses[number].backward(retain_graph=True)
    for number in (3, 2, 0):
        losses[number].backward()
    return [*(loss.detach() for loss in losses), *(p.grad for p in model.parameters() if p.grad is not None)]


def with_recompute(model: Llama, pause: Pause) -> list[Tensor]:
    """Recompute a part of the model in a pause, and outside."""
    torch.manual_seed(1)
    losses = []
    for number in range(3):
        with pause() if number == 1 else contextlib.nullcontext():
            x = inputs(number).requires_grad_()
            loss = checkpoint(model, x, use_reentrant=False).square().mean()
            loss.backward()
        losses += [loss.detach(), x.grad]
    return losses


@pytest.mark.parametrize("loop", [several_in_flight, with_recompute])
@every_store
def test_the_bits_are_the_same_with_pauses_anywhere(
    tmp_path: Path, store: str, loop: Callable[[Llama, Pause], list[Tensor]]
) -> None:
    expected = loop(build(), contextlib.nullcontext)
    model = build()
    with swapping(model, config(tmp_path, whole_layers(), store)) as swapped:
        pause_in(model, swapped.paused)
        assert_equal_lists(expected, loop(model, swapped.paused))


def test_a_part_of_a_pass_is_kept_and_the_rest_is_swapped(tmp_path: Path) -> None:
    model = build()
    with swapping(model, config(tmp_path, whole_layers())) as swapped:
        outside = kept(swapped, lambda: step(model))
        pause_in(model, swapped.paused)
        assert 0 < kept(swapped, lambda: step(model)) < outside


@pytest.mark.parametrize("error", [ValueError, Interrupted])
def test_a_pause_ends_with_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers())) as swapped:
        outside = kept(swapped, lambda: step(model))

        def fail(*_: object) -> None:
            with swapped.paused():
                raise error

        for place in (model, model.layers[1]):
            handle = place.register_forward_pre_hook(fail)
            with pytest.raises(error), swapped.paused():
                step(model)
            with pytest.raises(error):
                step(model)
            handle.remove()
        assert kept(swapped, lambda: step(model)) == outside


def test_a_pause_is_of_one_thread(tmp_path: Path) -> None:
    model = Llama()
    with swapping(model, config(tmp_path, whole_layers())) as swapped:
        outside = kept(swapped, lambda: step(model))

        def in_a_thread() -> None:
            thread = threading.Thread(target=step, args=(model,))
            thread.start()
            thread.join()

        with swapped.paused():
            assert kept(swapped, in_a_thread) == outside


def test_a_run_pauses_its_swap(tmp_path: Path) -> None:
    model = Llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with offload(model, optimizer, document(tmp_path)) as run:

        def count() -> int:
            activations = run.stats().activations
            assert activations is not None
            return activations.kept

        step(model)
        outside = count()
        with run.swap_paused():
            step(model)
            assert count() == outside > 0


@pytest.mark.parametrize("switch", ["ON", "OFF"])
def test_without_swap_it_does_nothing(tmp_path: Path, switch: str) -> None:
    model = Llama()
    settings = {"device": "cpu", "memory_offload": switch, "offload_path": str(tmp_path)}
    with offload(model, None, settings) as run, run.swap_paused(), run.swap_paused():
        step(model)
    with run.swap_paused():  # closed
        step(model)
    with swap(model, {"swap_config": {"swap": False}}) as swapped, swapped.paused():
        step(model)
