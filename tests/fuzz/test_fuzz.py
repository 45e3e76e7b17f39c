"""What fuzzing begins with is judged as it should be; for how long it goes on is the profile's affair."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fuzz import target_names
from tests.sampling import too_long_for_ci

_ROOT = Path(__file__).parents[2]
_SECONDS = int(os.environ.get("TIERSTORE_FUZZ_SECONDS", "3600"))

needs_atheris = pytest.mark.skipif(
    importlib.util.find_spec("atheris") is None, reason="there is no atheris for this machine"
)


def fuzz(directory: Path, target: str, *options: str) -> tuple[int, int]:
    """Fuzz a target; return how many inputs there were, and how many branches they came to."""
    command = [sys.executable, "-m", "tests.fuzz", target, *options]
    ended = subprocess.run(  # noqa: PLW1510 - the code is looked at below, with what was said
        command,
        cwd=directory,
        env=os.environ | {"PYTHONPATH": str(_ROOT)},
        capture_output=True,
        text=True,
        errors="replace",
    )
    assert ended.returncode == 0, ended.stderr[-6000:]
    (runs,) = re.findall(r"number_of_executed_units: (\d+)", ended.stderr)
    return int(runs), int(re.findall(r"cov: (\d+)", ended.stderr)[-1])


@pytest.mark.parametrize("target", target_names())
def test_what_fuzzing_begins_with_is_as_it_should_be(target: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"tests.fuzz.{target}")
    with module.prepared(tmp_path) as judge:
        for seed in (*module.SEEDS.values(), b"", b"\0"):
            judge(seed)


@needs_atheris
@too_long_for_ci
def test_fuzzing_is_guided_by_the_branches_of_our_code(tmp_path: Path) -> None:
    runs, branches = fuzz(tmp_path, "indices", "--runs", "300", "--seed", "1")
    assert runs >= 300
    assert branches > 100
    assert not list(tmp_path.iterdir())


@needs_atheris
@pytest.mark.long
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("target", target_names())
def test_fuzzing_finds_nothing(target: str, tmp_path: Path) -> None:
    runs, _ = fuzz(tmp_path, target, "--seconds", str(_SECONDS))
    assert runs > 10
