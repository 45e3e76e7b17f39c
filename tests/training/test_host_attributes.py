"""Tensors that a module takes from elsewhere than its arguments: PyTorch's error says whose they are."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import target
from tests.training.host_models import WIDTH, has_device
from tests.training.twins import LAYOUTS, config_of, is_on_accelerator, with_rest
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload

ON_DEVICE = [layout for layout in LAYOUTS if has_device(layout)][:1]


@dataclass
class Fields:
    """Has a tensor in a field."""

    scale: Tensor


class Helper:
    """An object of the program."""

    def __init__(self, scale: Tensor) -> None:
        self.inner = [{"scale": scale}]


class Scaled(nn.Module):
    """Multiplies with something that it was not given."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(WIDTH, WIDTH)
        self.kept: Any = None
        self.read: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = self.line(x)
        return made if self.read is None else made * self.read()


class Leaving(nn.Linear):
    """Leaves what it has computed with the next module."""

    def __init__(self, to: Scaled) -> None:
        super().__init__(WIDTH, WIDTH)
        self.to_whom = (to,)

    def forward(self, x: Tensor) -> Tensor:
        """Transform."""
        made: Tensor = super().forward(x)
        self.to_whom[0].kept = made.detach()[0]
        return made


KEPT: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "attribute": (lambda scale: scale, "keeps kept elsewhere"),
    "list": (lambda scale: [None, (scale,)], "keeps kept[1][0] elsewhere"),
    "dict": (lambda scale: {"scale": scale, 3: 4}, "keeps kept['scale'] elsewhere"),
    "dataclass": (Fields, "keeps kept.scale elsewhere"),
    "object": (Helper, "keeps kept.inner[0]['scale'] elsewhere"),
    "closure": (lambda _: None, "what it takes from a closure"),
}


def _model() -> tuple[nn.Sequential, Leaving, Scaled]:
    scaled = Scaled()
    leaving = Leaving(scaled)
    return nn.Sequential(leaving, scaled, nn.LayerNorm(WIDTH)), leaving, scaled


@pytest.mark.parametrize("layout", ON_DEVICE)
@pytest.mark.parametrize("kept", KEPT)
@pytest.mark.parametrize("side", ["cpu", "device"])
def test_an_error_names_what_a_module_keeps_elsewhere(
    side: str, kept: str, layout: str, tmp_path: Path
) -> None:
    keep, text = KEPT[kept]
    model, leaving, scaled = _model()
    config = with_rest(config_of(layout, tmp_path), model)
    placement = {"1": "cpu"} if side == "cpu" else {"0": "cpu"}
    with offload(model, None, config, placement=placement), DeviceBudget("1GiB", mixing="raise"):
        x = torch.ones(2, WIDTH)
        model(x)
        scale = scaled.kept
        scaled.kept, scaled.read = keep(scale), lambda: scale
        leaving.to_whom = (Scaled(),)
        with pytest.raises(RuntimeError, match="same device") as raised:
            model(x)
        notes = [each for each in raised.value.__notes__ if each.startswith("placement: ")]
        assert len(notes) == 1
        where = "cpu" if side == "cpu" else target.accelerator or "cpu"
        assert f"placement: '1' (a Scaled) computes on '{where}'" in notes[0]
        assert text in notes[0]
        scaled.read = None
        assert model(x).shape == (2, WIDTH)


@pytest.mark.parametrize("layout", ON_DEVICE)
def test_other_errors_and_errors_that_are_handled_around_a_call_get_no_note(
    layout: str, tmp_path: Path
) -> None:
    model, _, scaled = _model()
    config = with_rest(config_of(layout, tmp_path), model)
    with offload(model, None, config, placement={"1": "cpu"}):
        x = torch.ones(2, WIDTH)
        mixed = RuntimeError("expected all tensors to be on the same device")
        try:
            raise mixed
        except RuntimeError:
            model(x)
        assert not hasattr(mixed, "__notes__")

        def fail() -> Tensor:
            raise RuntimeError("on purpose")

        scaled.read = fail
        with pytest.raises(RuntimeError, match="on purpose") as raised:
            model(x)
        assert not [each for each in getattr(raised.value, "__notes__", ()) if "placement" in each]


@pytest.mark.skipif(not is_on_accelerator, reason="emulated memory does not say where it is")
@pytest.mark.parametrize("layout", ON_DEVICE)
def test_what_a_host_module_keeps_on_the_accelerator_is_warned_of(
    layout: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scaled = Scaled()
    scaled.kept = Fields(torch.ones(WIDTH))
    model = nn.Sequential(scaled, nn.LSTM(WIDTH, WIDTH))
    config = with_rest(config_of(layout, tmp_path, {"max_device_memory": "1MB"}), model)
    with (
        caplog.at_level(logging.WARNING, "tierstore"),
        offload(model, None, config, placement={"[01]": "cpu"}),
    ):
        pass
    warned = [each for each in caplog.messages if each.startswith("placement")]
    assert len(warned) == 1
    assert "'0' computes on the host, and keeps kept.scale on" in warned[0]
