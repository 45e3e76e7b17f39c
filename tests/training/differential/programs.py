"""A program: data that prints as a short Python module, and it is that text which runs.

A `Piece` names an entry of a table (`models.PARTS`, `loops.ACTIONS` and so on) and gives two small
numbers, which choose among what the entry offers: ``<a>`` in its text is the first number and
``<a:x|y|z>`` one of three alternatives, ``<b>`` and ``<b:...>`` likewise for the second.  Numbers shrink
towards zero and tuples towards shorter ones, so the smallest program that differs is the one that reads best.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

from tests.training.differential import buffers
from tests.training.differential.hooks import HOOKS
from tests.training.differential.loops import ACTIONS
from tests.training.differential.models import KNOTS, PARTS
from tests.training.differential.optimizers import OPTIMIZERS

TABLES = {
    "part": PARTS | buffers.PARTS,
    "knot": KNOTS | buffers.KNOTS,
    "hook": HOOKS,
    "optimizer": OPTIMIZERS,
    "action": ACTIONS,
}

WORDS = ("fused=True", "prepend=True")
"""What some alternatives of a piece have in their text, and others do not."""


@dataclass(frozen=True, order=True)
class Piece:
    """An entry of a table with its two numbers."""

    table: str
    name: str
    a: int = 0
    b: int = 0

    @property
    def feature(self) -> str:
        """What `features.OFF` knows it by."""
        return f"{self.table} {self.name}"

    @property
    def text(self) -> str:
        """The piece in Python."""
        return filled(TABLES[self.table][self.name], self.a, self.b)


@dataclass(frozen=True, order=True)
class Layout:
    """Where the state of training goes.

    Attributes:
        name: of `running.LAYOUTS`.
        room: how much of it the fast tiers hold, a number of `running.ROOMS`.
        activations: what is done with them, a name of `running.ACTIVATIONS`.
        side: which parts compute on the host beside a device, a bit each (`sides`).
        target: where what computes on the device is stepped beside one.
    """

    name: str = "host"
    room: int = 0
    activations: str = "kept"
    side: int = 0
    target: str = "device"


@dataclass(frozen=True, order=True)
class Program:
    """A loop with its model.

    Attributes:
        parts: of the model, one after another.
        knots: what is done to the model before it is offloaded.
        before: hooks registered before.
        optimizers: that train it.
        after: hooks registered after.
        actions: of the loop.
        layout: where the state goes.
        is_watched: whether the end is looked at before the run is closed, too.
        turns: how often the loop does all of its actions.
    """

    parts: tuple[Piece, ...]
    knots: tuple[Piece, ...]
    before: tuple[Piece, ...]
    optimizers: tuple[Piece, ...]
    after: tuple[Piece, ...]
    actions: tuple[Piece, ...]
    layout: Layout
    is_watched: bool = False
    turns: int = 1

    def pieces(self) -> Iterator[Piece]:
        """Every piece, in the order in which they run."""
        for each in (self.parts, self.knots, self.before, self.optimizers, self.after, self.actions):
            yield from each

    def features(self) -> Iterator[str]:
        """What `features.OFF` knows its pieces by, and the words that it knows."""
        yield from (piece.feature for piece in self.pieces())
        yield from (word for word in WORDS if word in self.text)
        if self.layout.side:
            yield "side"
        if self.layout.target != "device":
            yield "target"

    @property
    def text(self) -> str:
        """The program in Python: three functions that are given the trial `t`."""
        lines = ["def build(t):", "    m = t.model = nn.Sequential("]
        lines += [f"        {part.text}," for part in self.parts]
        lines += ["    )"]
        lines += _body(self.knots)
        lines += ["    t.opts = []"]
        lines += _body(self.optimizers)
        lines += _body(self.before)
        lines += ["", "def after(t):", "    m = t.model", *_body(self.after)]
        lines += ["", "def loop(t):", "    m = t.model"]
        if self.turns > 1:
            lines += [f"    for _ in range({self.turns}):"]
        width = 8 if self.turns > 1 else 4
        for number, action in enumerate(self.actions):
            lines += [f"{' ' * width}with t.act({number}, {action.name!r}):"]
            lines += _indented(action.text, width + 4)
        return "\n".join(lines) + "\n"


def _body(pieces: tuple[Piece, ...]) -> list[str]:
    return [line for piece in pieces for line in _indented(piece.text, 4)]


def _indented(text: str, width: int) -> list[str]:
    return textwrap.indent(textwrap.dedent(text).strip("\n"), " " * width).splitlines()


_HOLE = re.compile(r"<([ab])(?::([^<>]*))?>")


def filled(text: str, a: int, b: int) -> str:
    """Return the text of an entry with its numbers put in."""
    numbers = {"a": a, "b": b}

    def chosen(match: re.Match[str]) -> str:
        number, alternatives = numbers[match[1]], match[2]
        if alternatives is None:
            return str(number)
        choices = alternatives.split("|")
        return choices[number % len(choices)]

    return _HOLE.sub(chosen, text)
