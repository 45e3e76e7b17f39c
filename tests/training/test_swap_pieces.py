"""Pieces of one storage that change for themselves, as recurrent cells use them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.swap_models import assert_same_bits, config, whole_layers

DIM = 64


class _Cell(nn.Module):
    def __init__(self, kind: type[nn.LSTMCell | nn.GRUCell]) -> None:
        super().__init__()
        self.cell = kind(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        state = self.cell(x)
        output: Tensor = x + (state[0] if isinstance(state, tuple) else state)
        return output


class _Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.linear(x).unsafe_chunk(2, -1)
        output: Tensor = first.sigmoid_() * second.sigmoid_()
        return output


class _Stack(nn.Module):
    def __init__(self, layer: type[nn.Module], *arguments: object) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(*arguments) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _train(model: nn.Module) -> list[Tensor]:
    losses = []
    for number in range(3):
        x = torch.randn(64, DIM, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("store", ["roomy", "short of device memory"])
@pytest.mark.parametrize(
    ("layer", "arguments"), [(_Cell, (nn.LSTMCell,)), (_Cell, (nn.GRUCell,)), (_Pieces, ())]
)
def test_pieces_that_share_a_storage_are_kept_as_each_is(
    layer: type[nn.Module], arguments: tuple[object, ...], store: str, tmp_path: Path
) -> None:
    more = {"max_device_memory": "200KB"} if store != "roomy" else {}
    assert_same_bits(
        lambda: _Stack(layer, *arguments), _train, config(tmp_path, whole_layers(1), store, **more)
    )
