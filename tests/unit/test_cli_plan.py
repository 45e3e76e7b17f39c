"""``tierstore plan``: what it prints and writes, its exit codes, one line for everything that is wrong."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.training.twins import assert_same  # noqa: F401
from tierstore.cli import main
from tierstore.cli.finding import RunWish, find, no_slower
from tierstore.cli.machines import machine_of
from tierstore.cli.programs import ModelWish, program_of
from tierstore.config import OffloadConfig
from tierstore.planning.chrome import trace_from_chrome
from tierstore.units import MIB

_Output = pytest.CaptureFixture[str]
_MODULE = "planned_models"

_SOURCE = """
import torch
from torch import nn

print("an import that talks")

def build(batch=4, width=128, layers=6):
    layers = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)]
    model = nn.Sequential(*layers)
    return model, torch.zeros(batch, width), torch.optim.AdamW(model.parameters())

def other():
    return build(width=64)

def deeper():
    return build(layers=8)

def shallow():
    return build(layers=3)

def alone():
    return nn.Linear(16, 64)

def raises():
    raise ValueError("no such width")

def leaves():
    raise SystemExit(3)

def needs(width):
    return nn.Linear(width, width)

def no_model():
    return 7

class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        raise KeyError("lost")

class Exits(Breaks):
    def forward(self, x):
        raise SystemExit(0)

class Branches(Breaks):
    def forward(self, x):
        found = self.inner(x)
        return found * 2 if found.sum() > 0 else found
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with models and an emulated device's configuration."""
    (tmp_path / f"{_MODULE}.py").write_text(_SOURCE)
    free = "device: emulated\nmax_device_memory: 1MB\noffload_cpu_size: 64MB\noffload_disk_size: 0\n"
    (tmp_path / "free.yaml").write_text(free)
    (tmp_path / "run.yaml").write_text(f"{free}auto_offload: false\n")  # nothing is looked for
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    return tmp_path


def _named(function: str) -> str:
    return f"{_MODULE}:{function}"


_HERE = [_named("build"), "--config", "run.yaml"]
_FREE = [_named("build"), "--config", "free.yaml"]


def _planned(*words: str, capsys: _Output) -> dict[str, object]:
    code = main(["plan", *words, "--json"])
    printed = capsys.readouterr().out
    found: dict[str, object] = json.loads(printed)
    assert code == (0 if found["fits"] else 1)
    return found


# ------------------------------------------------------------------------------------ what it tells


def test_a_model_that_fits_is_told_with_its_peaks_and_bytes(capsys: _Output) -> None:
    assert main(["plan", *_HERE]) == 0
    printed = capsys.readouterr()
    lines = dict(line.split(maxsplit=1) for line in reversed(printed.out.splitlines()))
    assert lines["fits"] == "yes"
    assert lines["peak"].startswith("device ")
    assert "host->device" in lines["moves"]
    assert "an import that talks" in printed.err


def test_json_says_the_same_and_nothing_else(capsys: _Output) -> None:
    found = _planned(*_HERE, capsys=capsys)
    peaks = found["peak_bytes"]
    assert isinstance(peaks, dict)
    assert 0 < peaks["device"] <= MIB
    assert found["fits"] is True


def test_a_model_that_does_not_fit_says_who_held_what_and_ends_with_1(capsys: _Output) -> None:
    assert main(["plan", *_HERE, "--max-host-memory", "512KB"]) == 1
    printed = capsys.readouterr().out
    assert "fits      no" in printed
    assert "remedy    raise " in printed
    assert "In 'device' were" in printed


def test_what_was_assumed_of_values_is_told(capsys: _Output) -> None:
    assert main(["plan", _named("Branches")]) == 0
    assert "assumed   assumed True" in capsys.readouterr().out


def test_batch_and_sequence_reach_the_function_or_the_inputs_that_are_made_up(capsys: _Output) -> None:
    small = _planned(_named("build"), "--batch", "2", capsys=capsys)
    large = _planned(_named("build"), "--batch", "2000", capsys=capsys)
    assert _peak(large) > _peak(small)
    assert _peak(_planned(_named("alone"), "--batch", "9999", capsys=capsys)) > 9999 * 16 * 4


def test_the_dtype_is_what_parameters_are_made_in(capsys: _Output) -> None:
    whole, half = (
        _planned(_named("alone"), "--dtype", dtype, "--optimizer", "none", capsys=capsys)
        for dtype in ("float32", "bfloat16")
    )
    assert _bytes_of(whole, "parameters") == 2 * _bytes_of(half, "parameters")


def test_an_optimizer_s_state_is_counted(capsys: _Output) -> None:
    kept = {
        name: _bytes_of(_planned(_named("alone"), "--optimizer", name, capsys=capsys), "state")
        for name in ("adamw", "SGD", "momentum", "none")
    }
    assert kept["adamw"] > kept["momentum"] > kept["SGD"] == kept["none"] == 0


def test_a_config_json_is_a_model(place: Path, capsys: _Output) -> None:
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 96, **sizes}
    (place / "config.json").write_text(json.dumps(config))
    found = _planned(
        "config.json", "--sequence", "8", "--dtype", "bfloat16", "--placement", "rules", capsys=capsys
    )
    parameters = 2 * 96 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 64 + 2 * 32) + 32
    program = found["program"]
    assert isinstance(program, dict)
    assert program["facts"]["parameters"] == str(parameters)
    assert _bytes_of(found, "parameters") >= 2 * parameters


def _peak(found: dict[str, object]) -> int:
    peaks = found["peak_bytes"]
    assert isinstance(peaks, dict)
    nbytes: int = peaks["host"]
    return nbytes


def _bytes_of(found: dict[str, object], kind: str) -> int:
    program = found["program"]
    assert isinstance(program, dict)
    nbytes: int = program["data_bytes"].get(kind, 0)
    return nbytes


# ------------------------------------------------------------------------------------ what it chooses


def test_what_is_chosen_is_never_slower_than_the_rules_and_obeyed_when_it_is_written(capsys: _Output) -> None:
    rules = _planned(*_FREE, "--placement", "rules", capsys=capsys)
    chosen = _planned(*_FREE, "--write", "planned.yaml", capsys=capsys)
    assert _figure(chosen, "step_s") <= _figure(rules, "step_s")
    assert chosen["rejected"]
    written = _planned(*_FREE, "--placement", "planned.yaml", capsys=capsys)
    for key in ("step_s", "moved_bytes", "peak_bytes", "placement"):
        assert written[key] == chosen[key]


def test_steps_on_the_host_are_said_to_round_otherwise_where_there_is_an_accelerator(capsys: _Output) -> None:
    words = [
        _named("build"),
        "--machine",
        "h100-80gb",
        "--max-device-memory",
        "1MB",
        "--max-host-memory",
        "1GB",
    ]
    found = _planned(*words, capsys=capsys)
    placement = found["placement"]
    assert isinstance(placement, dict)
    on_host = [entry for entry in placement["bundles"] if entry["state"]["device"] == "cpu"]
    assert bool(on_host) == any("may round otherwise" in str(line) for line in _list(found, "assumptions"))


def _figure(found: dict[str, object], name: str) -> float:
    figure = found[name]
    assert isinstance(figure, float)
    return figure


def _list(found: dict[str, object], name: str) -> list[object]:
    values = found[name]
    assert isinstance(values, list)
    return values


# ------------------------------------------------------------------------------------ what it writes


def test_a_trace_holds_all_and_can_be_planned_again(capsys: _Output, place: Path) -> None:
    first = _planned(*_HERE, "--trace", "trace.json", capsys=capsys)
    parts = trace_from_chrome((place / "trace.json").read_text())
    assert parts.timeline is not None
    assert parts.machine is not None
    again = _planned("--program", "trace.json", "--config", "run.yaml", capsys=capsys)
    both = _planned(*_HERE, "--program", "trace.json", capsys=capsys)
    assert first == again == both


def test_a_run_s_yaml_has_the_quotas_and_the_placement(place: Path, capsys: _Output) -> None:
    found = _planned(*_HERE, "--max-device-memory", "2MB", "--write", "planned.yaml", capsys=capsys)
    text = (place / "planned.yaml").read_text()
    read = OffloadConfig.from_yaml("planned.yaml")
    assert text.startswith("# written by tierstore plan for Sequential on this machine")
    assert (read.max_device_bytes, read.device) == (2 * MIB, "emulated")
    placement = found["placement"]
    assert isinstance(placement, dict)
    assert read.placement is not None
    assert read.placement["bundles"] == placement["bundles"]


def test_what_is_predicted_for_the_written_yaml_is_what_was_predicted(capsys: _Output) -> None:
    first = _planned(*_HERE, "--write", "planned.yaml", capsys=capsys)
    again = _planned(_named("build"), "--config", "planned.yaml", capsys=capsys)
    placed = _planned(*_HERE, "--placement", "planned.yaml", capsys=capsys)
    for key in ("step_s", "moved_bytes", "peak_bytes", "placement"):
        assert first[key] == again[key] == placed[key]


def test_a_program_that_does_not_fit_writes_nothing(place: Path) -> None:
    words = ["--max-host-memory", "512KB", "--write", "planned.yaml", "--trace", "trace.json"]
    assert main(["plan", *_HERE, *words]) == 1
    assert not (place / "planned.yaml").exists()
    assert not (place / "trace.json").exists()


def test_a_page_shows_what_would_happen(place: Path) -> None:
    assert main(["plan", *_HERE, "--page", "plan.html"]) == 0
    page = (place / "plan.html").read_text()
    assert page.lower().startswith("<!doctype html>")
    assert "host-&gt;device" in page or "host->device" in page


def test_a_run_s_yaml_is_written_again_but_not_over_what_somebody_else_wrote(
    place: Path, capsys: _Output
) -> None:
    for _ in range(2):
        assert main(["plan", *_HERE, "--write", "planned.yaml"]) == 0
    before = (place / "run.yaml").read_text()
    assert main(["plan", *_HERE, "--write", "run.yaml"]) == 2
    assert "was not written by tierstore plan" in capsys.readouterr().err
    assert (place / "run.yaml").read_text() == before


# ------------------------------------------------------------------------------------ several at once


def test_a_sweep_is_a_table_with_what_fits_and_a_picture(place: Path, capsys: _Output) -> None:
    words = ["--sweep", "max_device_memory=128KB..2MB:3"]
    assert main(["plan", *_HERE, *words, "--png", "sweep.png"]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in rows[1:]] == ["128.0", "512.0", "2.0"]
    assert "does not fit" in rows[1]
    assert (place / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert main(["plan", *_HERE, *words, "--json"]) == 0
    points = json.loads(capsys.readouterr().out)["points"]
    assert [point["fits"] for point in points] == [False, True, True]


def test_more_memory_is_never_predicted_to_be_slower(capsys: _Output) -> None:
    words = [_named("shallow"), "--config", "free.yaml", "--sweep", "max_device_memory=260KB..900KB:4"]
    assert main(["plan", *words, "--json"]) == 0
    steps = [point["step_s"] for point in json.loads(capsys.readouterr().out)["points"]]
    assert steps == sorted(steps, reverse=True)


def test_what_was_found_with_less_is_found_with_more_by_using_less(capsys: _Output) -> None:
    wish = RunWish(OffloadConfig(device="emulated", max_device_memory="1MB"))
    program = program_of(ModelWish(_named("shallow")))
    less, more = (
        machine_of(None, wish.settings, {"device": nbytes, "host": 64 * MIB}).machine
        for nbytes in (300_001, 777_777)
    )
    former = find(program, less, wish)
    assert former.timeline is not None
    worse = replace(find(program, more, wish), timeline=None, placement=None)
    found = no_slower(worse, former, wish, "device")
    assert found.timeline is not None
    assert found.timeline.step_s == former.timeline.step_s
    assert found.timeline.peak_bytes == former.timeline.peak_bytes
    assert found.machine == more
    assert "are used" in found.why
    assert no_slower(former, found, wish, "device") is former


def test_a_sweep_in_which_nothing_fits_ends_with_1() -> None:
    assert main(["plan", *_HERE, "--sweep", "max_device_memory=64KB..128KB:2"]) == 1


def test_two_placements_stand_side_by_side(place: Path, capsys: _Output) -> None:
    (place / "high.yaml").write_text("high: {device: 0.5}\n")
    words = ["--compare", "rules", "high.yaml"]
    assert main(["plan", *_HERE, *words, "--page", "both.html"]) == 0
    printed = capsys.readouterr().out
    assert "seconds of a step" in printed
    assert "device writes back above 0.5" in printed
    assert main(["plan", *_HERE, *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["a"]["placement"]["high"] == {}
    assert found["b"]["placement"]["high"] == {"device": 0.5}
    assert (place / "both.html").exists()


# ------------------------------------------------------------------------------------ what is wrong

_WRONG: dict[str, tuple[list[str], str]] = {
    "nothing to plan": ([], "MODEL"),
    "no such module": (["no_such_module:build"], "there is no module no_such_module"),
    "no such function": ([_named("buidl")], "did you mean build?"),
    "a path of a module": ([f"{_MODULE}.py:build"], "write planned_models:build"),
    "a function that raises": ([_named("raises")], "ValueError: no such width"),
    "a function that leaves": ([_named("leaves")], "SystemExit"),
    "a function that needs something": ([_named("needs")], "needs the argument width"),
    "a function that returns no model": ([_named("no_model")], "returned int"),
    "a model that raises": ([_named("Breaks")], "KeyError"),
    "a model that leaves": ([_named("Exits")], "SystemExit"),
    "inputs of its own": ([_named("build"), "--sequence", "3"], "let it take sequence"),
    "an optimizer of its own": ([_named("build"), "--optimizer", "sgd"], "leave --optimizer out"),
    "neither function nor file": (["llama"], "neither module:function"),
    "a config.json that is not there": (["no/config.json"], "cannot be read"),
    "a config.json of no known kind": (["unknown.json"], "no architecture"),
    "a config.json that is none": (["broken.json"], "no config.json"),
    "no count": ([_named("build"), "--batch", "0"], "a whole number, 1 or more"),
    "a count that is none": ([_named("build"), "--sequence", "1e3"], "a whole number, 1 or more"),
    "a huge count": ([_named("build"), "--batch", "9" * 30], "a whole number"),
    "no dtype": ([_named("alone"), "--dtype", "int3"], "invalid choice"),
    "no optimizer": ([_named("alone"), "--optimizer", "AdamX"], "accepted: adamw"),
    "no size": ([_named("build"), "--max-device-memory", "8 apples"], "not a size"),
    "a negative size": ([_named("build"), "--max-disk=-1"], "not a size"),
    "a device quota of 0": ([*_HERE, "--max-device-memory", "0"], "nothing can be computed"),
    "a host quota of 0": ([*_HERE, "--max-host-memory", "0"], "accepted: a size greater than 0"),
    "a device that is not there": ([_named("build"), "--max-device-memory", "1GB"], "has no tier device"),
    "a configuration that is not there": ([_named("build"), "--config", "no.yaml"], "No such file"),
    "a configuration that is wrong": ([_named("build"), "--config", "wrong.yaml"], "max_device_memry"),
    "a machine that is not there": ([_named("build"), "--machine", "no.yaml"], "No such file"),
    "a machine with NaN": ([_named("build"), "--machine", "nan.yaml"], "nan"),
    "a machine that is no mapping": ([_named("build"), "--machine", "list.yaml"], "machine"),
    "a placement that is none": ([_named("build"), "--placement", "list.yaml"], "no placement"),
    "a placement of another model": ([*_HERE, "--placement", "foreign.yaml"], "no such bundle"),
    "a placement with an unknown key": ([*_HERE, "--placement", "unknown.yaml"], "bundels"),
    "a trace that is none": (["--program", "run.yaml"], "trace"),
    "a trace that is not there": (["--program", "no.json"], "No such file"),
    "a trace with an optimizer": (["--program", "trace.json", "--optimizer", "sgd"], "leave --optimizer out"),
    "a trace of another width": (["--program", "trace.json", _named("other")], "bytes in the model"),
    "a trace of another depth": (["--program", "trace.json", _named("deeper")], "param/6.0.weight"),
    "a directory to write to": ([*_HERE, "--write", "."], "is a directory"),
    "nowhere to write to": ([*_HERE, "--trace", "no/such/trace.json"], "is not there"),
    "marks without layers": ([_named("alone"), "--config", "again.yaml"], "recomputes layers"),
    "no sweep": ([*_HERE, "--sweep", "max_device_memory=1GB"], "LEAST..MOST"),
    "a sweep of a tier that is not there": (
        [_named("build"), "--sweep", "max_device_memory=1GB..2GB"],
        "no tier",
    ),
    "a sweep and a comparison": ([*_HERE, "--sweep", "x", "--compare", "a", "b"], "a question of its own"),
    "a sweep that writes a run": ([*_HERE, "--sweep", "x", "--write", "y"], "leave --write out"),
    "a sweep with a page": ([*_HERE, "--sweep", "x", "--page", "y"], "leave --page out"),
    "a picture of nothing": ([*_HERE, "--png", "y"], "--png draws a sweep"),
    "a comparison with nothing": ([*_HERE, "--compare", "rules", "no.yaml"], "No such file"),
    "a machine of no known name": ([_named("build"), "--machine", "h1000"], "h100"),
    "one file for two": ([*_HERE, "--trace", "x", "--write", "x"], "twice"),
}


@pytest.mark.parametrize("what", _WRONG)
def test_whatever_is_wrong_is_one_line_and_exit_code_2(what: str, place: Path, capsys: _Output) -> None:
    words, says = _WRONG[what]
    (place / "wrong.yaml").write_text("max_device_memry: 1MB\n")
    (place / "nan.yaml").write_text(_NAN)
    (place / "list.yaml").write_text("- 1\n")
    (place / "unknown.json").write_text('{"model_type": "lama", "architectures": ["LamaForCausalLM"]}')
    (place / "broken.json").write_text('{"model_type": ')
    (place / "again.yaml").write_text("recompute_config: {recompute: true}\noffload_config: {}\n")
    (place / "foreign.yaml").write_text("bundles: [{keys: [param/nobody], is_pinned: true}]\n")
    (place / "unknown.yaml").write_text("bundels: []\nstashing: always\n")
    if "trace.json" in words:
        assert main(["plan", *_HERE, "--trace", "trace.json"]) == 0
        capsys.readouterr()
    before = sorted(path.name for path in place.iterdir() if path.name != "__pycache__")
    assert main(["plan", *words]) == 2
    printed = capsys.readouterr()
    told = [line for line in printed.err.splitlines() if line != "an import that talks"]
    assert printed.out == ""
    assert len(told) == 1
    assert told[0].startswith("tierstore plan: ")
    assert says in told[0]
    assert sorted(path.name for path in place.iterdir() if path.name != "__pycache__") == before


_NAN = """
tierstore_machine: 1
name: broken
tiers: {host: {capacity: 1GB}}
links: []
compute: {float32: .nan, memory: -1}
host: {float32: 1e9, memory: 1e9}
"""


def test_a_trace_of_another_model_names_five_keys_and_how_many_more(capsys: _Output) -> None:
    main(["plan", *_HERE, "--trace", "trace.json"])
    capsys.readouterr()
    assert main(["plan", "--program", "trace.json", _named("other")]) == 2
    told = capsys.readouterr().err
    assert told.count("param/") == 5
    assert "more" in told


def test_a_machine_of_the_sheet_has_its_figures(capsys: _Output) -> None:
    found = _planned(_named("build"), "--machine", "a100-80gb", capsys=capsys)
    machine = found["machine"]
    assert isinstance(machine, dict)
    assert machine["capacity_bytes"]["device"] == 80 * 10**9
    assert found["share_of_ideal"] is not None


def test_a_machine_without_a_disk_has_none(capsys: _Output) -> None:
    found = _planned(_named("build"), "--max-disk", "0", capsys=capsys)
    machine = found["machine"]
    assert isinstance(machine, dict)
    assert list(machine["capacity_bytes"]) == ["host"]
