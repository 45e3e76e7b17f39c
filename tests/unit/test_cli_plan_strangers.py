"""``tierstore plan`` as strangers call it: odd functions, machines without a device, outputs over sources."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tierstore.cli import main
from tierstore.planning.chrome import program_from_chrome, program_to_chrome

_Output = pytest.CaptureFixture[str]
_MODULE = "strange_models"

_STRANGE = """
import os
import subprocess
import sys
import torch
from torch import nn

os.write(1, b"from C\\n")

def speaks():
    os.write(1, b"from C\\n")
    sys.__stdout__.write("from below")
    subprocess.run(["echo", "from a process"], check=True)
    return nn.Linear(8, 8), torch.zeros(2, 8)

def build(batch=4):
    layers = [nn.Sequential(nn.Linear(128, 128), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*layers)
    return model, torch.zeros(batch, 128), torch.optim.AdamW(model.parameters())

def wide(batch):
    return nn.Linear(512, 512), torch.zeros(batch, 512)

def long(batch, sequence):
    return nn.Linear(8, 8), torch.zeros(batch, sequence, 8)

def stranger():
    return nn.Linear(8, 8), torch.zeros(2, 8), torch.optim.SGD(nn.Linear(4, 4).parameters(), 0.1)

class Odd(BaseException):
    pass

def odd():
    raise Odd("mine")

def closes():
    raise GeneratorExit

class Endless(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        while x.sum() > 0:
            pass
        return self.inner(x)
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with strange models."""
    (tmp_path / f"{_MODULE}.py").write_text(_STRANGE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    return tmp_path


def _named(function: str) -> str:
    return f"{_MODULE}:{function}"


_HERE = [_named("build"), "--placement", "rules"]


def _planned(*words: str, capsys: _Output) -> dict[str, object]:
    code = main(["plan", *words, "--json"])
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    assert code == (0 if found["fits"] else 1)
    return found


def test_what_is_printed_below_python_is_not_in_json(
    place: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", _named("speaks"), "--json"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["fits"]
    assert "from C" in printed.err
    assert "from a process" in printed.err


def test_a_function_that_needs_a_batch_gets_one_and_what_else_it_needs_is_named(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: _Output
) -> None:
    found = _planned(_named("wide"), "--optimizer", "none", capsys=capsys)
    program = found["program"]
    assert isinstance(program, dict)
    assert program["data_bytes"]["parameters"] >= 4 * 512 * 513
    assert main(["plan", _named("long")]) == 2
    assert "give --sequence" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("odd", "Odd: mine"),
        ("closes", "GeneratorExit"),
        ("stranger", "SGD trains no parameter of Linear"),
        ("Endless", "a loop that values end has no end"),
    ],
)
def test_what_is_strange_is_one_line(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: _Output, function: str, words: str
) -> None:
    monkeypatch.setattr("tierstore.training.tracing.assumed_values.MOST_ASKED", 50)
    assert main(["plan", _named(function)]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_trace_is_planned_with_the_figures_of_another_machine(place: Path, capsys: _Output) -> None:
    words = [_named("build"), "--machine", "v100-32gb", "--placement", "rules"]
    asked = _planned(*words, capsys=capsys)
    assert main(["plan", _named("build"), "--machine", "h100-80gb", "--trace", "of_another.json"]) == 0
    capsys.readouterr()
    again = _planned("--program", "of_another.json", *words[1:], capsys=capsys)
    assert again == asked


def test_without_a_device_all_of_it_has_to_fit_into_memory(place: Path, capsys: _Output) -> None:
    rates = "compute: {float32: 1e12, memory: 1e11}\nhost: {float32: 1e12, memory: 1e11}\n"
    (place / "host.yaml").write_text(f"tierstore_machine: 1\ntiers: {{host: {{capacity: 64MiB}}}}\n{rates}")
    words = [_named("build"), "--machine", "host.yaml", "--placement", "rules"]
    assert _planned(*words, capsys=capsys)["fits"]
    beside = _planned(*words, "--max-host-memory", "2MB", "--batch", "9000", capsys=capsys)
    assert beside["fits"]
    assert "the program's own bytes are beside the quota of 2.0 MiB" in str(beside["assumptions"])
    found = _planned(*words, "--batch", "99999", capsys=capsys)
    assert not found["fits"]
    assert "there are 64.0 MiB" in str(found["why"])


@pytest.mark.parametrize("machine", ["v100-32gb", "h100-80gb"])
def test_a_recorded_program_says_that_its_seconds_and_bundles_are_those_of_the_recording(
    place: Path, capsys: _Output, machine: str
) -> None:
    assert main(["plan", *_HERE, "--machine", machine, "--trace", "made.json"]) == 0
    made = program_from_chrome((place / "made.json").read_text())
    moments = tuple(replace(each, compute_s=0.25) for each in made.moments)
    recorded = replace(made, source="trace", moments=moments, facts={"device": "cpu"})
    (place / "recorded.json").write_text(program_to_chrome(recorded))
    capsys.readouterr()
    for path, is_told in (("made.json", False), ("recorded.json", True)):
        found = _planned("--program", path, "--machine", machine, "--placement", "rules", capsys=capsys)
        told = "computing takes as long as where the run was recorded (device cpu)"
        assert (told in str(found["assumptions"])) == is_told
        grouped = "small modules travel together as where the run was recorded"
        assert (grouped in str(found["assumptions"])) == is_told


@pytest.mark.parametrize("option", ["--page", "--trace", "--write"])
def test_no_output_is_written_over_a_source_file(place: Path, capsys: _Output, option: str) -> None:
    source = (place / f"{_MODULE}.py").read_text()
    assert main(["plan", *_HERE, option, f"{_MODULE}.py"]) == 2
    assert "give another path" in capsys.readouterr().err
    assert (place / f"{_MODULE}.py").read_text() == source
    for _ in range(2):
        assert main(["plan", *_HERE, option, "again.out"]) == 0


def test_a_machine_that_no_run_can_have_is_refused_for_a_yaml_before_anything_is_done(
    place: Path, capsys: _Output
) -> None:
    rates = "compute: {float32: 1e12, memory: 1e11}\nhost: {float32: 1e12, memory: 1e11}\n"
    (place / "alone.yaml").write_text(f"tierstore_machine: 1\ntiers: {{device: {{capacity: 9MiB}}}}\n{rates}")
    assert main(["plan", _named("build"), "--machine", "alone.yaml", "--write", "planned.yaml"]) == 2
    printed = capsys.readouterr()
    assert "goes through host memory" in printed.err
    assert not printed.out
    assert not (place / "planned.yaml").exists()
