"""The wheel in an environment that has nothing of this checkout: it runs, and finds its own files."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

import tierstore

_ROOT = Path(__file__).parents[2]
_ALL = """
import importlib, importlib.metadata, importlib.resources, pkgutil, sys
import tierstore, tierstore_backends
own = importlib.metadata.distribution("tierstore")
assert str(own.locate_file("tierstore")).startswith(sys.prefix)
assert all(package.__file__.startswith(sys.prefix) for package in (tierstore, tierstore_backends))
for package in (tierstore, tierstore_backends):
    for each in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not each.name.endswith(("__main__", "_trial")) and "testing" not in each.name:
            importlib.import_module(each.name)
    assert importlib.resources.files(package).joinpath("py.typed").is_file()
page = importlib.resources.files("tierstore.cli.page")
assert all(page.joinpath(name).is_file() for name in ("page.css", "page.html", "page.js"))
backends = importlib.metadata.entry_points(group="tierstore.backends")
assert {each.name for each in backends} == {"device", "files", "memory", "pinned", "zarr"}
assert all(each.load() for each in backends)
"""
_STORE = """
import sys, torch
import tierstore as ts
config = ts.StoreConfig.default("emulated", "1MB", "2MB", "64MB", sys.argv[1])
with ts.Store(config) as store:
    for number in range(10):
        store.put(str(number), torch.full((1 << 17,), float(number)))
    assert [store.get(str(number))[0].item() for number in range(10)] == list(map(float, range(10)))
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def _called(*words: object, cwd: Path) -> str:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")
    }
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel of this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    os.environ.setdefault("PIP_BUILD_CONSTRAINT", str(_ROOT / "constraints.txt"))
    _called(
        sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, _ROOT, cwd=folder
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the wheel alone into a new environment; what it depends on is found where it is here."""
    folder = tmp_path_factory.mktemp("clean")
    _called(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    found = folder / "bin" / "python"
    _called(
        sys.executable, "-m", "pip", "--python", found, "install", "--quiet", "--no-deps", wheel, cwd=folder
    )
    (site,) = (folder / "lib").glob("python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return found


def test_a_wheel_has_the_two_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        rooms = {name.split("/")[0] for name in archive.namelist()}
    assert rooms == {"tierstore", "tierstore_backends", f"tierstore-{tierstore.__version__}.dist-info"}


def test_all_modules_and_files_are_in_it(python: Path, tmp_path: Path) -> None:
    _called(python, "-c", _ALL, cwd=tmp_path)


def test_a_store_works(python: Path, tmp_path: Path) -> None:
    _called(python, "-c", _STORE, tmp_path / "files", cwd=tmp_path)


@pytest.mark.parametrize("words", [("-m", "tierstore"), ("-m", "tierstore", "--version")])
def test_the_package_can_be_run(python: Path, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert tierstore.__version__ in _called(python, *words, cwd=tmp_path)


def test_the_command_is_installed(python: Path, tmp_path: Path) -> None:
    assert "doctor" in _called(python.with_name("tierstore"), "--help", cwd=tmp_path)


def test_the_lines_of_the_first_steps_train(python: Path, tmp_path: Path) -> None:
    program = "from tierstore.cli.first_steps import LOOP; exec(LOOP)"
    assert "TierStats(" in _called(python, "-c", program, cwd=tmp_path)
