"""What is switched off: pieces that are not right yet, each with the reason.

A piece is named by its table and its name, as in ``"hook post accumulate"``; pieces that are not right
together are joined by a plus, as in ``"part complex + optimizer adafactor"``.  So are words of a program's
text (``programs.WORDS``).  The aim is an empty table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set

from tests.training.differential.buffers import AVERAGES
from tests.training.differential.loops import ACTIONS

_FAST_PATH = "hooks of ours keep transformer layers from their fast path in evaluation"
_RACE = "several threads write to one buffer: a race in plain PyTorch, too"
_SHARED = "several threads share what hooks of a checkpoint keep in the module: a race in plain PyTorch, too"
_BEYOND = "plain PyTorch writes beyond the end of the expanded one, and may crash much later"
_OUTSIDE = "the compiler compiles the hook by itself, which meets a closed parameter: it raises"
_CRASH = "plain PyTorch crashes now and then: memory of a tensor that a transform has wrapped"

OFF: dict[str, str] = {
    **{f"part writing buffer {how} + action threads": _RACE for how in AVERAGES},
    **{
        f"part writing buffer {how} + action {action}": _CRASH
        for how in AVERAGES
        for action in ACTIONS
        if any(word in action for word in ("func ", "functional", "vmap", "hessian", "vjp", "jvp", "jac"))
    },
    "part checkpointed by hooks + action threads": _SHARED,
    "part expanded + fused=True": _BEYOND,
    "part compiled + hook forward": _OUTSIDE,
    "part compiled + hook forward pre + prepend=True": _OUTSIDE,
    **{
        f"part {part} + action {change} + action {mode}": _FAST_PATH  # whose condition looks at each weight
        for part in ("encoder", "transformer")
        for change in ("parametrize", "weight norm")
        for mode in ("dispatch mode", "function mode")
    },
    **dict.fromkeys(("hook all modules", "hook all modules pre"), _FAST_PATH),
}


def without(features: Iterable[str]) -> dict[str, str]:
    """Return what stays off when some features are tried: those whose names begin with one of the given."""
    given = tuple(features)
    return {name: reason for name, reason in OFF.items() if not (given and name.startswith(given))}


def only(features: Iterable[str], tables: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return what is off when a table's given features are looked at alone.

    Args:
        features: whose names begin with one of these are on; in tables without any nothing changes.
        tables: all entries by table.
    """
    given = tuple(features)
    off = without(given)
    for table, names in tables.items():
        full = [f"{table} {name}" for name in names]
        if given and any(name.startswith(given) for name in full):
            off |= {name: "not asked for" for name in full if not name.startswith(given)}
    return off


def is_off(features: Set[str], off: Mapping[str, str]) -> bool:
    """Say whether a program with some features has any that are off, alone or together."""
    return any(features >= set(name.split(" + ")) for name in off)
