"""Packed sequences that a module on the host is given and returns: PyTorch wants their counts on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tests.accelerator import DEVICE
from tests.training.twins import same
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

LENGTHS = torch.tensor([1, 3, 2])


class _Over(nn.Module):
    """Computes with what is packed."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(8, 8)

    def forward(self, packed: PackedSequence) -> tuple[PackedSequence, int]:
        """Return packed sequences, in a tuple."""
        assert packed.batch_sizes.device.type == "cpu"
        assert packed.data.device.type == "cpu"
        found = PackedSequence(
            self.line(packed.data), packed.batch_sizes, packed.sorted_indices, packed.unsorted_indices
        )
        return found, 3


class _Net(nn.Module):
    """Packs, lets the host compute, and unpacks."""

    def __init__(self, *, crosses: bool, is_lstm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)
        self.inner: nn.Module = nn.LSTM(8, 8) if is_lstm else _Over()
        self._crosses = crosses

    def forward(self, x: Tensor) -> Tensor:
        """Compute."""
        packed = pack_padded_sequence(self.first(x), LENGTHS, batch_first=True, enforce_sorted=False)
        found, _ = self.inner(packed.cpu() if self._crosses else packed)
        padded, lengths = pad_packed_sequence(
            found.to(device=DEVICE) if self._crosses else found, batch_first=True
        )
        assert lengths.tolist() == LENGTHS.tolist()
        return self.last(padded)  # type: ignore[no-any-return]


def _train(net: nn.Module, device: str) -> list[Tensor]:
    optimizer = torch.optim.Adam(net.parameters(), foreach=False)
    for step in range(3):
        x = torch.randn(3, 3, 4, generator=torch.Generator().manual_seed(step)).to(device)
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [each.detach().cpu() for each in net.parameters()]


def _config(path: Path, device: str) -> dict[str, object]:
    used = torch.accelerator.memory_allocated() if device == "openreg" else 0
    return {
        "device": device,
        "max_device_memory": used + 2**20,
        "offload_cpu_size": "4MB",
        "offload_disk_size": 0,
        "offload_path": str(path),
    }


def test_they_cross_as_their_own_to_brings_them(tmp_path: Path) -> None:
    twin, ours = _Net(crosses=True), _Net(crosses=False)
    twin.first.to(DEVICE)
    twin.last.to(DEVICE)
    expected = _train(twin, str(DEVICE))
    with offload(ours, None, _config(tmp_path, "openreg"), placement={"inner": "cpu"}):
        found = _train(ours, str(DEVICE))
    assert all(map(same, expected, found))


@pytest.mark.parametrize("is_lstm", [False, True])
def test_on_the_emulated_device_all_of_them_cross(tmp_path: Path, is_lstm: bool) -> None:
    expected = _train(_Net(crosses=False, is_lstm=is_lstm), "cpu")
    ours = _Net(crosses=False, is_lstm=is_lstm)
    with (
        offload(ours, None, _config(tmp_path, "emulated"), placement={"inner": "cpu"}),
        DeviceBudget("1GiB", mixing="raise"),
    ):
        found = _train(ours, "cpu")
    assert all(map(same, expected, found))
