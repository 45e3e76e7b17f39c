"""`generate` of transformers says the same words while the model is offloaded, with the model's own cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from tests.integrations.transformers_kinds import built, tiers, tokens
from tests.training.twins import LAYOUTS, assert_equal_values
from tierstore.training import offload

MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "without a cache": {"do_sample": False, "use_cache": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams that sample": {"num_beams": 2, "do_sample": True},
    "a cache that is made before": {"do_sample": False, "cache_implementation": "static"},
}


@pytest.mark.parametrize("layout", ["three", "disk"] if "disk" in LAYOUTS else list(LAYOUTS))
@pytest.mark.parametrize("kind", ["llama", "gpt2", "t5"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.filterwarnings("ignore:.*return_dict_in_generate")
def test_every_mode_says_the_same_words(mode: str, kind: str, layout: str, tmp_path: Path) -> None:
    if kind == "t5" and "static" in MODES[mode].values():
        pytest.skip("it has no such cache")
    options = {
        "max_new_tokens": 5,
        "min_new_tokens": 5,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    found: list[tuple[Any, list[Any]]] = []
    for is_ours in (False, True):
        model: Any = built(kind)
        if is_ours:
            with offload(model, None, tiers(layout, tmp_path)):
                torch.manual_seed(3)
                result = model.generate(tokens(), **options, **MODES[mode])
        else:
            torch.manual_seed(3)
            result = model.generate(tokens(), **options, **MODES[mode])
        found.append((result.sequences, list(result.logits)))
    plain, ours = found
    assert_equal_values(plain, ours, "words")


@pytest.mark.parametrize("mode", ["greedy", "without a cache", "beams"])
def test_of_a_model_that_fits_nothing_moves_while_tokens_are_generated(mode: str, tmp_path: Path) -> None:
    model: Any = built("llama")
    nbytes = sum(each.nbytes for each in model.parameters())
    config = {**tiers("device", tmp_path), "max_device_memory": 40 * nbytes}
    with offload(model, None, config) as run:
        for _ in range(2):
            model.generate(tokens(), max_new_tokens=3, min_new_tokens=3, **MODES[mode])
        moved = run.metrics()
        model.generate(tokens(), max_new_tokens=48, min_new_tokens=48, **MODES[mode])
        later = run.metrics()
    up = [
        name for name in moved if name.startswith("tierstore_traffic_bytes_total") and 'get="device"' in name
    ]
    assert up
    assert 0 < sum(moved[name] for name in up) <= 2.1 * nbytes  # buffers, too
    assert {name: later[name] for name in up} == {name: moved[name] for name in up}
