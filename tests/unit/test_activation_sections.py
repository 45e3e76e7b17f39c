"""``recompute_config`` and ``swap_config`` in the file that ``offload_config`` is in."""

from __future__ import annotations

from pathlib import Path

import pytest

from tierstore import OffloadConfig
from tierstore.errors import ConfigError
from tierstore.training import RecomputeConfig, SwapConfig
from tierstore.training.activations import Sections, read_sections, sections_of
from tierstore.training.activations.config.tables import Value

_FOURTH_EXAMPLE = r"""
context:
  memory_optimize_level: "O0"
  memory_offload: ON
  max_device_memory: 30GB
model:
  model_config:
    num_layers: 4
recompute_config:
  recompute: False
  select_recompute:
    'feed_forward': [0,3]
    'feed_forward\.mul': True
  select_comm_recompute: False
swap_config:
  swap: True
  op_swap:
    - op_name: 'attention'
      backward_prefetch: 20
      layers: [0,1,2]
offload_config:
  offload_cpu_size: 1GB
"""


def _written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_one_file_has_all_sections(tmp_path: Path) -> None:
    path = _written(tmp_path, _FOURTH_EXAMPLE)
    select: dict[str, Value] = {"feed_forward": (0, 3), r"feed_forward\.mul": True}
    op_swap = {"op_name": "attention", "backward_prefetch": 20, "layers": [0, 1, 2]}
    assert read_sections(path) == Sections(
        RecomputeConfig(select_recompute=select, swap=True),
        SwapConfig.from_mapping({"swap": True, "op_swap": [op_swap]}),
    )
    assert OffloadConfig.from_yaml(path) == OffloadConfig(offload_cpu_size="1GB", max_device_memory="30GB")


def test_without_swap_numbers_count_layers_of_stages() -> None:
    sections = sections_of({"recompute_config": {"recompute": [1]}, "swap_config": {"swap": False}})
    assert sections.recompute == RecomputeConfig(recompute=(1,))
    assert sections.swap == SwapConfig()


@pytest.mark.parametrize(
    "text", ["", "offload_config: {checksum: false}\n", "swap_config:\nrecompute_config:\n"]
)
def test_sections_that_are_not_there_are_none(tmp_path: Path, text: str) -> None:
    assert read_sections(_written(tmp_path, text)) == Sections()


def test_an_empty_section_has_the_defaults() -> None:
    assert sections_of({"recompute_config": {}, "swap_config": {}}) == Sections(
        RecomputeConfig(), SwapConfig()
    )


def test_the_faults_of_both_sections_are_listed_with_the_file(tmp_path: Path) -> None:
    path = _written(tmp_path, "swap_config: {swap: true, op_swap: 3}\nrecompute_config: {recompute: [[1]]}\n")
    with pytest.raises(ConfigError) as refusal:
        read_sections(path)
    message = str(refusal.value)
    assert f"swap_config in {path}: 1 fault" in message
    assert "op_swap=3" in message
    assert f"recompute_config in {path}: 1 fault" in message
    assert "because swap is on" in message


@pytest.mark.parametrize("text", ["swap_config: [1]\n", "recompute_config: true\n", "- 1\n"])
def test_a_section_or_file_that_is_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="a mapping of"):
        read_sections(_written(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_sections(tmp_path / "none.yaml")


def test_where_layers_lie_is_read_from_where_the_reference_says_it(tmp_path: Path) -> None:
    text = (
        "parallel_config: {pipeline_stage: 5, data_parallel: 2}\n"
        "model: {model_config: {num_layers: 48, pp_interleave_num: 2, offset: [[0,1,1,1,1],[1,1,1,1,0]]}}\n"
    )
    assert read_sections(_written(tmp_path, text)).layout == {
        "pipeline_stage": 5,
        "pp_interleave_num": 2,
        "offset": [[0, 1, 1, 1, 1], [1, 1, 1, 1, 0]],
    }


@pytest.mark.parametrize(
    "document", [{}, {"model": 3}, {"model": {"model_config": None}, "parallel_config": []}]
)
def test_where_layers_lie_need_not_be_said(document: dict[str, object]) -> None:
    assert sections_of(document).layout == {}
