"""What importing costs: nothing that takes long is imported before it is used; each in a new process."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys

import pytest

import tierstore
from tierstore import cli

_LATE = (
    *(
        "torch._dynamo",
        "torch._inductor",
        "torch.distributed.tensor",
        "torch.distributed.fsdp",
        "torch.export",
    ),
    *("sympy", "numpy.random", "yaml", "psutil", "zarr", "scipy", "matplotlib", "transformers", "sklearn"),
    *("safetensors", "hypothesis", "pytest", "aiofiles", "fsspec", "obstore", "liburing", "tqdm"),
    *("accelerate", "peft", "trl", "datasets", "lightning", "prometheus_client", "opentelemetry", "rich"),
    *("tierstore.planning.searching", "tierstore.planning.simulating", "tierstore.training.tracing"),
)
"""What takes long to import, or may not be there: nobody waits for it who does not use it."""

_HEAVY = {"torch", "numpy", "yaml", "psutil"}
_MOST_OF_TORCH = 0.35
"""How much of the time of ``import torch`` that of training may take: measured was 0.21."""

_LOADED = "{program}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))"
_QUIETLY = """
import contextlib, io, sys
sys.argv = ["tierstore", *{words!r}]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    {program}
"""
_TIMED = """
import time
begun = time.process_time()
import torch
between = time.process_time()
import tierstore.training
print(between - begun, time.process_time() - between)
"""
_MOST_PAIRS = 8


def _printed(program: str) -> str:
    """Return what a new process prints, which may leave modules compiled: to compile ours takes longer."""
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    words = [sys.executable, "-c", program]
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=True).stdout


def _loaded(program: str) -> set[str]:
    found: list[str] = json.loads(_printed(_LOADED.format(program=program)))
    return set(found)


@pytest.mark.slow
def test_nothing_is_imported_that_takes_long_and_is_not_used() -> None:
    of_torch = _loaded("import torch")
    loaded = _loaded(
        "import tierstore.training, tierstore as ts\n"
        "import tierstore_backends.files, tierstore_backends.memory, tierstore_backends.pinned\n"
        "assert all(hasattr(ts, name) for name in ts.__all__)"
    )
    late = {each for each in loaded - of_torch if any(f"{each}.".startswith(f"{name}.") for name in _LATE)}
    assert late == set()
    assert "torch._dynamo" not in of_torch


@pytest.mark.slow
def test_a_run_that_has_no_use_for_the_compiler_does_not_import_it() -> None:
    loaded = _loaded(
        "import torch\nfrom tierstore.training import offload\nmodel = torch.nn.Linear(2, 2)\n"
        "with offload(model, (), {'device': 'cpu', 'offload_cpu_size': '64MB', 'offload_disk_size': 0}):\n"
        "    model(torch.ones(1, 2)).sum().backward()"
    )
    assert "tierstore.training.opening" in loaded
    assert "torch._dynamo" not in loaded


def test_the_package_alone_imports_neither_torch_nor_numpy() -> None:
    assert _loaded("import tierstore") & _HEAVY == set()


@pytest.mark.parametrize("words", [["--help"], ["--version"], [], ["no-such-verb"], ["--no-such-option"]])
def test_a_command_line_that_calls_no_verb_imports_neither_torch_nor_numpy(words: list[str]) -> None:
    program = _QUIETLY.format(words=words, program="from tierstore.cli import main; main()")
    assert _loaded(program) & _HEAVY == set()


def test_the_first_steps_are_shown_without_torch() -> None:
    program = "from tierstore.cli.first_steps import print_first_steps; print_first_steps()"
    assert _loaded(_QUIETLY.format(words=[], program=program)) & _HEAVY == set()


@pytest.mark.slow
def test_importing_training_takes_a_fraction_of_what_pytorch_takes() -> None:
    """In time of the processor, the least of several of each: a machine may be busy, or slow.

    The first process is not measured: modules may have to be compiled, and pages of PyTorch to be read.
    """
    _printed(_TIMED)
    least_torch = least_training = math.inf
    for _ in range(_MOST_PAIRS):
        of_torch, of_training = map(float, _printed(_TIMED).split())
        least_torch, least_training = min(least_torch, of_torch), min(least_training, of_training)
        if least_training < _MOST_OF_TORCH * least_torch:
            break
    assert least_training < _MOST_OF_TORCH * least_torch


def test_a_verb_that_is_not_called_has_the_help_of_one_that_is() -> None:
    alone = cli._parser(None).format_help()
    assert [name for name in cli._VERBS if cli._parser(name).format_help() != alone] == []


def test_a_verb_that_is_called_has_its_own_arguments() -> None:
    for name in cli._VERBS:
        subparsers = cli._parser(name)._subparsers
        assert subparsers is not None
        (action,) = subparsers._group_actions
        of_verbs: dict[str, object] = dict(action.choices or {})
        counts = {verb: len(vars(parser)["_actions"]) for verb, parser in of_verbs.items()}
        assert {verb for verb, count in counts.items() if count > 1} == {name}


def test_public_names_are_found_as_if_they_were_imported() -> None:
    assert {name for name in tierstore.__all__ if getattr(tierstore, name).__name__ != name} == set()
    assert set(tierstore.__all__) | {"training", "testing", "planning"} <= set(dir(tierstore))
    with pytest.raises(AttributeError, match="no attribute 'Stroe'"):
        _ = tierstore.Stroe
