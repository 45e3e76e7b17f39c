"""The architecture, where import-linter cannot see it: names, sizes, docstrings, habits."""

from __future__ import annotations

import ast
import functools
import gc
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import tierstore

_ROOT = Path(__file__).parents[2]
_ROOMS = ("tierstore", "backends", "bench", "tests", "docs")
_LONGEST_MODULE = 600

_PUBLIC = {
    # the store
    "Store",
    "Lease",
    "PartReader",
    "Transfer",
    "TensorSpec",
    # what configures it
    "TierConfig",
    "StoreConfig",
    "OffloadConfig",
    # the tree of errors
    "TierStoreError",
    "UsageError",
    "KeyNotFound",
    "KeyExists",
    "LeaseError",
    "ConfigError",
    "NotResident",
    "CapacityError",
    "BackendError",
    "IntegrityError",
    "StoreClosed",
    "StoreForked",
    "InvariantError",
}

_CLIENTS_MAY_IMPORT = _PUBLIC | {
    "crates",
    "data",
    "integrations",
    "nn",
    "optim",
    "planning",
    "testing",
    "training",
}
_BACKENDS_MAY_IMPORT = tuple(
    f"tierstore.{room}"
    for room in (
        "spi",
        "alone",
        "callers",
        "errors",
        "forks",
        "quoting",
        "regular",
        "units",
    )
)


def _modules(*rooms: str) -> list[Path]:
    return [
        path for room in rooms for path in sorted((_ROOT / room).rglob("*.py")) if "_build" not in path.parts
    ]


def _name(path: Path) -> str:
    return str(path.relative_to(_ROOT))


@pytest.fixture(scope="module", autouse=True)
def _trees_are_kept_meanwhile() -> Iterator[None]:
    """Let no collection of garbage look at all of them again and again: parsing takes a sixth of that."""
    gc.disable()
    yield
    gc.enable()
    _tree.cache_clear()


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(path: Path) -> Iterator[str]:
    """Yield what a module imports from tierstore, as dotted names of modules and of names in them."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names if each.name.split(".")[0] == "tierstore")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tierstore":
            yield from (f"{node.module}.{each.name}" for each in node.names)


def _is_public(name: str) -> bool:
    """Say whether a client may import ``name``."""
    _, *parts = name.split(".")
    return (not parts or parts[0] in _CLIENTS_MAY_IMPORT) and not any(part.startswith("_") for part in parts)


def test_the_public_names_equal_the_list() -> None:
    assert set(tierstore.__all__) == _PUBLIC
    assert all(hasattr(tierstore, name) for name in _PUBLIC)


def test_what_is_shipped_for_testing_is_there_without_another_import() -> None:
    assert tierstore.testing.memory.DeviceBudget is not None


def test_every_module_says_what_it_is() -> None:
    assert [_name(path) for path in _modules(*_ROOMS) if not ast.get_docstring(_tree(path))] == []


def test_no_module_is_over_600_lines() -> None:
    lines = {_name(path): path.read_text(encoding="utf-8").count("\n") for path in _modules(*_ROOMS)}
    assert {name: count for name, count in lines.items() if count > _LONGEST_MODULE} == {}


def _sleeps(tree: ast.Module) -> Iterator[str]:
    """Yield each way in which a module sleeps, or brings the function that does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if ast.unparse(node.func) == "time.sleep":
                yield f"time.sleep in line {node.lineno}"
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            yield from (f"{each.name} in line {node.lineno}" for each in node.names if each.name == "sleep")


def test_no_test_sleeps() -> None:
    found = {_name(path): list(_sleeps(_tree(path))) for path in _modules("tests")}
    assert {name: ways for name, ways in found.items() if ways} == {}


def test_what_sleeps_is_seen() -> None:
    text = "import time\nfrom time import monotonic, sleep\ndef f():\n    time.sleep(1)\n    queue.sleep(1)\n"
    assert sorted(_sleeps(ast.parse(text))) == ["sleep in line 2", "time.sleep in line 4"]


def test_no_module_is_named_for_nothing() -> None:
    names = {"utils", "util", "helpers", "helper", "common", "manager", "handler", "misc"}
    assert [_name(path) for path in _modules("tierstore", "backends") if path.stem in names] == []


def test_clients_use_public_names_only() -> None:
    for path in _modules("bench", "docs/examples"):
        assert [name for name in _imports(path) if not _is_public(name)] == [], _name(path)


def test_public_names_are_told_from_others() -> None:
    public = ["tierstore", "tierstore.Store", "tierstore.training.offload", "tierstore.testing.memory"]
    private = ["tierstore.store", "tierstore.store.Store", "tierstore.core.ledger", "tierstore.testing._x"]
    assert [_is_public(name) for name in public + private] == [True] * 4 + [False] * 4


def test_a_backend_imports_nothing_else_of_ours() -> None:
    for path in _modules("backends"):
        foreign = [name for name in _imports(path) if not name.startswith(_BACKENDS_MAY_IMPORT)]
        assert foreign == [], _name(path)


def test_only_offload_and_its_run_import_what_knows_of_other_processes() -> None:
    ranks = "tierstore.training.ranks"
    others = [path for path in _modules("tierstore") if "ranks" not in path.relative_to(_ROOT).parts]
    found = [path for path in others if any(name.startswith(ranks) for name in _imports(path))]
    # In the second one it is the type alone.
    assert [_name(path) for path in found] == ["tierstore/training/offload.py", "tierstore/training/run.py"]


def test_no_file_names_a_place_on_somebody_s_machine() -> None:
    places = re.compile(
        r"(?<![\w.])/(home|Users|root|work|opt)/\w|https?://[^\s/]*(pypi|registry)[^\s/]*/simple"
    )
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=_ROOT, capture_output=True, text=True, check=True,
    ).stdout.split("\0")  # fmt: skip
    named = []
    for entry in filter(None, listed):
        path = _ROOT / entry
        if path == Path(__file__) or not path.is_file():
            continue
        text = path.read_bytes().decode("utf-8", errors="ignore")
        named += [f"{entry}: {found[0]}" for found in places.finditer(text)]
    assert named == []


def test_no_class_of_a_module_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = {}
    for path in _modules("tierstore", "backends"):
        for node in _tree(path).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name.lstrip("_"), []).append(f"{_name(path)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
