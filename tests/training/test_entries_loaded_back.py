"""An entry of a state dict that is copied to what it is one with, or the other way round."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.training.twins import config_of, every_layout, same
from tierstore.training import offload

WIDTH = 48

MADE: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.randn(WIDTH, WIDTH),
    "expanded": lambda: torch.randn(1, WIDTH).expand(WIDTH, WIDTH),
    "expanded in the midst": lambda: torch.randn(WIDTH, 1, 3).expand(WIDTH, WIDTH, 3),
    "transposed": lambda: torch.randn(WIDTH, WIDTH).t(),
    "with gaps": lambda: torch.randn(WIDTH, 2 * WIDTH)[:, ::2],
    "a number": lambda: torch.tensor(3.0),
    "empty": lambda: torch.empty(0, WIDTH),
}


class Holder(nn.Module):
    """A parameter and a buffer."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(make(), requires_grad=False)
        self.register_buffer("table", make())
        self.large = nn.Linear(WIDTH, WIDTH)


def load_all(model: nn.Module) -> None:
    model.load_state_dict(model.state_dict())


def load_kept(model: nn.Module) -> None:
    kept = model.state_dict()
    with torch.no_grad():
        model.get_parameter("large.weight").add_(1)
    for _ in range(2):
        model.load_state_dict(kept)


def to_the_entry(model: nn.Module) -> None:
    kept = model.state_dict()
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        kept[name].copy_(each)


def between_entries(model: nn.Module) -> None:
    first, second = model.state_dict(), model.state_dict()
    for name, each in first.items():
        each.copy_(second[name])
        each.copy_(each)


ACTS: dict[str, Callable[[nn.Module], None]] = {
    "load all": load_all,
    "load kept": load_kept,
    "to the entry": to_the_entry,
    "between entries": between_entries,
}


@every_layout
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("made", MADE)
def test_what_is_copied_to_itself_stays(made: str, act: str, layout: str, tmp_path: Path) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Holder(MADE[made]))
    plain, ours = models
    with torch.no_grad():
        ACTS[act](plain)
    with offload(ours, None, config_of(layout, tmp_path)), torch.no_grad():
        versions = [each._version for each in ours.state_dict(keep_vars=True).values()]
        ACTS[act](ours)
        if act.startswith("load"):
            for each, before in zip(ours.state_dict(keep_vars=True).values(), versions, strict=True):
                assert each._version > before
    for expected, found in zip(plain.state_dict().values(), ours.state_dict().values(), strict=True):
        assert same(expected, found)
        assert expected.stride() == found.stride()


@every_layout
def test_another_expanded_tensor_is_refused_as_in_plain_pytorch(layout: str, tmp_path: Path) -> None:
    model = Holder(MADE["expanded"])
    with offload(model, None, config_of(layout, tmp_path)):
        kept = model.state_dict()
        kept["weight"] = kept["weight"].clone()
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            model.load_state_dict(kept)
