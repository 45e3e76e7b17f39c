"""Models without memory for parameters: buffers are computed, and files or initial values give the rest."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.training.twins import assert_equal_models, blocks, config_of, every_layout
from tierstore.errors import UsageError
from tierstore.training import InitialValues, offload, without_values


class WithTables(nn.Module):
    """Modules of every kind that PyTorch has: shared weights, tables, several parameters each."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 8, padding_idx=0)
        self.attention = nn.MultiheadAttention(8, 2)
        self.recurrent = nn.GRU(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(8), requires_grad=False)
        frequencies = 1.0 / 10 ** torch.arange(0, 8, 2, dtype=torch.float32)
        self.register_buffer("table", frequencies, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Say something of ``(time, batch)`` tokens."""
        found, _ = self.recurrent(self.embedding(tokens) * self.scale)
        found, _ = self.attention(found, found, found)
        logits: Tensor = self.head(self.norm(found.flatten(0, 1)))
        return logits + self.get_buffer("table").sum()

    def reset_parameters(self) -> None:
        """Initialise what is this module's own."""
        nn.init.ones_(self.scale)


def plain() -> WithTables:
    torch.manual_seed(0)
    return WithTables()


@every_layout
def test_files_give_values_and_tables_are_the_model_s_own(layout: str, tmp_path: Path) -> None:
    expected = plain()
    state = expected.state_dict()
    del state["head.weight"]  # as writers leave out what is tied
    save_file(state, tmp_path / "model.safetensors")
    with without_values():
        model = WithTables()
    recurrent = set(model.recurrent.parameters())  # which refer to their own
    assert all(each.is_meta for each in model.parameters() if each not in recurrent)
    assert not any(each.is_meta for each in model.buffers())
    assert model.head.weight is model.embedding.weight
    assert not model.scale.requires_grad
    tokens = torch.arange(6).view(3, 2)
    with offload(model, None, config_of(layout, tmp_path), weights=tmp_path), torch.no_grad():
        assert torch.equal(model(tokens), expected(tokens))
    for one in (expected, model):  # statistics of the norm
        one.norm.reset_running_stats()
    assert_equal_models(expected, model)


def test_under_the_meta_device_the_message_says_how_to_build_it(tmp_path: Path) -> None:
    state = plain().state_dict()
    del state["head.weight"]
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = WithTables()
    with pytest.raises(
        UsageError, match=r"table\. Build the model under tierstore\.training\.without_values"
    ):
        offload(model, None, config_of("host", tmp_path), weights=tmp_path)


def test_a_parameter_stays_the_same_object_with_what_is_noted_at_it() -> None:
    made = nn.Parameter(torch.ones(3))
    made.note = "kept"  # type: ignore[attr-defined]
    with without_values():
        first, second = nn.Module(), nn.Module()
        first.weight = made
        second.weight = made
    assert first.weight is second.weight is made
    assert made.is_meta
    assert made.note == "kept"  # type: ignore[attr-defined]


def test_what_a_graph_has_keeps_its_memory() -> None:
    made = nn.Parameter(torch.ones(3))
    product = (made * 2).sum()
    with without_values():
        module = nn.Module()
        module.weight = made
    assert torch.equal(made, torch.ones(3))
    product.backward()


def test_other_threads_and_later_models_have_values() -> None:
    found: list[nn.Module] = []

    def ended() -> None:
        raise RuntimeError("on purpose")

    with pytest.raises(RuntimeError, match="on purpose"), without_values():  # noqa: PT012 - it is what ends it
        thread = threading.Thread(target=lambda: found.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
        ended()
    found.append(nn.Linear(2, 2))
    assert not any(each.is_meta for module in found for each in module.parameters())


# ---------------------------------------------------------------------- initial values


def opened(build: Callable[[], nn.Module], path: Path, layout: str, seed: int = 3) -> nn.Module:
    torch.manual_seed(seed)
    with without_values():
        model = build()
    with offload(model, None, config_of(layout, path), weights=InitialValues(model)):
        pass
    return model


@every_layout
@pytest.mark.parametrize("build", [WithTables, blocks])
def test_initial_values_are_those_of_the_seed(
    build: Callable[[], nn.Module], layout: str, tmp_path: Path
) -> None:
    first, again, other = (opened(build, tmp_path, layout, seed) for seed in (3, 3, 4))
    assert_equal_models(first, again)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    torch.manual_seed(0)
    for (name, expected), found in zip(build().named_parameters(), first.parameters(), strict=True):
        if expected.numel() > 16:
            assert found.std().item() == pytest.approx(expected.std().item(), rel=0.5, abs=1e-9), name


def test_tied_and_constant_values_are_the_model_s_own(tmp_path: Path) -> None:
    model = opened(WithTables, tmp_path, "host")
    assert isinstance(model, WithTables)
    assert model.head.weight is model.embedding.weight
    assert torch.equal(model.embedding.weight[0], torch.zeros(8))
    assert torch.equal(model.scale, torch.ones(8))
    assert torch.equal(model.attention.out_proj.bias, torch.zeros(8))  # which the module around it says


def test_what_nobody_initialises_is_refused_by_name(tmp_path: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

    with pytest.raises(UsageError, match=r"nobody gives '0\.weight' initial values: Bare"):
        opened(lambda: nn.Sequential(Bare()), tmp_path, "host")


def test_what_is_no_source_of_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="weights is a dict; accepted: a path"):
        offload(blocks(), None, config_of("host", tmp_path), weights={})  # type: ignore[arg-type]
