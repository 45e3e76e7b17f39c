"""Coverage-guided fuzzing of everything that is read from files which anybody may have written.

``python -m tests.fuzz`` says what there is to fuzz, and how; ``make fuzz`` does each for an hour.

Each module here but `__main__` and the tests is one target.  It has

* ``SEEDS``: inputs to begin with, by what they are;
* ``TOKENS``: what inputs of this kind are made of;
* ``prepared(directory)``, a context that gives the function that judges one input: it returns where the input
  was read rightly, or refused as promised, and raises where it was not.

What libFuzzer changes are bytes, and what it is guided by are the branches of our code, of PyYAML and of zarr
that an input comes to (`atheris` changes their bytecode when they are imported).
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable

Judge = Callable[[bytes], None]

_MOST_MESSAGE_CHARS = 5000


def target_names() -> list[str]:
    """Return what can be fuzzed."""
    names = [module.name for module in pkgutil.iter_modules(__path__)]
    return [name for name in names if not name.startswith(("_", "test_"))]


def see_that_it_is_short(refusal: Exception, most_chars: int = _MOST_MESSAGE_CHARS) -> None:
    """See to it that a refusal says no more than a person reads, whatever was in the file."""
    assert len(str(refusal)) < most_chars
