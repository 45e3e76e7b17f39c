"""The repeated layers of a model are found, or named."""

from __future__ import annotations

import pytest
from torch import nn

from tierstore.errors import UsageError
from tierstore.training.activations.config.layers import find_layers


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), nn.ReLU())


class Holder(nn.Module):
    """A module with some children."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def names(model: nn.Module, given: str | list[str] | None = None) -> list[str]:
    return list(find_layers(model, given))


@pytest.mark.parametrize("kind", [nn.ModuleList, lambda children: nn.Sequential(*children)])
def test_the_only_container_of_like_modules_is_found(kind: type[nn.ModuleList]) -> None:
    model = Holder(embedding=nn.Embedding(2, 2), model=Holder(layers=kind([Holder(), Holder(), Holder()])))
    assert names(model) == ["model.layers.0", "model.layers.1", "model.layers.2"]


def test_what_lies_inside_a_layer_is_no_layer() -> None:
    layers = nn.ModuleList(Holder(experts=nn.ModuleList([block(), block()])) for _ in range(2))
    assert names(Holder(layers=layers)) == ["layers.0", "layers.1"]


def test_blocks_go_before_containers_of_simple_modules() -> None:
    model = Holder(heads=nn.ModuleList([nn.Linear(2, 2)]), layers=nn.ModuleList([Holder(a=nn.ReLU())]))
    assert names(model) == ["layers.0"]


def test_a_sequence_of_one_or_of_unlike_modules_is_none() -> None:
    model = Holder(head=nn.Sequential(nn.Linear(2, 2)), stem=block(), layers=nn.ModuleList([Holder()]))
    assert names(model) == ["layers.0"]


def test_several_candidates_are_named() -> None:
    model = Holder(encoder=nn.ModuleList([Holder()]), decoder=nn.ModuleList([Holder()]))
    with pytest.raises(UsageError, match="'encoder', 'decoder'"):
        names(model)
    assert names(model, "decoder") == ["decoder.0"]
    assert names(model, ["encoder", "decoder"]) == ["encoder.0", "decoder.0"]


def test_no_candidate_says_what_to_do() -> None:
    with pytest.raises(UsageError, match=r"layers='model\.layers'"):
        names(Holder(only=nn.Linear(2, 2)))
    with pytest.raises(UsageError, match=r"layers='model\.layers'"):
        names(Holder(layers=nn.ModuleList([Holder()])), [])


def test_a_name_that_is_not_there_names_those_that_are() -> None:
    with pytest.raises(UsageError, match="containers there are: 'layers'"):
        names(Holder(layers=nn.ModuleList([Holder()])), "layer")


def test_a_name_without_children_is_refused() -> None:
    with pytest.raises(UsageError, match="a Linear without children"):
        names(Holder(layers=nn.ModuleList([Holder()]), head=nn.Linear(2, 2)), "head")


def test_the_model_itself_can_be_named() -> None:
    assert names(nn.Sequential(block(), nn.Linear(2, 2)), "") == ["0", "1"]
    assert names(nn.Sequential(block(), block())) == ["0", "1"]
