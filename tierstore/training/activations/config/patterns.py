r"""Patterns that name operators of a layer.

Rule 1: a pattern is levels, separated by a backslash and a point; each level is a regular expression of its
own.  A point alone is the regular expression's and separates nothing: ``.*\.norm`` has two levels.
Rule 2: a pattern matches a path of as many names, counted from the layer, each name **fully**.
Rule 3: a pattern whose first level is the text ``aten`` names ATen operators instead: ``aten\.mm`` or
``aten\.add\.Tensor``, each level after ``aten`` again a regular expression.  Torch's own spelling of a name,
``aten.mm`` or ``aten.add.Tensor``, means that name literally.  Without an overload every overload matches.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field

from tierstore.errors import ConfigError
from tierstore.quoting import quoted

SEPARATOR = r"\."
"""Stands between the levels of a pattern."""

Path = tuple[str, ...]
"""Names of submodules from a layer down to an operator."""

_MOST_CHARS = 1000  # of a pattern; what is longer takes long to compile, and names nothing
_ATEN = "aten"
_ATEN_NAME = re.compile(r"aten(\.\w+){1,2}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Pattern:
    r"""A pattern, compiled.  Two are equal if their texts are.

    Attributes:
        text: as the user wrote it.
        levels: a regular expression a level.

    Raises:
        ConfigError: the text is empty, has an empty level, or a level is no regular expression; the
            message names the pattern and the level.
    """

    text: str
    levels: tuple[re.Pattern[str], ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "levels", _compiled(self.text))

    @property
    def is_aten(self) -> bool:
        """Whether it names ATen operators, not submodules."""
        return len(self.levels) > 1 and self.levels[0].pattern == _ATEN

    @property
    def is_single_level(self) -> bool:
        """Whether it names children of the layer, which the log prints with a point before them."""
        return len(self.levels) == 1

    def matches(self, path: Sequence[str]) -> bool:
        """Say whether the submodule at ``path``, names counted from the layer, is meant."""
        if self.is_aten or len(path) != len(self.levels):
            return False
        return all(level.fullmatch(name) for level, name in zip(self.levels, path, strict=True))

    def matches_aten(self, operator: str) -> bool:
        """Say whether an ATen operator is meant.

        Args:
            operator: its name as ``str`` of an ``OpOverload`` or its packet gives it (``aten.mm.default``,
                ``aten.mm``), or as its schema does (``aten::add.Tensor``).
        """
        names = operator.replace("::", ".").split(".")
        if not self.is_aten or len(names) < 2:
            return False
        names = names if len(names) > 2 else [*names, "default"]
        pairs = zip(self.levels, names, strict=False)
        return len(names) >= len(self.levels) and all(level.fullmatch(name) for level, name in pairs)

    def equals(self, other: Pattern) -> bool:
        r"""Say whether both mean the same: level by level, one matches the other's text.

        This is what an exclusion is compared by: ``.*\.norm`` equals ``ffn_norm\.norm``.
        """
        if len(self.levels) != len(other.levels):
            return False
        pairs = zip(self.levels, other.levels, strict=True)
        return all(one.fullmatch(two.pattern) or two.fullmatch(one.pattern) for one, two in pairs)


def pattern_text(value: object) -> str:
    """Accept the text of a pattern, and return it: a check.

    Raises:
        ConfigError: it is none; the message says why.
    """
    if not isinstance(value, str):
        raise ConfigError(r"accepted: the pattern of an operator, as text such as 'feed_forward\.mul'")
    return Pattern(value).text


def _compiled(text: str) -> tuple[re.Pattern[str], ...]:
    """Return the levels of a pattern."""
    if _ATEN_NAME.fullmatch(text):
        return tuple(re.compile(re.escape(name)) for name in text.split("."))
    return tuple(_level(level, text) for level in text.split(SEPARATOR))


def _level(level: str, text: str) -> re.Pattern[str]:
    if len(text) > _MOST_CHARS:
        raise ConfigError(
            f"pattern {quoted(text)} has {len(text)} characters; accepted: at most {_MOST_CHARS}"
        )
    if not level:
        what = "is empty" if not text else "has an empty level"
        raise ConfigError(
            f"pattern '{text}' {what}; accepted: regular expressions, one a level of submodules"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # "possible nested set": it means what it means
            return re.compile(level)
    except (re.error, OverflowError, RecursionError) as cause:
        raise ConfigError(
            f"pattern '{text}': its level '{level}' is no regular expression ({cause}); levels are separated "
            r"by a backslash and a point ('\.') before anything else is read"
        ) from cause
