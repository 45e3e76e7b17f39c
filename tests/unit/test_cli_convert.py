"""``tierstore convert``: what DeepSpeed's and Accelerate's users have, as the YAML of a run."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.foreign_configs import CASES, STAGE_3_ON_DISK, WRONG
from tierstore.cli import accelerate_config, deepspeed_config, main
from tierstore.config import OffloadConfig, document
from tierstore.training.activations import read_sections

_Output = pytest.CaptureFixture[str]
_OURS = "# written by tierstore convert"


def _written(folder: Path, given: Mapping[str, Any], *, is_json: bool = True) -> Path:
    path = folder / ("ds_config.json" if is_json else "accelerate.yaml")
    path.write_text(json.dumps(given) if is_json else yaml.safe_dump(dict(given)), encoding="utf-8")
    return path


def _leaves(given: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yield the names of all keys that have values, with their sections."""
    sections = {
        "zero_optimization", "offload_param", "offload_optimizer", "aio", "activation_checkpointing",
        "fsdp_config", "deepspeed_config",
    }  # fmt: skip
    for key, value in given.items():
        if key in sections:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


@pytest.mark.parametrize("is_json", [True, False], ids=["json", "yaml"])
@pytest.mark.parametrize("case", CASES)
def test_what_is_offloaded_there_is_offloaded_here(
    case: str, is_json: bool, tmp_path: Path, capsys: _Output
) -> None:
    given, becomes = CASES[case]
    source, output = _written(tmp_path, given, is_json=is_json), tmp_path / "run.yaml"
    assert main(["convert", str(source), "-o", str(output)]) == 0
    assert document.load(output) == becomes
    OffloadConfig.from_yaml(output)
    read_sections(output)
    assert capsys.readouterr().err == ""


def test_without_a_file_the_yaml_is_printed(tmp_path: Path, capsys: _Output) -> None:
    assert main(["convert", str(_written(tmp_path, STAGE_3_ON_DISK))]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{_OURS} from 'ds_config.json'\n")
    assert yaml.safe_load(text) == CASES["parameters and state in files"][1]


def test_a_machine_reads_the_document_and_the_remarks(tmp_path: Path, capsys: _Output) -> None:
    assert main(["convert", "--json", str(_written(tmp_path, STAGE_3_ON_DISK))]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["document"] == CASES["parameters and state in files"][1]
    assert len(told["remarks"]) > 10


@pytest.mark.parametrize("case", CASES)
def test_it_is_said_what_became_of_every_key(case: str, tmp_path: Path, capsys: _Output) -> None:
    given, _ = CASES[case]
    source = _written(tmp_path, given)
    assert main(["convert", "--json", str(source)]) == 0
    remarks = json.loads(capsys.readouterr().out)["remarks"]
    remarked = [remark.split(" ")[0] for remark in remarks]
    leaves = [
        leaf for leaf in _leaves(given) if not leaf.startswith("deepspeed_config.offload_")
        and leaf != "deepspeed_config.zero_stage"
    ]  # fmt: skip
    assert [leaf for leaf in leaves if remarked.count(leaf) != 1] == []


def test_every_key_that_has_a_reason_is_one_of_whose_it_is_said_to_be() -> None:
    unknown = deepspeed_config._UNKNOWN
    whole = {
        **dict.fromkeys(deepspeed_config._WHY, 1),
        "zero_optimization": {
            "stage": 3,
            **dict.fromkeys(deepspeed_config._OF_ZERO, 1),
            "offload_param": dict.fromkeys(deepspeed_config._OF_PARAM, 1),
            "offload_optimizer": dict.fromkeys(deepspeed_config._OF_OPTIMIZER, 1),
        },
        "aio": dict.fromkeys(deepspeed_config._OF_AIO, 1),
        "activation_checkpointing": dict.fromkeys(deepspeed_config._OF_ACTIVATIONS, 1),
    }
    remarks = deepspeed_config.converted(whole, "all").remarks
    assert len(remarks) > 60
    assert [remark for remark in remarks if unknown in remark or " -> nothing: " not in remark][:-1] == []


def test_a_key_that_nobody_knows_is_said_to_be_unknown() -> None:
    given = {"zero_optimization": {"stage": 3, "offload_everything": True}, "aio": {"speed": 11}}
    remarks = deepspeed_config.converted(given, "x").remarks
    unknown = [remark for remark in remarks if deepspeed_config._UNKNOWN in remark]
    assert [remark.split(" ")[0] for remark in unknown] == [
        "zero_optimization.offload_everything",
        "aio.speed",
    ]
    assert accelerate_config._UNKNOWN == deepspeed_config._UNKNOWN


# ------------------------------------------------------------------------------ what is wrong


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_one_line_and_exit_code_2(case: str, tmp_path: Path, capsys: _Output) -> None:
    text, why = WRONG[case]
    source, output = tmp_path / "given", tmp_path / "run.yaml"
    source.write_text(text, encoding="utf-8")
    assert main(["convert", str(source), "-o", str(output)]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("tierstore convert: ")
    assert printed.err.count("\n") == 1
    assert why in printed.err
    assert len(printed.err) < 2_000
    assert not output.exists()


@pytest.mark.parametrize("kind", ["missing", "a directory", "a pipe", "bytes"])
def test_what_is_no_file_is_refused(kind: str, tmp_path: Path, capsys: _Output) -> None:
    source = tmp_path / "given"
    if kind == "a directory":
        source.mkdir()
    elif kind == "a pipe":
        os.mkfifo(source)
    elif kind == "bytes":
        source.write_bytes(b"\xff\xfe{")
    assert main(["convert", str(source)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    "there", ["a source file", "the file that is read", "a link to it", "a directory", "a pipe"]
)
def test_nothing_is_written_over_something_else(there: str, tmp_path: Path, capsys: _Output) -> None:
    source, output = _written(tmp_path, STAGE_3_ON_DISK), tmp_path / "run.yaml"
    match there:
        case "a source file":
            output.write_text("print('mine')\n", encoding="utf-8")
        case "the file that is read":
            output = source
        case "a link to it":
            output.hardlink_to(source)
        case "a directory":
            output.mkdir()
        case _:
            os.mkfifo(output)
    before = source.read_bytes(), output.read_bytes() if output.is_file() else None
    assert main(["convert", str(source), "-o", str(output)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert (source.read_bytes(), output.read_bytes() if output.is_file() else None) == before


def test_a_file_that_is_read_is_not_written_over_even_if_it_says_that_it_is_ours(
    tmp_path: Path, capsys: _Output
) -> None:
    source = tmp_path / "given.yaml"
    source.write_text(f"{_OURS}\nfsdp_config: {{fsdp_offload_params: true}}\n", encoding="utf-8")
    assert main(["convert", str(source), "-o", str(source)]) == 2
    assert "is the file that is read" in capsys.readouterr().err


def test_what_it_wrote_before_is_replaced(tmp_path: Path) -> None:
    output = tmp_path / "run.yaml"
    for case in ("parameters and state in files", "state in host memory"):
        assert main(["convert", str(_written(tmp_path, CASES[case][0])), "-o", str(output)]) == 0
        assert document.load(output) == CASES[case][1]
    assert sorted(each.name for each in tmp_path.iterdir()) == ["ds_config.json", "run.yaml"]
