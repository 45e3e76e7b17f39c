"""Swap and recomputation beside ``fully_shard``: bit for bit, and of no more than the activations."""

from __future__ import annotations

from typing import Any

import pytest
from torch import distributed

from tests.training.rank_shard_activations import SECTIONS, TRIED
from tests.training.test_ranks import led

pytestmark = pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")

Found = list[Any]
_OTHERS = {"mixed precision", "tensor parallel"}
"""Whose activations are smaller than those of the model alone."""


@pytest.fixture(scope="module", name="found")
def _found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    scenario = "shards_and_activations:2"
    lives: Found = led(tmp_path_factory.mktemp("activations"), scenario)[scenario]
    assert not [each for each in lives if isinstance(each, str)], lives
    return lives


@pytest.mark.parametrize("what", SECTIONS)
@pytest.mark.parametrize("name", TRIED)
def test_losses_shards_and_state_are_those_of_fsdp(found: Found, name: str, what: str) -> None:
    assert [each[f"{name}, {what}"]["differs"] for each in found] == [[]] * 2


@pytest.mark.parametrize("name", TRIED)
def test_what_fsdp_gathers_is_no_activation(found: Found, name: str) -> None:
    """As many bytes are swapped as of the model that nobody has sharded."""
    for each in found:
        for what in SECTIONS:
            moved, alone = each[f"{name}, {what}"]["moved"], each[f"{name}, {what}"]["moved alone"]
            assert moved["recomputed"] is alone["recomputed"] is (what != "swapped")
            assert name in _OTHERS or moved == alone
            assert moved.get("kept bytes", 0) <= alone.get("kept bytes", 0)
            assert what == "recomputed" or moved["kept bytes"] > 100_000
