"""Where in a program something happened: the line of the program that asked for it."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch

from tierstore.errors import TierStoreError, UsageError
from tierstore.quoting import quoted

_MOST_CHARS = 300
_OURS = Path(__file__).parents[2]
_PYTORCHS = Path(torch.__file__).parent
_PYTHONS = Path(contextlib.__file__).parent
_INSTALLED = "site-packages"
_RUNS_PROGRAMS = str(Path(__file__).with_name("steps.py"))


def is_programs_own(file: str) -> bool:
    """Whether a file is not ours, PyTorch's or Python's."""
    path = Path(file)
    if not path.is_absolute() or path.is_relative_to(_OURS) or path.is_relative_to(_PYTORCHS):
        return False
    return _INSTALLED in path.parts or not path.is_relative_to(_PYTHONS)


def calling_line() -> str:
    """Return file and line of the innermost call of the program's own; ``""``: it does not run now."""
    frame: FrameType | None = sys._getframe()  # noqa: SLF001 - nobody else tells
    while frame is not None and frame.f_code.co_filename != _RUNS_PROGRAMS:
        if is_programs_own(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def raising_line(error: BaseException) -> str:
    """Return file and line of the innermost call that raised an exception and is the program's own.

    Where there is none, it is another's, but none of ours; ``""``: there is none either.
    """
    calls = [each for each in traceback.extract_tb(error.__traceback__) if Path(each.filename).is_absolute()]
    foreign = [each for each in calls if not Path(each.filename).is_relative_to(_OURS)]
    own = [each for each in foreign if is_programs_own(each.filename)] or foreign
    return f"{own[-1].filename}:{own[-1].lineno}" if own else ""


@contextlib.contextmanager
def named_errors(doing: str) -> Iterator[None]:
    """Raise `UsageError` for whatever the program raises inside the context.

    Args:
        doing: what the program does there, as a message says it.

    Raises:
        UsageError: its type, its text, and the line that raised it.
    """
    try:
        yield
    except TierStoreError:
        raise
    except Exception as error:
        where = raising_line(error)
        text = quoted(str(error)[:_MOST_CHARS])
        at = f" at {where}" if where else ""
        raise UsageError(f"{doing} raised {type(error).__name__}{at}: {text}") from error
