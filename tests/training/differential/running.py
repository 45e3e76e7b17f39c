"""A program run plain and offloaded, and what came of it.

A program that is refused before its first step is no difference; one whose tiers turn out too small
in its midst is run again with more room, and has to fit where everything does.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import gc
import random
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.utils.checkpoint
from torch import nn

from tests.training.differential import buffers, models, optimizers, sides, trial
from tests.training.differential.models import WIDTH
from tests.training.differential.observing import Difference, first_difference
from tests.training.differential.programs import Layout, Program
from tests.training.differential.trial import Trial, are_hooks_left, end_checkpoints
from tests.training.leases import leased_bytes
from tierstore.errors import CapacityError, TierStoreError
from tierstore.training import offload
from tierstore.training.activations.swapping import forward_pass
from tierstore.training.faults.guarded_tensors import guarded_tensor_of

Open = Callable[..., Any]
LATE_AND_OVERWRITTEN = {"overwrite_freed": True, "late_events": 7}

LAYOUTS: dict[str, dict[str, object]] = {
    "host": {"device": "cpu", "offload_cpu_size": None, "offload_disk_size": 0},
    "disk": {"device": "cpu", "offload_cpu_size": 1, "offload_disk_size": "64MB"},
    "device": {
        "device": "emulated",
        "max_device_memory": 1,
        "offload_cpu_size": None,
        "offload_disk_size": 0,
    },
    "three": {
        "device": "emulated",
        "max_device_memory": 1,
        "offload_cpu_size": 1,
        "offload_disk_size": "64MB",
    },
}
"""A number stands for as many times the room; ``None`` for enough."""
ROOMS = ("least", "tight", "middle", "ample")
_ENOUGH = 64 << 20
ACTIVATIONS: dict[str, dict[str, object]] = {
    "kept": {},
    "swapped": {
        "swap_config": {"swap": True, "layer_swap": [{"backward_prefetch": 1, "layers": True}]},
    },
    "recomputed": {"recompute_config": {"recompute": [0]}},
}
_ON_DEVICE = {"device", "three"}
_KEEPING = {"part keeping", "action weight norm", "action replace buffer"}
"""What refers to parameters, or to their memory, after its call."""


class End(enum.Enum):
    """What came of a program."""

    SAME = enum.auto()
    REFUSED = enum.auto()  # by offload(...), before the first step
    DIFFERENT = enum.auto()
    INVALID = enum.auto()  # plain PyTorch does not build it


@dataclass(frozen=True)
class Outcome:
    """What came of a program.

    Attributes:
        end: in a word.
        reason: of a refusal, or in what the runs differ.
        detail: for a reader.
        enlarged: why it was too small in its midst, each time.
    """

    end: End
    reason: str = ""
    detail: str = ""
    enlarged: tuple[str, ...] = ()


def outcome_of(program: Program, open_run: Open = offload) -> Outcome:
    """Run a program plain and offloaded, and compare.

    Args:
        program: to run.
        open_run: what offloads; another than `offload` to try this harness itself.
    """
    try:
        plain = _run(program, None)
    except _UnbuiltError as error:
        return Outcome(End.INVALID, str(error))
    enlarged: tuple[str, ...] = ()
    while True:
        try:
            ours = _run(program, open_run)
        except _RefusedError as error:
            room = program.layout.room + 1
            if not isinstance(error.__cause__, CapacityError) or room == len(ROOMS):
                return Outcome(End.REFUSED, str(error), enlarged=enlarged)
            program = replace(program, layout=replace(program.layout, room=room))
            continue
        except CapacityError as error:
            room = program.layout.room + 1
            if room == len(ROOMS):
                return _late(error)
            enlarged += (f"{_where(error)}: {_kind(error)}",)
            program = replace(program, layout=replace(program.layout, room=room))
            continue
        except (TierStoreError, _UnnamedError, _UnbuiltError) as error:
            return _late(error)
        difference = first_difference(plain.record, ours.record)
        return _outcome(difference, enlarged)


def _outcome(difference: Difference | None, enlarged: tuple[str, ...]) -> Outcome:
    if difference is None:
        return Outcome(End.SAME, enlarged=enlarged)
    return Outcome(End.DIFFERENT, difference.aspect, difference.detail, enlarged)


def _late(error: Exception) -> Outcome:
    cause = error.__cause__ or error
    where = _where(error)
    return Outcome(
        End.DIFFERENT, f"{where}: late {_kind(cause)}", f"{where}: {type(cause).__name__}: {cause}"
    )


def _where(error: BaseException) -> str:
    return str(getattr(error, "where", ""))


def _kind(error: BaseException) -> str:
    """Return an error in few words: without names, numbers and what follows."""
    words = str(error).split(".")[0].split(":")[0]
    return (
        f"{type(error).__name__}: "
        + " ".join(w for w in words.split() if not any(c in w for c in "'\"0123456789"))[:90]
    )


class _RefusedError(Exception):
    """The program is refused before its first step."""


class _UnbuiltError(Exception):
    """The program could not be built."""


class _UnnamedError(Exception):
    """The run could not be begun or ended, for a reason that has no name."""

    where = "offload or close"


def _run(program: Program, open_run: Open | None) -> Trial:
    names = {**_VOCABULARY}
    # New code each time: what PyTorch compiles of a function looks for names where it was first called.
    exec(compile(program.text, "<program>", "exec"), names)
    if "torch.compile(" in program.text:
        # What it has compiled for a module without hooks it takes for another one that has some.
        torch._dynamo.reset()
    t = Trial()
    _seed(0)
    with _quietly(), _nothing_left(t):
        try:
            names["build"](t)
        except Exception as error:
            raise _UnbuiltError(f"{type(error).__name__}: {str(error)[:90]}") from error
        if open_run is None:
            handles = sides.place_plainly(program.layout.side, t.model)
            _loop(t, names, program)
            for handle in handles:
                handle.remove()
        else:
            with tempfile.TemporaryDirectory(dir=_scratch()) as path:
                _run_offloaded(t, names, program, open_run, path)
        t.record.where = "closed"
        t.log_end()
        t.log_ordinary()
    return t


def _run_offloaded(t: Trial, names: dict[str, Any], program: Program, open_run: Open, path: str) -> None:
    with mock.patch.object(forward_pass, "SMALLEST_BYTES", 1):  # or nothing of such small models were swapped
        _run_in_store(t, names, program, open_run, path)


def _run_in_store(t: Trial, names: dict[str, Any], program: Program, open_run: Open, path: str) -> None:
    try:
        more: dict[str, Any] = {} if program.layout.activations == "kept" else {"layers": ""}
        if program.layout.side:
            more["placement"] = sides.placement_of(program.layout.side, t.model)
        run = open_run(t.model, list(t.opts), config_of(program.layout, t.model, path), **more)
    except TierStoreError as error:
        raise _RefusedError(_kind(error)) from error
    except Exception as error:
        raise _UnnamedError(f"offload(...) raised {type(error).__name__}") from error
    try:
        _loop(t, names, program)
        run.store.check()
        if program.layout.activations == "kept" and not t.keep and not _KEEPING & set(program.features()):
            _require_no_lease(t, run)
    except TierStoreError as error:
        error.where = t.record.where.split(" ", 1)[-1]  # type: ignore[attr-defined]
        with contextlib.suppress(Exception):
            run.close()
        raise
    except BaseException:
        with contextlib.suppress(Exception):
            run.close()
        raise
    try:
        run.close()
    except Exception as error:
        raise _UnnamedError(str(error)) from error


def _require_no_lease(t: Trial, run: Any) -> None:  # noqa: ANN401 - whatever was opened
    """Make sure that nothing is on hold for a program that refers to nothing any more.

    What was lent to a backward pass that raised is taken when the model is called, or an optimizer steps.
    A graph that a module refers to keeps what it has saved where hooks were forbidden, and lets it go.
    """
    if not t.has_raised and _leased_bytes(t, run):
        gc.collect()  # what only a cycle refers to
        if _leased_bytes(t, run):
            _let_graphs_go(t.model)
        if nbytes := _leased_bytes(t, run):
            raise _UnnamedError(f"leases are left: {nbytes} bytes")


def _let_graphs_go(model: nn.Module) -> None:
    """Take from modules what they have computed and keep, as the former ``weight_norm`` does.

    Recurrent ones keep what `torch.func.functional_call` gave them, in a list.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                vars(module)[name] = torch.empty(0)
            elif isinstance(value, list) and any(isinstance(each, torch.Tensor) for each in value):
                value.clear()


_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def _leased_bytes(t: Trial, run: Any) -> int:  # noqa: ANN401 - whatever was opened
    if any(map(_is_wrapped, t.model.parameters())):
        return 0  # `functional_call` leaves what it was given in a module that is there twice: PyTorch's own
    with torch.no_grad():
        ours = next((p for p in t.model.parameters() if guarded_tensor_of(p) is not None), None)
        if ours is None:  # all were replaced
            return 0
        for _ in range(2):  # what nobody needs goes when something is used, and then what that kept
            ours.sum()
    return leased_bytes(run)


def _loop(t: Trial, names: dict[str, Any], program: Program) -> None:
    _seed(1)
    t.record.where = "after"
    with t.act(-1, "after"):
        names["after"](t)
    names["loop"](t)
    t.record.where = "end"
    if program.is_watched:
        t.log_end()


def config_of(layout: Layout, model: nn.Module, path: str) -> dict[str, object]:
    """Return the configuration of a layout for a model.

    Args:
        layout: where its state goes.
        model: whose.
        path: of a directory for its files.
    """
    room = room_of(layout, model)
    sizes = {
        name: value
        if not isinstance(value, int | None) or value == 0
        else (value * room if value else _ENOUGH)
        for name, value in LAYOUTS[layout.name].items()
    }
    options = {"device_options": LATE_AND_OVERWRITTEN} if layout.name in _ON_DEVICE else {}
    settings = {**sizes, **options, "offload_path": str(Path(path) / "files"), "buffer_min_size": 0}
    if layout.target != "device":
        settings["optimizer_target"] = layout.target
    sections = ACTIVATIONS[layout.activations]
    return {"offload_config": settings, **sections} if sections else settings


def room_of(layout: Layout, model: nn.Module) -> int:
    """Return how many bytes the small tiers have: what one part takes to be called or stepped, or more."""
    parts = [_nbytes(part) for part in model.children()]
    largest, total = max(parts, default=0), sum(parts)
    if layout.name in _ON_DEVICE:
        return (3 * largest + 2048, 6 * largest + 3072, 6 * largest + 3072 + 2 * total, _ENOUGH)[layout.room]
    return (2 * largest + 512, 4 * largest + 1024, 4 * largest + 1024 + 2 * total, _ENOUGH)[layout.room]


def _nbytes(module: nn.Module) -> int:
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))


# ---------------------------------------------------------------------- surroundings


def _old(make: Callable[..., Any], *args: object) -> Any:  # noqa: ANN401 - whatever it makes
    return make(*args)


_VOCABULARY: dict[str, Any] = {
    **vars(buffers),
    **vars(models),
    **vars(optimizers),
    **vars(trial),
    "sys": sys,
    "W": WIDTH,
    "P": lambda model: optimizers.nonempty(model.parameters()),
    "old": _old,
}


@functools.cache
def _scratch() -> str | None:
    """Return where files go that nobody will want: memory, if there is a file system of it."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


def _seed(number: int) -> None:
    torch.manual_seed(number)
    np.random.seed(number)
    random.seed(number)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextlib.contextmanager
def _nothing_left(t: Trial) -> Iterator[None]:
    """Leave no global hooks and modes, however a run ends."""
    try:
        yield
    finally:
        t.end()
        end_checkpoints()
        torch.set_grad_enabled(True)
    if are_hooks_left():
        raise _UnnamedError("hooks for saved tensors are left")
