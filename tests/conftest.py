"""What every test shares: Hypothesis' profiles, and the marks that need hardware.

``--simulate-accelerator`` gives the whole process the simulated accelerator (`tests.accelerator`), for the
tests in that folder, those marked ``gpu``, and those of training that are there for each layout of
`tests.training.twins`.  Without it those in that folder are not collected.  Where it cannot be built, all of
it is skipped, with the reason; with ``TIERSTORE_REQUIRE_ACCELERATOR=1`` that is a failure.

``--on-accelerator`` is the same for the accelerator of the machine: the tests of training that are there for
each layout run on it, in layouts whose device it is.
"""

from __future__ import annotations

import gc
import os
import signal
import zlib
from collections.abc import Generator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import forked_programs, target
from tests.sampling import IS_CI, PROFILE, tried

_SLOW_STORES = [HealthCheck.too_slow, HealthCheck.data_too_large]

# What is started in the background ignores SIGINT, and under nohup SIGHUP; so would the programs of tests.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)

# Tests limit a GPU's memory to kilobytes; by itself cuBLAS takes 32 MB for each thread, and for good.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":0:0")
os.environ.setdefault("CUBLASLT_WORKSPACE_SIZE", "0")

# Two threads of a small operation spend their time waiting for each other, most of all beside others.
torch.set_num_threads(1)

settings.register_profile("default", max_examples=50, deadline=None, suppress_health_check=_SLOW_STORES)
settings.register_profile(
    "ci",
    max_examples=15,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=_SLOW_STORES,
)
settings.register_profile(
    "long", max_examples=5_000, stateful_step_count=200, deadline=None, suppress_health_check=_SLOW_STORES
)
settings.load_profile(PROFILE)

_LONG_TIMEOUT_S = 7200
_LARGE_GRID = 16  # cases of one test, each in several layouts

_SIMULATE = "--simulate-accelerator"
_ON_ACCELERATOR = "--on-accelerator"
_TESTS = Path(__file__).parent
_NEEDS_SIMULATION = _TESTS / "accelerator"
_TRAINING = _TESTS / "training"
_LAID_OUT = frozenset({"conformance", "fault", "integrations", "training"})
"""Where cases are large, and come in layouts or beside others: CI tries fewer of them."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Offer the accelerators."""
    parser.addoption(_SIMULATE, action="store_true", help="run on a simulated accelerator: the whole process")
    parser.addoption(_ON_ACCELERATOR, action="store_true", help="train on the accelerator of this machine")


def pytest_configure(config: pytest.Config) -> None:
    """Say which accelerator was asked for, and bring the simulated one, before any test looks for one."""
    if config.getoption(_SIMULATE):
        _bring_the_simulated_one()
    if config.getoption(_SIMULATE) or config.getoption(_ON_ACCELERATOR):
        found = torch.accelerator.current_accelerator()
        if found is None:
            raise pytest.UsageError(f"{_ON_ACCELERATOR}: PyTorch finds no accelerator on this machine")
        target.accelerator = found.type
    if target.accelerator == "cuda":  # kernels that do not promise the same bits each time
        config.addinivalue_line("filterwarnings", "ignore:.*deterministic:UserWarning")


def _bring_the_simulated_one() -> None:
    try:
        import tests.accelerator  # noqa: F401 - from here on PyTorch has it
    except ImportError as error:
        if error.name != "openreg":
            raise
        if os.environ.get("TIERSTORE_REQUIRE_ACCELERATOR") == "1":
            raise pytest.UsageError(str(error)) from error
        pytest.exit(f"tests on the simulated accelerator are skipped: {error}", returncode=0)


def pytest_unconfigure() -> None:
    """End what the programs of tests were forked from."""
    forked_programs.end()


def pytest_report_teststatus(report: pytest.TestReport) -> tuple[str, str, str] | None:
    """Name a test that failed at once: a run that is ended by force comes to no summary."""
    return ("failed", f"\nFAILED {report.nodeid}\n", "FAILED") if report.failed else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out what only the simulated accelerator can run."""
    is_simulated = config.getoption(_SIMULATE)
    return True if _NEEDS_SIMULATION in collection_path.parents and not is_simulated else None


def _freeze() -> None:
    """Let no collection of garbage look at what is there for good: the library asks for many."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect no garbage while tests are collected: nearly all that is made then stays."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Freeze what collecting has imported, and the tests."""
    del session
    _freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Freeze what a file of tests has left: in the end of a run, a collection would take seconds."""
    if nextitem is None or nextitem.path != item.path:
        _freeze()


def _is_for_an_accelerator(item: pytest.Item) -> bool:
    """Say whether a test is more than one of training in a layout that no accelerator has."""
    if _TRAINING not in item.path.parents:
        return True
    from tests.training.twins import LAYOUTS

    callspec = getattr(item, "callspec", None)
    return callspec is not None and callspec.params.get("layout") in list(LAYOUTS)  # some are dicts


def _layouts_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what CI leaves out: of four layouts of a case two are tried, one with a device and one without.

    Of each case of a large grid one is: its cases have all layouts together.  Which ones differs from case to
    case; `make test` tries all.
    """
    grids: dict[str, dict[str, dict[str, pytest.Item]]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        layout = callspec.params.get("layout") if callspec is not None else None
        if layout in ["host", "disk", "device", "three"]:  # some are dicts
            name, _, parameters = item.nodeid.partition("[")
            case = "-".join(each for each in parameters.rstrip("]").split("-") if each != layout)
            grids.setdefault(name, {}).setdefault(case, {})[str(layout)] = item
    left_out: set[pytest.Item] = set()
    for name, cases in grids.items():
        for case, found in cases.items():
            tried = _tried_layouts(sorted(found), zlib.crc32((name + case).encode()), len(cases))
            left_out.update(item for layout, item in found.items() if layout not in tried)
    return left_out


def _tried_layouts(layouts: list[str], number: int, cases: int) -> list[str]:
    """Return the layouts in which CI tries a case that has this number, one of so many."""
    if cases >= _LARGE_GRID:
        return [layouts[number % len(layouts)]]
    if len(layouts) == 4:
        return ["host", "device"] if number % 2 else ["disk", "three"]
    return layouts


def _name(item: pytest.Item) -> str:
    return item.nodeid


def _cases_left_out(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return what CI leaves out of grids: it tries one case of a test, and every sixth or twelfth other."""
    grids: dict[str, list[pytest.Item]] = {}
    for item in items:
        grids.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left_out: set[pytest.Item] = set()
    for cases in grids.values():
        is_laid_out = cases[0].path.relative_to(_TESTS).parts[0] in _LAID_OUT
        chosen = tried(cases, always=1, of=12 if is_laid_out else 6, name=_name)
        left_out.update(set(cases).difference(chosen))
    return left_out


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=list(left_out))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Give the long profile time, and leave out what needs an accelerator, or another one, than there is."""
    if target.accelerator is not None:
        _leave_out(config, items, {item for item in items if not _is_for_an_accelerator(item)})
    if IS_CI:
        if target.accelerator is None:
            _leave_out(config, items, _layouts_left_out(items))
        _leave_out(config, items, _cases_left_out(items))
    if PROFILE == "long":  # a test's own limit is for a hundred examples, not for thousands
        for item in items:
            item.add_marker(pytest.mark.timeout(_LONG_TIMEOUT_S), append=False)
    if not torch.accelerator.is_available():
        _skip_what_needs_one(items)


def _skip_what_needs_one(items: list[pytest.Item]) -> None:
    skip = pytest.mark.skip(reason="no torch accelerator on this machine")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)
