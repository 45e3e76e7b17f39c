"""The examples of swap and recompute: the reference's four files, line by line, on both Llamas."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from train_swapped import main

_FILES = Path(__file__).parent.parent.parent / "docs/examples/activations"
_TINY = ["--device", "emulated", "--steps", "2", "--dim", "64", "--heads", "2", "--batch-size", "2"]
_TINY += ["--sequence-length", "32"]

_ATTENTION_AND_FEED_FORWARD = [
    "-INFO - Set op_swap at layer 0: .attention, value=20",
    "-INFO - Set op_swap at layer 1: .attention, value=20, .feed_forward, value=15",
    "-INFO - Set op_swap at layer 2: .attention, value=20, .feed_forward, value=15",
    "-INFO - Set op_swap at layer 3: .attention, value=10",
]

# As the reference shows them: what its user looks for in the log, and what is found.
_LISTINGS = {
    "default.yaml": (
        "attention.flash_attention",
        [f"-INFO - Set op_swap at layer {layer}: attention.flash_attention, value=10" for layer in range(4)],
    ),
    "layers.yaml": (
        "Set layer swap at",
        [
            "-INFO - Set layer swap at layer 0 and value is: 20",
            "-INFO - Set layer swap at layer 3 and value is: 20",
        ],
    ),
    "operators.yaml": ("Set op_swap at layer", _ATTENTION_AND_FEED_FORWARD),
    "swap-and-recompute.yaml": (
        "Set (op_swap|select recompute) at layer",
        [
            "-INFO - Set select recompute at layer 0: feed_forward",
            *_ATTENTION_AND_FEED_FORWARD[:3],
            "-INFO - Set select recompute at layer 3: feed_forward",
            _ATTENTION_AND_FEED_FORWARD[3],
        ],
    ),
}


@pytest.mark.parametrize("name", sorted(_LISTINGS))
def test_the_log_is_the_references_line_by_line(name: str, capfd: pytest.CaptureFixture[str]) -> None:
    wanted, listing = _LISTINGS[name]
    assert main([str(_FILES / name), *_TINY]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert [line for line in lines if re.search(wanted, line)] == listing
    assert "every loss is equal, bit for bit" in lines


def test_a_model_of_transformers_is_swapped_and_recomputed_by_its_own_names(
    capfd: pytest.CaptureFixture[str],
) -> None:
    assert main([str(_FILES / "hugging-face.yaml"), "--model", "transformers", *_TINY]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert "every loss is equal, bit for bit" in lines
    assert [line for line in lines if "at layer 2" in line] == [
        "-INFO - Set select recompute at layer 2: mlp.act_fn",
        "-INFO - Set op_swap at layer 2: .self_attn, value=10, mlp.gate_proj, value=5, mlp.up_proj, value=5",
    ]
    assert not [line for line in lines if "at layer 3" in line]


@pytest.mark.parametrize(
    ("content", "hint"),
    [
        ("swap_config: {swap: maybe}", "swap_config"),
        ("model: {model_config: {num_layers: none}}", "num_layers"),
        ("- 1", "not a mapping"),
        ("a: b: c", "not YAML"),
    ],
)
def test_a_wrong_file_is_answered_in_one_line_with_exit_code_2(
    tmp_path: Path, content: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "wrong.yaml"
    path.write_text(content)
    with pytest.raises(SystemExit) as ended:
        main([str(path), *_TINY])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["/no/such/file.yaml"])
    assert ended.value.code == 2
    assert "/no/such/file.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--heads", "0"], "--heads must be at least 1"),
        (["--device", "tpu"], "emulated, cuda or cuda:N"),
        (["--max-device-memory", "4XB"], "4XB"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_exit_code_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([str(_FILES / "default.yaml"), *_TINY, *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
