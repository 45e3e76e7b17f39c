"""Users' hooks on saved tensors are shown what plain PyTorch shows them, and what they return is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.training.leases import leased_bytes
from tests.training.twins import config_of, every_layout, same, with_device
from tierstore.training import Offload, offload
from tierstore.training.activations.swapping import forward_pass

WIDTH = 64
Hook = Callable[[Any], Any]

HOOKS: dict[str, tuple[Hook, Hook]] = {
    "as it is": (lambda t: t, lambda t: t),
    "other values": (lambda t: t * 1, lambda t: t * 2),
    "in a tuple": (lambda t: (t, "kept"), lambda packed: packed[0] + 1),
    "as an array": (lambda t: t.detach().numpy().copy(), lambda a: torch.from_numpy(a) * 3),
    "alias of the data": (lambda t: t.detach(), lambda t: t),
}


class Scaled(nn.Module):
    """A layer whose weight is saved itself, not a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Scaled() for _ in range(8)))


Shown = list[tuple[object, ...]]


def run(model: nn.Module, pack: Hook, unpack: Hook) -> tuple[Shown, list[Tensor]]:
    """Return what the hooks were shown, in its order, and the gradients."""
    shown: Shown = []
    inputs = torch.ones(3, WIDTH)

    def look(tensor: Tensor) -> object:
        is_parameter = isinstance(tensor, nn.Parameter)
        shown.append((tuple(tensor.shape), tensor.stride(), is_parameter, tensor.detach().sum().item()))
        return pack(tensor)

    model.zero_grad()
    with saved_tensors_hooks(look, unpack):
        loss = model(inputs).sum()
        with saved_tensors_hooks(look, unpack):
            loss = loss + model(inputs).sum()
    with save_on_cpu():
        loss = loss + model(inputs).sum()
    loss.backward()
    return shown, [each.grad.clone() for each in model.parameters() if each.grad is not None]


@every_layout
@pytest.mark.parametrize("name", HOOKS)
def test_users_hooks_see_every_tensor_in_order_and_decide_what_is_used(
    name: str, layout: str, tmp_path: Path
) -> None:
    plain, ours = build(), build()
    expected = run(plain, *HOOKS[name])
    more = {"max_device_memory": "512KB"} if "max_device_memory" in config_of(layout, tmp_path) else {}
    with offload(ours, None, config_of(layout, tmp_path, more)) as active:
        for _ in range(3):
            found = run(ours, *HOOKS[name])
            assert found[0] == expected[0]
            assert all(map(same, expected[1], found[1]))
        with torch.no_grad():
            ours(torch.ones(3, WIDTH))  # sweeps
        assert leased_bytes(active) == 0


SWAPPED = {"swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]}}


@pytest.fixture
def least_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_pass, "SMALLEST_BYTES", 1)


def _kept(run: Offload) -> int:
    activations = run.stats().activations
    assert activations is not None
    return activations.kept


@every_layout
@pytest.mark.parametrize("name", HOOKS)
@pytest.mark.usefixtures("least_swapped")
def test_users_hooks_around_swapped_activations_see_every_tensor_and_decide_what_is_used(
    name: str, layout: str, tmp_path: Path
) -> None:
    plain, ours = build(), build()
    expected = run(plain, *HOOKS[name])
    more = SWAPPED | with_device(layout, "512KB")
    with offload(ours, None, config_of(layout, tmp_path, more), layers="") as active:
        for _ in range(3):
            found = run(ours, *HOOKS[name])
            assert found[0] == expected[0]
            assert all(map(same, expected[1], found[1]))
        assert _kept(active) > 0
        with torch.no_grad():
            ours(torch.ones(3, WIDTH))  # sweeps
        assert leased_bytes(active) == 0


@pytest.mark.usefixtures("least_swapped")
def test_what_a_users_hook_leaves_as_it_is_is_swapped(tmp_path: Path) -> None:
    model = build()
    counts = []
    with offload(model, None, config_of("disk", tmp_path, SWAPPED), layers="") as active:
        model(torch.ones(3, WIDTH)).sum().backward()
        counts.append(_kept(active))
        with saved_tensors_hooks(lambda t: (t, t.detach()), lambda packed: packed[1]):
            model(torch.ones(3, WIDTH)).sum().backward()
        counts.append(_kept(active))
    assert counts[1] >= 2 * counts[0] > 0


def _gradients_with_other_weights(model: nn.Module) -> tuple[list[tuple[int, ...]], list[Tensor]]:
    """Return which weights hooks were shown that double weights and nothing else, and the gradients."""
    shown: list[tuple[int, ...]] = []

    def pack(tensor: Tensor) -> tuple[bool, Tensor]:
        is_weight = tensor.is_leaf and tensor.requires_grad
        if is_weight:
            shown.append(tuple(tensor.shape))
        return is_weight, tensor

    with saved_tensors_hooks(pack, lambda packed: packed[1] * 2 if packed[0] else packed[1]):
        model(torch.ones(3, WIDTH)).sum().backward()
    return shown, [each.grad.clone() for each in model.parameters() if each.grad is not None]


@every_layout
def test_users_hooks_around_operators_that_are_recomputed_see_weights(layout: str, tmp_path: Path) -> None:
    plain, ours = build(), build()
    expected = _gradients_with_other_weights(plain)
    assert expected[0]
    more = {"recompute_config": {"select_recompute": ["tanh"]}} | with_device(layout, "512KB")
    with offload(ours, None, config_of(layout, tmp_path, more), layers="") as active:
        found = _gradients_with_other_weights(ours)
        made = active.stats().recompute
    assert made is not None
    assert made.replaced > 0
    assert found[0] == expected[0]
    assert all(map(same, expected[1], found[1]))


def test_an_alias_that_a_users_hook_keeps_does_not_keep_its_bundle(tmp_path: Path) -> None:
    model = build()
    config = config_of("disk", tmp_path)
    with offload(model, None, config) as active, saved_tensors_hooks(lambda t: t, lambda t: t):
        loss = model(torch.ones(3, WIDTH)).sum()
        leased = leased_bytes(active)
        assert leased <= 2 * WIDTH * WIDTH * 4
        loss.backward()


def _written_in_forward(weight: Tensor) -> None:
    with torch.no_grad():
        weight.mul_(1.5)


class Writing(nn.Linear):
    """Writes to its weight before it computes with it."""

    def forward(self, inputs: Tensor) -> Tensor:
        _written_in_forward(self.weight)
        return super().forward(inputs)


@every_layout
@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("activations", [{}, SWAPPED], ids=["kept", "swapped"])
def test_save_on_cpu_goes_on_where_a_weight_is_written_to_after_the_forward(
    activations: dict[str, object], is_pinned: bool, layout: str, tmp_path: Path
) -> None:
    def gradients(model: nn.Module) -> list[Tensor]:
        inputs = torch.ones(3, WIDTH)
        model.zero_grad()
        with save_on_cpu(pin_memory=is_pinned):
            loss = model(model(inputs)).square().sum()
        _written_in_forward(next(model.parameters()))
        loss.backward()
        return [each.grad.clone() for each in model.parameters() if each.grad is not None]

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(WIDTH, WIDTH), Writing(WIDTH, WIDTH)))
    plain, ours = models
    more = activations | with_device(layout, "512KB")
    with offload(ours, None, config_of(layout, tmp_path, more), layers="" if activations else None):
        for _ in range(2):
            assert all(map(same, gradients(plain), gradients(ours)))
