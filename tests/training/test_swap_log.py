"""The reference's four examples: a model of four layers with its names, and the lines that it shows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.training.swap_models import Llama, config, inputs, operators, swapping, train
from tierstore.training import swap

YAML = """
context:
  memory_optimize_level: "O0"
  memory_offload: "ON"
  max_device_memory: "8MB"
offload_config:
  device: emulated
  offload_cpu_size: "8MB"
  offload_disk_size: 0
model:
  model_config:
    num_layers: 4
recompute_config:
  recompute: False
  select_recompute: {select}
  select_comm_recompute: False
swap_config:
  swap: True
{swap}
"""

SOME_OPERATORS = """\
  op_swap:
    - op_name: 'attention'
      backward_prefetch: 20
      layers: [0,1,2]
    - op_name: 'attention'
      backward_prefetch: 10
      layers: [3]
    - op_name: 'feed_forward'
      backward_prefetch: 15
      layers: [1,2]
"""

EXAMPLES = {
    "the default": (
        "False",
        "  default_prefetch: 10\n",
        "attention.flash_attention",
        [
            "Set op_swap at layer 0: attention.flash_attention, value=10",
            "Set op_swap at layer 1: attention.flash_attention, value=10",
            "Set op_swap at layer 2: attention.flash_attention, value=10",
            "Set op_swap at layer 3: attention.flash_attention, value=10",
        ],
    ),
    "some layers": (
        "False",
        "  layer_swap:\n    - backward_prefetch: 20\n      layers: [0,3]\n",
        "Set layer swap at",
        ["Set layer swap at layer 0 and value is: 20", "Set layer swap at layer 3 and value is: 20"],
    ),
    "some operators": (
        "False",
        SOME_OPERATORS,
        "Set op_swap at layer",
        [
            "Set op_swap at layer 0: .attention, value=20",
            "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
            "Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
            "Set op_swap at layer 3: .attention, value=10",
        ],
    ),
    "with recompute": (
        "{'feed_forward': [0,3]}",
        SOME_OPERATORS,
        "at layer",
        [
            "Set select recompute at layer 0: feed_forward",
            "Set op_swap at layer 0: .attention, value=20",
            "Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
            "Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
            "Set select recompute at layer 3: feed_forward",
            "Set op_swap at layer 3: .attention, value=10",
        ],
    ),
}


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_log_shows_what_the_reference_shows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, example: str
) -> None:
    select, marks, looked_for, expected = EXAMPLES[example]
    path = tmp_path / "example.yaml"
    path.write_text(YAML.format(select=select, swap=marks))
    model = Llama()
    with caplog.at_level(logging.INFO, logger="tierstore"), swap(model, path) as active:
        train(model)
        assert active.stats().activations.kept > 0
    shown = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert [line for line in shown if looked_for in line and "Formative" not in line] == expected


def test_an_operator_that_is_no_module_is_named_by_its_pattern(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    marks = operators(r"feed_forward\.mul", "aten.silu", prefetch=3)
    with caplog.at_level(logging.INFO, logger="tierstore"), swapping(Llama(1), config(tmp_path, marks)):
        pass
    assert r"Set op_swap at layer 0: feed_forward\.mul, value=3, aten.silu, value=3" in caplog.messages


def test_a_pattern_that_means_nothing_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = Llama(2)
    with (
        caplog.at_level(logging.INFO, logger="tierstore"),
        swapping(model, config(tmp_path, operators("atention", "attention"))) as active,
    ):
        model(inputs())
        assert active.stats().activations.kept > 0
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warnings == ["op_swap 'atention' means nothing in any of its layers: nothing is swapped for it"]
    assert not any("atention," in line for line in caplog.messages if line.startswith("Set"))
