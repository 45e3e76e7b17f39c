"""OffloadConfig from a YAML file that may belong to others too."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tierstore.config import OffloadConfig
from tierstore.errors import ConfigError


def _read(tmp_path: Path, text: str) -> OffloadConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return OffloadConfig.from_yaml(path)


def test_keys_may_stand_at_the_top_level(tmp_path: Path) -> None:
    assert _read(tmp_path, "offload_param: cpu\nhbm_ratio: 0.5\n") == OffloadConfig(
        offload_param="cpu", hbm_ratio=0.5
    )


def test_keys_may_stand_in_a_section(tmp_path: Path) -> None:
    assert _read(tmp_path, "offload_config:\n  offload_cpu_size: 512GB\n") == OffloadConfig(
        offload_cpu_size="512GB"
    )


def test_the_context_s_two_keys_are_read_and_its_others_are_not(tmp_path: Path) -> None:
    text = (
        "context:\n  mode: 0\n  memory_offload: 'OFF'\n  max_device_memory: 30GB\n  device_target: Ascend\n"
    )
    assert _read(tmp_path, text) == OffloadConfig(memory_offload="OFF", max_device_memory="30GB")


def test_the_sections_and_the_top_level_add_up(tmp_path: Path) -> None:
    text = (
        "context: {memory_offload: 'ON'}\noffload_config: {offload_param: disk}\nchecksum: false\nseed: 0\n"
    )
    assert _read(tmp_path, text) == OffloadConfig(offload_param="disk", checksum=False)


def test_other_owners_sections_are_left_alone(tmp_path: Path) -> None:
    text = (
        "swap_config:\n  swap: true\nrecompute_config: {recompute: [1]}\nmodel_config: {layers: 2}\n"
        "callbacks: [{type: x}]\nempty:\nchecksum: false\n"
    )
    assert _read(tmp_path, text) == OffloadConfig(checksum=False)


def test_an_unquoted_on_or_off_is_understood(tmp_path: Path) -> None:
    assert _read(tmp_path, "memory_offload: OFF\n").memory_offload == "OFF"
    assert _read(tmp_path, "context: {memory_offload: ON}\n").memory_offload == "ON"


@pytest.mark.parametrize("text", ["", "# nothing\n", "offload_config:\n", "context:\n"])
def test_an_empty_file_or_section_leaves_the_defaults(tmp_path: Path, text: str) -> None:
    assert _read(tmp_path, text) == OffloadConfig()


def test_a_key_given_in_two_places_is_refused_with_both_values(tmp_path: Path) -> None:
    text = "checksum: true\noffload_config: {checksum: false}\n"
    with pytest.raises(ConfigError, match="checksum=False: given in two places; the other says True"):
        _read(tmp_path, text)


def test_an_unknown_key_in_a_flat_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'checksum'"):
        _read(tmp_path, "cheksum: false\n")


def test_an_unknown_key_in_the_section_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'checksum'"):
        _read(tmp_path, "offload_config: {cheksum: false}\n")


def test_a_section_with_a_slip_in_its_name_is_not_somebody_else_s(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'offload_config'"):
        _read(tmp_path, "offload_confg: {checksum: false}\n")


@pytest.mark.parametrize("section", ["offload_config", "context"])
def test_a_section_that_is_not_a_mapping_is_refused(tmp_path: Path, section: str) -> None:
    with pytest.raises(ConfigError, match=rf"{section}=\['x'\]: accepted: a mapping"):
        _read(tmp_path, f"{section}: [x]\n")


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the file=.*accepted: a mapping"):
        _read(tmp_path, "- a\n- b\n")


def test_faults_of_the_file_and_of_the_values_are_one_message(tmp_path: Path) -> None:
    text = "context: 3\noffload_config: {hbm_ratio: 2}\n"
    with pytest.raises(ConfigError, match="2 faults") as refused:
        _read(tmp_path, text)
    assert str(tmp_path / "run.yaml") in str(refused.value)


def test_a_file_that_is_not_yaml_is_refused_with_the_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not YAML: .*line 1"):
        _read(tmp_path, "a: [1\n")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not YAML"):
        OffloadConfig.from_yaml(path)


def test_a_file_that_is_not_there_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file") as refused:
        OffloadConfig.from_yaml(tmp_path / "none.yaml")
    assert isinstance(refused.value.__cause__, FileNotFoundError)


def test_a_configuration_written_as_yaml_is_read_back(tmp_path: Path) -> None:
    config = OffloadConfig(
        offload_param="cpu",
        offload_cpu_size="3GB",
        cpu_ratio=0.5,
        memory_offload="OFF",
        offload_path=["/mnt/a", "/mnt/b"],
    )
    assert _read(tmp_path, yaml.safe_dump(config.to_mapping())) == config
    assert _read(tmp_path, yaml.safe_dump({"offload_config": config.to_mapping()})) == config


@pytest.mark.parametrize("slip", ["recompute_confg", "swap_confg", "swap_configs"])
def test_a_slip_in_the_name_of_an_activations_section_is_refused(tmp_path: Path, slip: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{slip.partition('_')[0]}_config'"):
        _read(tmp_path, f"{slip}: {{}}\n")


def test_a_file_with_a_section_may_have_other_owners_keys(tmp_path: Path) -> None:
    assert _read(tmp_path, "swap_config: {swap: true}\nseed: 0\n") == OffloadConfig()
