"""Inference keeps on the device what fits there, from one forward pass to the next."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import config_of, is_on_accelerator, same
from tierstore.testing.memory import DeviceBudget
from tierstore.training import Offload, offload

WIDTH, LAYERS = 256, 11


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


MODEL_BYTES = sum(each.nbytes for each in _model().parameters())


def _inputs(rows: int) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)


def _moved_up(run: Offload) -> float:
    """Return the bytes that were copied to the device so far."""
    return sum(
        value
        for name, value in run.metrics().items()
        if name.startswith("tierstore_traffic_bytes_total") and 'target="device"' in name
    )


def _each_moves(run: Offload, model: nn.Module, rows: Iterator[int] | list[int]) -> list[float]:
    """Run the model on so many rows each time; return what each moved, as a share of the model."""
    found, plain = [], _model()
    for each in rows:
        before = _moved_up(run)
        with torch.no_grad():
            ours, expected = model(_inputs(each)), plain(_inputs(each))
        found.append((_moved_up(run) - before) / MODEL_BYTES)
        assert same(ours, expected)
    return found


def _config(tiers: str, path: Path, device_bytes: int) -> dict[str, object]:
    more = {"offload_cpu_size": 2 * MODEL_BYTES, "max_device_memory": device_bytes}
    return config_of(tiers, path, more)


ROWS = {
    "equal": [4] * 8,
    "one more each time": list(range(4, 12)),
    "some fewer": [8, 3, 8, 1, 8, 5, 8, 8],
}


@pytest.mark.parametrize("tiers", ["device", "three"])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("has_optimizer", [False, True])
def test_of_a_model_that_fits_twice_nothing_moves_after_its_first_forward(
    tiers: str, rows: list[int], has_optimizer: bool, tmp_path: Path
) -> None:
    model = _model()
    optimizer = torch.optim.Adam(model.parameters()) if has_optimizer else None
    with offload(model, optimizer, _config(tiers, tmp_path, 4 * MODEL_BYTES)) as run:
        moved = _each_moves(run, model, rows)
    assert moved[0] <= 1  # some may begin there, where nothing below has room for all that is trained
    assert moved[1:] == [0] * 7


class Parted(nn.Module):
    """A model of which a program calls the whole, in two ways, or the first half."""

    def __init__(self) -> None:
        super().__init__()
        layers = _model()
        self.first, self.second = layers[: LAYERS // 2], layers[LAYERS // 2 :]

    def forward(self, x: Tensor, *, is_decoding: bool = False) -> Tensor:
        """Transform ``(rows, WIDTH)``."""
        found: Tensor = self.second(x if is_decoding else self.first(x))
        return found


@pytest.mark.parametrize("tiers", ["device", "three"])
def test_parts_and_ways_that_come_later_bring_nothing_that_is_there(tiers: str, tmp_path: Path) -> None:
    """As to generate from an encoder and a decoder: first a part is called, then the whole in some ways."""
    model = Parted()
    with offload(model, None, _config(tiers, tmp_path, 4 * MODEL_BYTES)) as run, torch.no_grad():
        for _ in range(3):
            encoded = model.first(_inputs(4))
            model(encoded, is_decoding=True)
            model(_inputs(4))
        moved_bytes = _moved_up(run)
    assert moved_bytes <= MODEL_BYTES


class Remembering(nn.Module):
    """A model that is given what its layers have made so far, and adds to it what they make now."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _model()

    def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
        """Transform ``(rows, 1, WIDTH)``; what is remembered is ``(rows, calls, WIDTH)`` for each layer."""
        for number, layer in enumerate(self.layers):
            x = layer(x)
            memory[number] = torch.cat([memory[number], x], 1)
            x = x + memory[number].mean(1, keepdim=True)
        return x


CALLS, BATCH = 40, 4
MEMORY_BYTES = LAYERS * CALLS * BATCH * WIDTH * 4  # 0.6 of the model


@pytest.mark.skipif(is_on_accelerator, reason="an independent meter sees an emulated device only")
@pytest.mark.parametrize("share", [0.9, 1.0, 1.2, 1.5, 2.0])
def test_what_is_remembered_from_call_to_call_takes_the_place_of_the_model(
    share: float, tmp_path: Path
) -> None:
    """As keys and values do while tokens are generated, three times in turn."""
    torch.manual_seed(0)
    limit_bytes = int(share * MODEL_BYTES)
    model = Remembering()
    with (
        DeviceBudget(limit_bytes) as meter,
        offload(model, None, _config("device", tmp_path, limit_bytes)) as run,
        torch.no_grad(),
    ):
        for _ in range(3):
            x, memory = torch.ones(BATCH, 1, WIDTH), [torch.ones(BATCH, 0, WIDTH)] * LAYERS
            for _ in range(CALLS):
                x = model(x, memory)
            del x, memory
        moved = _moved_up(run) / MODEL_BYTES
    assert meter.peak_bytes > min(0.8 * limit_bytes, MODEL_BYTES + MEMORY_BYTES)
    assert moved <= (1 if share == 2 else 3 * CALLS)


def test_of_one_that_does_not_fit_a_part_stays(tmp_path: Path) -> None:
    model = _model()
    with offload(model, None, _config("device", tmp_path, MODEL_BYTES // 2)) as run:
        moved = _each_moves(run, model, [4] * 10)
    assert sum(moved[4:]) / 6 < 0.8  # what was fetched ahead varies from one to the next


def test_one_that_fits_to_the_byte_only_moves_little(tmp_path: Path) -> None:
    """Slots begin on pages and lie where there is room: what fits otherwise may not quite."""
    widths = [128] * 8 + [512] * 2 + [128] * 12
    model = nn.Sequential(*(nn.Linear(*pair) for pair in itertools.pairwise(widths)))
    model_bytes = sum(each.nbytes for each in model.parameters())
    config = config_of("disk", tmp_path, {"offload_cpu_size": model_bytes + model_bytes // 50})
    with torch.no_grad(), offload(model, None, config) as run:
        read = []
        for _ in range(8):
            model(torch.ones(4, 128))
            read.append(run.store.stats().traffic["disk", "host"].nbytes)
    assert (read[-1] - read[-5]) / 4 < 0.5 * model_bytes  # all of it without a plan


def test_what_is_kept_leaves_training_its_budget(tmp_path: Path) -> None:
    """It is the training's first step that must not find the device full of what an evaluation has kept."""
    model, limit_bytes = _model(), 3 * MODEL_BYTES // 2  # activations are half of the model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        DeviceBudget(limit_bytes),
        offload(model, optimizer, _config("device", tmp_path, limit_bytes)) as run,
    ):
        with torch.no_grad():
            for _ in range(4):
                model(_inputs(4))
        assert run.store.stats().tiers["device"].charged_bytes > MODEL_BYTES / 2
        for _ in range(4):
            model(_inputs(WIDTH // 2)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("kind", [ValueError, torch.OutOfMemoryError])
def test_of_a_forward_that_failed_nothing_is_learned(kind: type[Exception], tmp_path: Path) -> None:
    """What it had stays, as where a hook raises the features that are wanted, unless it was in the way."""
    model = _model()
    handle = model[2].register_forward_hook(lambda *_: (_ for _ in ()).throw(kind("no")))
    with offload(model, None, _config("device", tmp_path, 4 * MODEL_BYTES)) as run:
        for number in range(3):
            before = _moved_up(run)
            with pytest.raises(kind, match="no"), torch.no_grad():
                model(_inputs(4))
            is_moved = not number or kind is not ValueError
            assert (_moved_up(run) > before) == is_moved
        kept_bytes = run.store.stats().tiers["device"].charged_bytes
        assert (kept_bytes > 0) == (kind is ValueError)
        handle.remove()
        moved = _each_moves(run, model, [4] * 4)
    assert moved[2:] == [0] * 2


@pytest.mark.parametrize("rows", [1, 16, 256, 1024])
@pytest.mark.parametrize("wide", [WIDTH, 4 * WIDTH, 16 * WIDTH])
@pytest.mark.parametrize("at", [0, 2 * LAYERS, 4 * LAYERS], ids=["first", "middle", "last"])
def test_what_a_first_forward_keeps_is_not_in_the_way_of_wider_layers(
    at: int, wide: int, rows: int, tmp_path: Path
) -> None:
    layers = [layer for _ in range(4) for layer in _model()]
    layers[at:at] = [nn.Linear(WIDTH, wide), *([nn.Linear(wide, WIDTH)] if at < 4 * LAYERS else [])]
    model = nn.Sequential(*layers)
    largest_bytes = max(sum(each.nbytes for each in layer.parameters()) for layer in layers)
    # The inputs, what a layer is given and what it makes, and the margin.
    limit_bytes = largest_bytes + int(1.15 * rows * (2 * WIDTH + wide) * 4)
    x = _inputs(rows)
    with torch.no_grad():
        expected = model(x)
    config = _config("device", tmp_path, limit_bytes) | {"offload_cpu_size": "1GB"}
    with DeviceBudget(limit_bytes), offload(model, None, config), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected)


class _Projected(nn.Module):
    """Multiplies by a matrix that is a buffer."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.register_buffer("matrix", torch.linspace(-1, 1, WIDTH * wide).reshape(WIDTH, wide))

    def forward(self, x: Tensor) -> Tensor:
        """Make ``(rows, wide)``."""
        return x @ self.get_buffer("matrix")


SIDE, WIDER = 8, 16
LAST = {
    "buffer": lambda: _Projected(WIDER * WIDTH),
    "head": lambda: nn.Linear(WIDTH, WIDER * WIDTH),
    "transposed": lambda: nn.Sequential(
        nn.Unflatten(1, (4, SIDE, SIDE)), nn.ConvTranspose2d(4, 4, 4, stride=4)
    ),
    "transposed groups": lambda: nn.Sequential(
        nn.Unflatten(1, (4, SIDE, SIDE)), nn.ConvTranspose2d(4, 16, 2, stride=2, groups=4)
    ),
}


@pytest.mark.parametrize("ignored", [(), ("22*",)], ids=["in-store", "ignored"])
@pytest.mark.parametrize("last", LAST.values(), ids=LAST.keys())
def test_what_a_first_forward_keeps_is_not_in_the_way_of_any_wide_layer(
    last: Callable[[], nn.Module], ignored: tuple[str, ...], tmp_path: Path
) -> None:
    model = nn.Sequential(*_model(), *_model(), last())
    x = _inputs(512)
    with torch.no_grad():
        expected = model(x)
    # What is ignored is older than the budget, and does not count.
    own = () if ignored else (*model[-1].parameters(), *model[-1].buffers())
    own_bytes = sum(each.nbytes for each in own)
    limit_bytes = own_bytes + 2 * WIDTH * WIDTH * 4 + int(1.1 * (x.nbytes + expected.nbytes))
    config = _config("device", tmp_path, limit_bytes) | {"offload_cpu_size": "1GB", "ignored": list(ignored)}
    with DeviceBudget(limit_bytes), offload(model, None, config), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(x), expected)
