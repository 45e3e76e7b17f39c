"""Backend names to backends, through entry points."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from tierstore.engine import registry
from tierstore.engine.registry import backend_names, open_backend
from tierstore.errors import BackendError, ConfigError
from tierstore.spi import Backend


def _declare(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    """Let the installed packages be ones that declare these backends."""
    declared = EntryPoints(EntryPoint(name, value, registry.GROUP) for name, value in targets.items())

    def entry_points(group: str, name: str | None = None) -> EntryPoints:
        return declared if name is None else declared.select(name=name)

    monkeypatch.setattr(registry, "entry_points", entry_points)
    monkeypatch.setattr(registry, "_found", {})


def _refusing(error: Exception) -> Callable[..., Backend]:
    def factory(*, capacity_bytes: int, options: Mapping[str, object]) -> Backend:
        raise error

    return factory


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], None]:
    """Declare a backend ``medium`` whose factory raises."""

    def declare(error: Exception) -> None:
        _declare(monkeypatch, medium=f"{__name__}:factory")
        monkeypatch.setattr(EntryPoint, "load", lambda self: _refusing(error))

    return declare


def test_the_backends_of_this_project_are_declared() -> None:
    assert {"device", "files", "memory", "pinned"} <= set(backend_names())


def test_the_names_come_from_the_installed_packages() -> None:
    declared = {each.name for each in importlib.metadata.entry_points(group="tierstore.backends")}
    assert set(backend_names()) == declared


def test_installed_packages_are_looked_through_once_for_a_name_that_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _declare(monkeypatch)
    with pytest.raises(ConfigError, match="no such backend"):
        open_backend("mine", capacity_bytes=8, options={})
    monkeypatch.setattr(  # a package that is installed while the program runs
        registry,
        "entry_points",
        _Once(EntryPoints([EntryPoint("mine", "tierstore_backends.memory:open_backend", registry.GROUP)])),
    )
    for _ in range(2):
        open_backend("mine", capacity_bytes=8, options={}).close()


class _Once:
    """`entry_points`, which may be called once."""

    def __init__(self, declared: EntryPoints) -> None:
        self._declared = [declared]

    def __call__(self, group: str, name: str) -> EntryPoints:
        return self._declared.pop().select(group=group, name=name)


def test_a_backend_is_opened_with_its_capacity_and_options() -> None:
    backend = open_backend("memory", capacity_bytes=8, options={})
    try:
        assert backend.reserve(8).nbytes == 8
    finally:
        backend.close()


def test_an_unknown_name_is_refused_with_the_known_ones_and_the_likely_one() -> None:
    with pytest.raises(ConfigError, match=r"backend='memroy'.*did you mean 'memory'\? .*files.*pinned"):
        open_backend("memroy", capacity_bytes=1, options={})


def test_a_name_near_to_nothing_is_refused_without_a_guess() -> None:
    with pytest.raises(ConfigError) as refused:
        open_backend("zzzzzz", capacity_bytes=1, options={})
    assert "did you mean" not in str(refused.value)


def test_where_nothing_is_declared_the_message_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    _declare(monkeypatch)
    with pytest.raises(ConfigError, match="accepted: nothing"):
        open_backend("memory", capacity_bytes=1, options={})


@pytest.mark.parametrize("value", ["no_such_module:open_backend", "tierstore_backends:no_such_factory"])
def test_a_backend_that_cannot_be_loaded_is_a_backend_error_with_its_cause(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    _declare(monkeypatch, broken=value)
    with pytest.raises(BackendError, match="'broken' cannot be loaded") as refused:
        open_backend("broken", capacity_bytes=1, options={})
    assert isinstance(refused.value.__cause__, ImportError | AttributeError)


def test_a_broken_backend_does_not_stand_in_another_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    _declare(monkeypatch, broken="no_such_module:x", memory="tierstore_backends.memory:open_backend")
    open_backend("memory", capacity_bytes=1, options={}).close()


def test_a_factory_s_own_refusal_comes_through_unchanged(refusing: Callable[[Exception], None]) -> None:
    refusal = ConfigError("pathh='x': unknown key")
    refusing(refusal)
    with pytest.raises(ConfigError) as refused:
        open_backend("medium", capacity_bytes=1, options={"pathh": "x"})
    assert refused.value is refusal


def test_a_factory_s_surprise_is_a_backend_error_with_its_cause(
    refusing: Callable[[Exception], None],
) -> None:
    surprise = ZeroDivisionError("boom")
    refusing(surprise)
    with pytest.raises(BackendError, match=r"'medium' did not open \(7 bytes.*'path': 'x'.*boom") as refused:
        open_backend("medium", capacity_bytes=7, options={"path": "x"})
    assert refused.value.__cause__ is surprise
