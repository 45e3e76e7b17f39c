"""Programs drawn by Hypothesis: small ones first, and they shrink towards small ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hypothesis import strategies as st

from tests.training.differential.features import OFF, is_off
from tests.training.differential.programs import TABLES, Layout, Piece, Program
from tests.training.differential.running import ACTIVATIONS, LAYOUTS, ROOMS

_NUMBERS = st.integers(0, 23)

TIGHT = ("disk", "device", "three")
RARE = {
    "part compiled",
    "part traced",
    "part scripted",
    "knot flat",
    "knot buffer alias",
    "optimizer lbfgs",
    "knot alias kept",
    "knot buffer kept",
}
"""Slow to build, or refused: drawn once where others are drawn eight times."""


def _names(table: str, off: Mapping[str, str]) -> list[str]:
    names = [name for name in TABLES[table] if f"{table} {name}" not in off]
    common = [name for name in names if f"{table} {name}" not in RARE]
    return common * 8 + [name for name in names if name not in common] if len(common) < len(names) else names


def pieces(table: str, off: Mapping[str, str] = OFF) -> st.SearchStrategy[Piece]:
    """Return the entries of a table."""
    return st.builds(Piece, st.just(table), st.sampled_from(_names(table, off)), _NUMBERS, _NUMBERS)


def _some(
    table: str, most: int, off: Mapping[str, str], least: int = 0
) -> st.SearchStrategy[tuple[Piece, ...]]:
    return st.lists(pieces(table, off), min_size=least, max_size=most).map(tuple)


_TRAINING = ["train", "train and look"] * 3 + ["train quietly"]
_TRAIN = st.builds(Piece, st.just("action"), st.sampled_from(_TRAINING), _NUMBERS, _NUMBERS)

_STEP = Piece("action", "train")
"""What loops begin with now and then, so that plans are learnt and steps are made ahead."""


def programs(off: Mapping[str, str] = OFF) -> st.SearchStrategy[Program]:
    """Return programs.

    Args:
        off: what they do not consist of.
    """
    drawn_actions = st.lists(st.one_of(pieces("action", off), _TRAIN), min_size=1, max_size=6).map(tuple)
    actions = st.builds(
        lambda warm, rest: (_STEP,) * warm + rest, st.sampled_from([0, 0, 0, 3]), drawn_actions
    )
    optimizers = st.one_of(_some("optimizer", 1, off, 1), _some("optimizer", 1, off))
    layouts = st.builds(
        Layout,
        st.sampled_from([*LAYOUTS, *TIGHT, *TIGHT]),
        st.sampled_from([len(ROOMS) - 1, 2, 1, 1, 0, 0, 0]),
        st.sampled_from(["kept", "kept", "kept", *ACTIVATIONS]),
        _SIDES,
        st.sampled_from(["device", "device", "cpu"]),
    ).map(_with_a_device)
    drawn = st.builds(
        Program,
        parts=_some("part", 5, off, 1),
        knots=_some("knot", 2, off),
        before=_some("hook", 2, off),
        optimizers=optimizers,
        after=_some("hook", 2, off),
        actions=actions,
        layout=layouts,
        is_watched=st.booleans(),
        turns=st.integers(1, 3),
    )
    return drawn.map(_settled).filter(lambda p: not is_off(set(p.features()), off))


_SIDES = st.one_of(st.just(0), st.just(0), st.integers(1, 31))


def _with_a_device(layout: Layout) -> Layout:
    """Return a layout in which parts and steps can be on either side, or all of them on one."""
    return layout if layout.name in ("device", "three") else replace(layout, side=0, target="device")


def _settled(program: Program) -> Program:
    """Return a program without what shows that layers are called again."""
    if program.layout.activations == "recomputed" and any(map(_counts, program.pieces())):
        return replace(program, layout=replace(program.layout, activations="kept"))
    return program


def _counts(piece: Piece) -> bool:
    return piece.feature in COUNTING or piece.feature.startswith("part writing")


COUNTING = {
    *(f"hook {name}" for name in TABLES["hook"] if "forward" in name or "all modules" in name),
    *(f"part {name}" for name in ("either", "buffers", "keeping", "embedding renormed", "spectral norm")),
    "part norm",  # a batch norm keeps running means
    "action dispatch mode",
    *(f"action {name}" for name in TABLES["action"] if name.startswith("function mode")),
}
"""What tells how often a layer is called."""
