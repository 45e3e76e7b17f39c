"""Two versions of tierstore by turns, at a small scale: that they can be compared, and what is refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from bench.command import Settings
from bench.scenes import SCENES
from bench.versions import NAMES, Version, both, compare, place_of
from tests.sampling import too_long_for_ci

ROOT = Path(__file__).parents[2]


@pytest.fixture
def other_python(tmp_path: Path) -> str:
    """Return a Python whose tierstore is this one in another place."""
    for name in ("tierstore", "backends/tierstore_backends"):
        link = tmp_path / "other" / Path(name).name
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(ROOT / name)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path / "other"} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
@pytest.mark.parametrize("scene", ["in memory", "lease"])
@too_long_for_ci
def test_both_take_turns_and_their_losses_are_compared(scene: str, other_python: str, tmp_path: Path) -> None:
    figure = compare(other_python, scene, Settings(tmp_path, repeats=1, warmups=0, scale=0.004))
    assert NAMES[figure.name] == scene
    assert figure.reached > 0
    assert ("losses" in figure.details) == (scene == "in memory")


@pytest.mark.slow
@pytest.mark.parametrize("scene", SCENES)
def test_every_scene_takes_its_turn(scene: str, tmp_path: Path) -> None:
    with SCENES[scene](Settings(tmp_path, scale=0.004)) as turn:
        assert all(isinstance(value, float) for value in turn().values())


def test_a_version_is_not_compared_with_itself(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="both versions are the one in"),
        both(sys.executable, "lease", Settings(tmp_path, scale=0.01)),
    ):
        pass


def test_where_a_version_is_is_known_before_it_runs(other_python: str, tmp_path: Path) -> None:
    assert place_of(other_python) == tmp_path / "other" / "tierstore"
    empty = tmp_path / "empty"
    empty.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    empty.chmod(0o755)
    with pytest.raises(RuntimeError, match="has no tierstore"):
        place_of(str(empty))


def test_a_process_that_ends_is_told(tmp_path: Path) -> None:
    with Version(sys.executable, "no scene", Settings(tmp_path)) as version, pytest.raises(RuntimeError):
        version.ready()
