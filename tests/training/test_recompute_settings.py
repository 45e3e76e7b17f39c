"""What a configuration of `recompute` says, and what is said of it in the log."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from torch import nn

from tests.training.recompute_models import (
    MODELS,
    LlamaLayer,
    hooks_of,
    inputs,
)
from tierstore.errors import ConfigError, UsageError
from tierstore.training import RecomputeConfig, recompute


def llama(count: int = 3) -> nn.Module:
    """Return a model whose layers run once each."""
    return nn.Sequential(*(LlamaLayer() for _ in range(count)))


# ---------------------------------------------------------------------- configuration


def test_a_yaml_file_says_what_where_and_how_many_stages(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(
        "parallel_config: {pipeline_stage: 2}\n"
        "recompute_config:\n"
        "  recompute: [1, 0]\n"
        "  select_recompute: {'feed_forward\\.mul': [2, 1]}\n"
    )
    model = llama(4)
    with caplog.at_level(logging.INFO, "tierstore"), recompute(model, path) as run:
        model(inputs()).sum().backward()
    assert run.stats().forwards == 1
    assert run.stats().replaced == 2
    assert [text for text in caplog.messages if text.startswith("Set ")] == [
        "Set full recompute at layer 0",
        "Set select recompute on at layer 1: feed_forward.mul",
        "Set select recompute on at layer 2: feed_forward.mul",
    ]
    assert "Formative layer_recompute: [[1, 0]]" in caplog.messages


def test_arguments_are_heard_above_the_document() -> None:
    document = {"parallel_config": {"pipeline_stage": 4}, "recompute_config": {"recompute": [1, 0]}}
    with recompute(llama(4), document, pipeline_stage=2) as run:
        assert len(run._regions) == 1


def test_with_swap_on_numbers_are_layers(caplog: pytest.LogCaptureFixture) -> None:
    document = {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": [1]}]},
        "recompute_config": {"recompute": [2], "select_recompute": {"feed_forward": [0, 3]}},
    }
    model = llama(4)
    with caplog.at_level(logging.INFO, "tierstore"), recompute(model, document) as run:
        model(inputs()).sum().backward()
    assert run.stats().repetitions == 3
    assert [text for text in caplog.messages if text.startswith("Set ")] == [
        "Set select recompute at layer 0: feed_forward",
        "Set full recompute at layer 2",
        "Set select recompute at layer 3: feed_forward",
    ]


def test_a_configuration_object_does_as_well() -> None:
    with recompute(llama(), RecomputeConfig(recompute=True)) as run:
        assert len(run._regions) == 3


def test_patterns_that_mean_nothing_and_keys_without_effect_are_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = {
        "select_recompute": ["feed_forward", r"feed_forward\.gelu_\d", "aten.mul"],
        "select_comm_recompute": True,
        "mp_comm_recompute": False,
        "parallel_optimizer_comm_recompute": True,
        "recompute_slice_activation": True,
        "select_recompute_exclude": ["attention"],
    }
    with caplog.at_level(logging.INFO, "tierstore"), recompute(llama(1), config, layers=""):
        pass
    warnings = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == [
        r"select_recompute: no layer has a submodule or an operator 'feed_forward\.gelu_\d'",
    ]
    said = [text.split()[0] for text in caplog.messages if "has no effect here" in text]
    assert sorted(said) == [
        "mp_comm_recompute",
        "parallel_optimizer_comm_recompute",
        "recompute_slice_activation",
        "select_comm_recompute",
    ]
    assert "Excluding the module attention at layer 0 has no effect" in caplog.messages


def test_what_is_wrong_leaves_the_model_alone() -> None:
    model = MODELS["llama"]()
    with pytest.raises(ConfigError, match="recompute"):
        recompute(model, {"recompute": "all"})
    with pytest.raises(ConfigError, match="accepted: at most 1"):
        recompute(model, {"recompute": [1, 2]}, layers="layers")
    with pytest.raises(UsageError, match="nowhere"):
        recompute(model, {"recompute": True}, layers="nowhere")
    assert hooks_of(model) == 0
