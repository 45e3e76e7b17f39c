"""``module:function`` on a command line: what is found, what is called, and what is said of what raises."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tierstore.cli.ending import EndedBySignal
from tierstore.cli.functions import call, function_named, is_function_name, parameters_of
from tierstore.errors import CapacityError, UsageError

_MODULE = "models_of_a_user"

_SOURCE = """
import tests.unit.test_cli_functions as ours

seven = 7

class Inner:
    @staticmethod
    def build():
        return "inner"

def build():
    return "made"

def raises():
    helper()

def helper():
    raise ValueError("no  such\\n  width")

def leaves():
    raise SystemExit(0)

def runs_out():
    return runs_out()

def is_ours():
    raise ours.CapacityError("no room")

def is_ended():
    raise ours.EndedBySignal(143)

def interrupted():
    raise KeyboardInterrupt

def sized(batch=1, *, sequence=2):
    return batch, sequence

def takes_anything(**rest):
    return rest

def needs(width, depth=3):
    return width

def first_only(batch):
    return batch

def empty():
    raise ValueError
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Go to a directory with a module of a user's."""
    (tmp_path / f"{_MODULE}.py").write_text(_SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, _MODULE, raising=False)
    return tmp_path


def _called(name: str, **given: object) -> object:
    written = f"{_MODULE}:{name}"
    return call(function_named(written), written, given)


@pytest.mark.parametrize("text", ["m:f", "a.b.c:f", "a_1:F.g"])
def test_a_module_and_a_function_are_a_name(text: str) -> None:
    assert is_function_name(text)


@pytest.mark.parametrize(
    "text", ["", ":", "m:", ":f", "m", "config.json", "a/b:f", "C:\\x.json", "m:f()", "a..b:f"]
)
def test_anything_else_is_none(text: str) -> None:
    assert not is_function_name(text)
    with pytest.raises(UsageError, match="module:function"):
        function_named(text)


def test_a_module_is_found_in_the_current_directory_and_the_path_is_as_before() -> None:
    before = list(sys.path)
    assert _called("build") == "made"
    assert sys.path == before


def test_a_function_in_a_class_is_found() -> None:
    assert _called("Inner.build") == "inner"


def test_what_is_given_arrives_by_name() -> None:
    assert _called("sized", batch=4, sequence=8) == (4, 8)
    assert _called("sized") == (1, 2)
    assert _called("takes_anything", batch=4) == {"batch": 4}


_SAYS: Mapping[str, tuple[str, ...]] = {
    "raises": ("ValueError: no such width", f"{_MODULE}.py, line 18"),
    "leaves": ("SystemExit: 0", f"{_MODULE}.py"),
    "runs_out": ("RecursionError",),
    "empty": ("raised ValueError (",),
    "buidl": (f"{_MODULE} has no buidl", "did you mean build?"),
    "Inner.bild": ("has no bild", "build"),
    "seven": ("is of type int, not a function",),
}


@pytest.mark.parametrize("name", _SAYS)
def test_what_is_wrong_is_one_usage_error_with_its_place(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        _called(name)
    assert "\n" not in str(caught.value)
    for words in _SAYS[name]:
        assert words in str(caught.value)


_OFFERED = ("batch", "sequence", "dtype")


@pytest.mark.parametrize(
    ("name", "taken"),
    [("build", []), ("sized", ["batch", "sequence"]), ("takes_anything", []), ("first_only", ["batch"])],
)
def test_a_function_is_offered_what_it_takes_by_name(name: str, taken: list[str]) -> None:
    function = function_named(f"{_MODULE}:{name}")
    assert parameters_of(function, name, _OFFERED) == taken


def test_a_function_that_needs_something_else_is_told_what_it_is_given() -> None:
    with pytest.raises(UsageError, match=r"needs the argument width; .* batch, sequence, dtype"):
        parameters_of(function_named(f"{_MODULE}:needs"), "needs", _OFFERED)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("is_ours", CapacityError), ("is_ended", EndedBySignal), ("interrupted", KeyboardInterrupt)],
)
def test_our_own_errors_and_what_ends_the_process_pass(name: str, kind: type[BaseException]) -> None:
    with pytest.raises(kind):
        _called(name)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import no_such_module_at_all", "No module named 'no_such_module_at_all'"),
        ("raise RuntimeError('no licence')", "RuntimeError: no licence"),
        ("def f(:", "line 1"),
        ("import sys; sys.exit('usage')", "SystemExit: usage"),
        ("def __getattr__(name):\n    raise OSError(name)", "OSError: build"),
    ],
)
def test_a_module_that_raises_is_told_apart_from_one_that_is_not_there(
    place: Path, monkeypatch: pytest.MonkeyPatch, source: str, words: str
) -> None:
    (place / "broken_module.py").write_text(source)
    monkeypatch.delitem(sys.modules, "broken_module", raising=False)
    with pytest.raises(UsageError) as caught:
        function_named("broken_module:build")
    assert words in str(caught.value)
    assert "there is no module" not in str(caught.value)
    assert "broken_module" in str(caught.value)


@pytest.mark.parametrize("name", ["no_such_module", "tierstore.no_such.module"])
def test_a_module_that_is_not_there_is_said_to_be_so(name: str) -> None:
    with pytest.raises(UsageError, match="there is no module"):
        function_named(f"{name}:build")


@pytest.mark.parametrize("built_in", [dict, max])
def test_functions_without_a_signature_are_called(built_in: Callable[..., object]) -> None:
    assert parameters_of(built_in, "built in", _OFFERED) == []
    if built_in is dict:
        assert call(built_in, "builtins:dict", {}) == {}
    else:
        with pytest.raises(UsageError, match="TypeError"):
            call(built_in, "builtins:max", {})
