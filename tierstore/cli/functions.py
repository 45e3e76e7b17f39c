"""A function of a user's, named ``module:function`` on a command line: found and called.

1. The module is looked for as ``python -m`` does: first in the current directory.
2. Whatever the module or the function raises becomes one `UsageError` that says what, and in which line of
   which file; the cause is attached for ``--debug``.  Only a signal or an interrupt passes, which end a
   process on purpose.
3. ``sys.path`` is afterwards as it was.  The module stays imported, as any other.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tierstore.cli.ending import EndedBySignal
from tierstore.config.checks import near
from tierstore.errors import TierStoreError, UsageError
from tierstore.quoting import listed, named, quoted, shortened

_SEPARATOR = ":"
_FILE = ".py"
_NEAR = 0.6
_MESSAGE_CHARS = 500
_OURS = str(Path(__file__).resolve().parents[1])
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})

UserFunction = Callable[..., object]
"""What a user wrote; who knows what it takes."""


def is_function_name(text: str) -> bool:
    """Whether a word of a command line is ``module:function`` rather than a path."""
    module, separator, function = text.rpartition(_SEPARATOR)
    return bool(separator) and _is_dotted(module) and _is_dotted(function)


def function_named(text: str) -> UserFunction:
    """Return the function that ``module:function`` names; imports the module.

    Raises:
        UsageError: it is no such name; the module is not there or raises when it is imported; or there is
            nothing in it of that name that can be called.
    """
    module_name, _, path = text.rpartition(_SEPARATOR)
    if not is_function_name(text):
        raise UsageError(
            f"{quoted(text)} is no name of a function: write module:function, as my.models:llama"
        )
    if module_name.endswith(_FILE):
        right = f"{module_name.removesuffix(_FILE)}{_SEPARATOR}{path}"
        raise UsageError(f"{named(text)} names a file: write {named(right)}")
    with _current_directory_first():
        found: object = _imported(module_name)
    for name in path.split("."):
        found = _member(found, name, module_name)
    if not callable(found):
        raise UsageError(f"{named(text)} is {_kind(found)}, not a function that returns a model")
    return found


def parameters_of(function: UserFunction, name: str, offered: Sequence[str]) -> list[str]:
    """Return which of the arguments that are offered a function takes by name.

    Args:
        function: the user's.
        name: as it was written, for messages.
        offered: names of arguments.

    Raises:
        UsageError: it needs others.
    """
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # of some functions in C nobody knows
        return []
    kinds = inspect.Parameter
    by_name = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
    needed = [
        each.name
        for each in parameters.values()
        if each.default is kinds.empty
        and each.kind not in (kinds.VAR_POSITIONAL, kinds.VAR_KEYWORD)
        and not (each.name in offered and each.kind in by_name)
    ]
    if needed:
        raise UsageError(
            f"{name} needs the argument {listed(needed, show=named)}; a function that makes a model is given "
            f"nothing, or those of {', '.join(offered)} that it takes"
        )
    return [each for each in offered if each in parameters and parameters[each].kind in by_name]


def without_default(function: UserFunction) -> frozenset[str]:
    """Return the names of the parameters that a user's function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(name for name, each in parameters.items() if each.default is inspect.Parameter.empty)


def call(function: UserFunction, name: str, given: Mapping[str, object]) -> object:
    """Call a user's function with arguments by name.

    Raises:
        UsageError: it raises.
    """
    with user_code(f"{name}()"), _current_directory_first():
        return function(**given)


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Turn whatever a user's code raises in the context into one `UsageError`; our own errors pass.

    Args:
        what: runs there, as ``"my.models:llama()"``.
    """
    try:
        yield
    except (TierStoreError, EndedBySignal, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"{what} raised {_told(error)}{_place_of(error)}") from error


@contextlib.contextmanager
def _current_directory_first() -> Iterator[None]:
    before = list(sys.path)
    sys.path.insert(0, str(Path.cwd()))
    try:
        yield
    finally:
        sys.path[:] = before


def _imported(name: str) -> object:
    importlib.invalidate_caches()
    try:
        with user_code(f"importing {name}"):
            return importlib.import_module(name)
    except UsageError as error:
        cause = error.__cause__
        is_absent = isinstance(cause, ModuleNotFoundError) and cause.name is not None
        if is_absent and f"{name}.".startswith(f"{cause.name}."):  # type: ignore[union-attr]
            raise UsageError(
                f"there is no module {named(cause.name)}, neither in the current directory "  # type: ignore[union-attr]
                f"({Path.cwd()}) nor installed"
            ) from cause
        raise


def _member(owner: object, name: str, module_name: str) -> object:
    found: object = inspect.getattr_static(owner, name, None)
    if found is None:
        with user_code(f"looking for {name} in {module_name}"):
            found = getattr(owner, name, None)
    else:
        found = getattr(owner, name)
    if found is None:
        known = (
            [each for each in vars(owner) if not each.startswith("_")] if hasattr(owner, "__dict__") else []
        )
        close = near(name, known, cutoff=_NEAR)
        hint = f"; did you mean {named(close[0])}?" if close else ""
        raise UsageError(f"{named(module_name)} has no {named(name)}{hint}")
    return found


def _told(error: BaseException) -> str:
    text = shortened(" ".join(str(error).split()), _MESSAGE_CHARS)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _place_of(error: BaseException) -> str:
    """Return where the innermost line of a user's was that an error went through; empty: none is known."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({error.filename}, line {error.lineno})"
    foreign = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
    frames = [frame for frame in foreign if not _is_installed(frame.filename)] or foreign
    return f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""


def _is_ours(path: str) -> bool:
    return path.startswith(("<", _OURS)) or path in (importlib.__file__, contextlib.__file__)


def _is_installed(path: str) -> bool:
    """Whether a file is Python's or of an installed package."""
    return any(path.startswith(place) for place in _INSTALLED)


def _is_dotted(text: str) -> bool:
    return bool(text) and all(part.isidentifier() for part in text.split("."))


def _kind(value: object) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"of type {type(value).__name__}"
