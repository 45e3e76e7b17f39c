"""What ``tierstore plan`` is asked about: a function that makes a model, a ``config.json``, or a trace.

1. No model is ever anywhere: it is made and run for one step on the meta device.
2. What a user's code prints goes to stderr, also from C and from processes of its own: stdout is the verb's.
3. A trace and a model together have to be of the same model.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tierstore.cli.functions import (
    call,
    function_named,
    is_function_name,
    parameters_of,
    user_code,
    without_default,
)
from tierstore.cli.no_collection import no_collection
from tierstore.cli.text_files import named_file, read_text
from tierstore.errors import UsageError
from tierstore.planning import ByteKind, Program
from tierstore.planning.chrome import program_from_chrome
from tierstore.quoting import listed, named
from tierstore.training.tracing import Built, Grouping, build_from_config, optimizer_named, trace_model

DTYPES = ("float32", "bfloat16", "float16", "float64")
_USUAL_OPTIMIZER = "adamw"
_MOST_TRACE_BYTES = 256 * 2**20
_SHOWN_KEYS = 5
_CONFIG = ".json"
_STDOUT, _STDERR = 1, 2
_OFFERED = ("batch", "sequence", "dtype")
_STANDING = (ByteKind.PARAMETERS, ByteKind.BUFFER)


@dataclass(frozen=True)
class ModelWish:
    """What a command line says of the program.

    Attributes:
        model: ``module:function`` or the path of a ``config.json``; ``None``: the trace alone.
        trace: the path of a trace; ``None``: the model alone.
        batch, sequence: of inputs; ``None``: as the model's function says, else 1.
        dtype: one of `DTYPES`; ``None``: as the model says.
        optimizer: the name of one; ``None``: as the model says, else AdamW.
        grouping: what travels together in the run.
    """

    model: str | None = None
    trace: str | None = None
    batch: int | None = None
    sequence: int | None = None
    dtype: str | None = None
    optimizer: str | None = None
    grouping: Grouping = field(default_factory=Grouping)


def program_of(wish: ModelWish) -> Program:
    """Return what one step of what was asked about does.

    Raises:
        UsageError: nothing was asked about; the model cannot be made or traced; or the trace is of another.
        ConfigError: the trace is none, or cannot be so.
    """
    if wish.trace is None and wish.model is None:
        raise UsageError(
            "say what to plan: MODEL as module:function or a config.json, or --program trace.json"
        )
    if wish.trace is None:
        return _traced(wish)
    text = read_text(Path(wish.trace), _MOST_TRACE_BYTES)
    with named_file(wish.trace):
        program = program_from_chrome(text)
    if wish.model is not None:
        require_same(program, _traced(wish), wish.trace)
    else:
        _refuse_beside_trace(wish)
    return _told_of_the_run(program)


def _told_of_the_run(program: Program) -> Program:
    """Say of a program that was watched that its bundles and seconds are that run's, whatever the machine."""
    if program.source != "trace":
        return program
    grouped = (
        "small modules travel together as where the run was recorded; where the first tier has room for less "
        "than a quarter of the model, or a MiB, a run may group them otherwise, and move more or less"
    )
    program = replace(program, assumptions=(*program.assumptions, grouped))
    if not program.compute_s:
        return program
    where = program.facts.get("device")
    told = (
        f"computing takes as long as where the run was recorded{f' (device {where})' if where else ''}, "
        "whatever the machine says: its figures are used for what moves"
    )
    return replace(program, assumptions=(*program.assumptions, told))


def require_same(trace: Program, model: Program, path: str) -> None:
    """Raise unless a trace is of a model.

    Raises:
        UsageError: it is not; the first keys that differ are listed.
    """
    if trace.fingerprint and trace.fingerprint == model.fingerprint:
        return
    ours, theirs = _standing(model), _standing(trace)
    differ = [key for key in dict.fromkeys((*ours, *theirs)) if ours.get(key) != theirs.get(key)]
    if not differ and not (trace.fingerprint and model.fingerprint):
        return
    what = [f"{named(key)} ({_bytes(ours.get(key))}, {_bytes(theirs.get(key))})" for key in differ]
    shown = listed(what, _SHOWN_KEYS, show=str, separator="; ") or "no key, but names or sizes within them"
    raise UsageError(
        f"{path} is a trace of another model, or of one grouped otherwise; what differs (bytes in the model, "
        f"in the trace): {shown}. Give the one or the other"
    )


def _traced(wish: ModelWish) -> Program:
    assert wish.model is not None
    name = wish.model
    build = _function_build(wish, name) if is_function_name(name) else _config_build(wish, name)
    with _printing_on_stderr(), user_code(f"a step of {name}"):
        program = trace_model(
            build,
            optimizer=optimizer_named(_USUAL_OPTIMIZER if wish.optimizer is None else wish.optimizer),
            batch=wish.batch or 1,
            sequence=wish.sequence,
            grouping=wish.grouping,
        )
    return replace(program, facts={**program.facts, **_facts(wish)})


@contextlib.contextmanager
def _printing_on_stderr() -> Iterator[None]:
    """Let whatever is printed in the context go to stderr, through ``sys.stdout`` or its descriptor."""
    sys.stdout.flush()
    kept = os.dup(_STDOUT)
    try:
        os.dup2(_STDERR, _STDOUT)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None and not sys.__stdout__.closed:
            sys.__stdout__.flush()
        os.dup2(kept, _STDOUT)
        os.close(kept)


def _function_build(wish: ModelWish, name: str) -> Callable[[], Built]:
    """Return what calls the function of a user's that was named."""
    with _printing_on_stderr():
        function = function_named(name)
    taken = parameters_of(function, name, _OFFERED)
    dtype = _dtype(wish.dtype)
    needed = without_default(function)
    batch = 1 if wish.batch is None and "batch" in needed else wish.batch
    values = {"batch": batch, "sequence": wish.sequence, "dtype": dtype}
    given = {each: values[each] for each in taken if values[each] is not None}
    missing = [f"--{each}" for each in taken if each in needed and each not in given]
    if missing:
        raise UsageError(f"{name} cannot be called without it: give {listed(missing, show=str)}")

    def build() -> Built:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        built = call(function, name, given)
        _refuse_beside_own(built, wish, name, given)
        return built  # type: ignore[return-value]  # the tracer refuses what is something else

    build.__qualname__ = name
    return build


def _refuse_beside_own(built: object, wish: ModelWish, name: str, given: Mapping[str, object]) -> None:
    """Refuse what a function has decided by what it returned."""
    parts = len(built) if isinstance(built, tuple) else 1
    asked = ("batch", "sequence") if parts > 1 else ()
    left = [each for each in asked if getattr(wish, each) is not None and each not in given]
    if left:
        raise UsageError(
            f"{name} returns inputs of its own: let it take {listed(left, show=str)}, or leave "
            f"{listed([f'--{each}' for each in left], show=str)} out"
        )
    if parts > 2 and wish.optimizer is not None:
        raise UsageError(f"{name} returns an optimizer of its own: leave --optimizer out")


def _dtype(name: str | None) -> torch.dtype | None:
    found: torch.dtype | None = None if name is None else getattr(torch, name)
    return found


def _config_build(wish: ModelWish, name: str) -> Callable[[], Built]:
    """Return what makes the model that a ``config.json`` describes."""
    if not (name.endswith(_CONFIG) or Path(name).is_file()):
        raise UsageError(
            f"{named(name)} is neither module:function, as my.models:llama, nor the path of a config.json"
        )
    with _printing_on_stderr(), no_collection():  # transformers is imported
        return build_from_config(Path(name), batch=wish.batch or 1, sequence=wish.sequence, dtype=wish.dtype)


def _facts(wish: ModelWish) -> dict[str, str]:
    found = {"batch": wish.batch, "sequence": wish.sequence, "dtype": wish.dtype}
    return {name: str(value) for name, value in found.items() if value is not None}


def _refuse_beside_trace(wish: ModelWish) -> None:
    """Refuse what a trace has decided already."""
    given = [name for name in (*_OFFERED, "optimizer") if getattr(wish, name) is not None]
    if given:
        options = listed([f"--{name}" for name in given], show=str)
        raise UsageError(f"a trace says what was run: leave {options} out, or give a MODEL instead")


def _standing(program: Program) -> dict[str, int]:
    return {key: each.nbytes for key, each in program.data.items() if each.kind in _STANDING}


def _bytes(nbytes: int | None) -> str:
    return "none" if nbytes is None else str(nbytes)
