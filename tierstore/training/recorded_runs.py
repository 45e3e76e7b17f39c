"""What a run says of its own steps: the program that it runs, and files of what it did when.

A file is written beside its name and renamed: it is there as a whole, or what was there before is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from tierstore import forks
from tierstore.errors import UsageError
from tierstore.planning.chrome import TraceParts, trace_to_chrome
from tierstore.planning.fingerprints import fingerprint
from tierstore.planning.homes import CPU
from tierstore.planning.program import ByteKind, Program
from tierstore.planning.rules import HOST
from tierstore.planning.timeline import Timeline
from tierstore.quoting import quoted
from tierstore.recorded import CopyRecord
from tierstore.training.activations.config.layers import find_layers
from tierstore.training.bundles.binding import natively
from tierstore.training.bundles.tensor_slots import memory_of
from tierstore.training.optimizers.in_backward import Stepping
from tierstore.training.optimizers.whole_steps import WholeSteps
from tierstore.training.recording.marks import RecordedStep, RecordedSteps, RunFigures
from tierstore.training.recording.programs import ProgramMaker
from tierstore.training.recording.timelines import TimelineMaker
from tierstore.training.session import Session

log = logging.getLogger("tierstore")
_numbers = itertools.count()


def program_of(session: Session) -> Program:
    """Return what one step of a run does, as its first steps have shown.

    Args:
        session: of the run.

    Raises:
        UsageError: there were not enough steps yet.
    """
    recorder = session.recorder
    if recorder.missing:
        raise UsageError(
            f"run.program(): {recorder.missing} more steps have to run: the first one makes what optimizers "
            f"keep, and two after it are recorded, as whole ones; so far there were {recorder.ended}."
        )
    assert recorder.learned is not None
    return program_from(session, recorder.learned, recorder.known())


def program_from(session: Session, recorded: RecordedSteps, steps: Sequence[RecordedStep]) -> Program:
    """Return what one step of a run does, as some recorded ones have shown; an accelerator is waited for.

    Args:
        session: of the run.
        recorded: what was recorded.
        steps: two of its steps at least, whole and ended.
    """
    session.recorder.await_device()
    maker = ProgramMaker(recorded, steps, _figures(session))
    model, said = session.model, _assumptions(session)
    if session.store.device.type != CPU and not all(step.is_timed for step in steps):
        said.append("what the device computes is timed by the host's clock: it has refused events")
    return maker.program(type(model).__name__, _facts(session), _fingerprint(model), said)


def copies_of(session: Session) -> tuple[CopyRecord, ...]:
    """Return the copies of the steps that a run has recorded without being asked.

    Args:
        session: of the run.

    Raises:
        UsageError: there were not enough steps yet.
    """
    recorder = session.recorder
    if recorder.learned is None or recorder.missing:
        raise UsageError(
            f"run.recorded_copies(): {recorder.missing} more steps have to run until some are recorded; so "
            f"far there were {recorder.ended}."
        )
    return tuple(recorder.learned.recording.copies)


def learned_timeline(session: Session) -> Timeline | None:
    """Return what happened when in the steps that a run has recorded by itself; ``None``: none was whole.

    Args:
        session: of the run.
    """
    learned = session.recorder.learned
    if learned is None or not session.recorder.known():
        return None
    return _timeline_of(session, learned, _figures(session), ())


@contextlib.contextmanager
def recorded_to(session: Session, path: Path) -> Iterator[None]:
    """Record inside the context; write a trace when it ends, however it does.

    Args:
        session: of the run.
        path: of the file.

    Raises:
        UsageError: the path is a directory's.
        OSError: it cannot be written; what was there before is unharmed.
    """
    if path.is_dir():
        raise UsageError(f"run.record({quoted(str(path), 500)}): it is a directory; name a file in it.")
    before, process = _figures(session), forks.here()

    def write() -> None:
        if process is forks.here():  # else the trace is that of the parent of a fork
            _write(session, recorded, before, partial, path)

    with _beside(path) as partial:
        try:
            with session.recorder.watched() as recorded:
                yield
        except BaseException:
            try:
                write()
            except Exception:  # what has ended the block is raised
                log.exception("what was recorded could not be written to %s", path)
            raise
        write()


@contextlib.contextmanager
def _beside(path: Path) -> Iterator[Path]:
    """Yield the path of a new file beside another one; if it is still there in the end it goes."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}-{next(_numbers)}")
    partial.touch()
    process = forks.here()
    try:
        yield partial
    finally:
        if process is forks.here():  # in the child of a fork it is the parent's
            partial.unlink(missing_ok=True)


def _write(session: Session, recorded: RecordedSteps, before: RunFigures, partial: Path, path: Path) -> None:
    figures = before.and_of(_figures(session))
    assumptions = [] if recorded.steps else ["no step was recorded"]
    timeline = _timeline_of(session, recorded, figures, assumptions)
    is_known = not session.recorder.missing and bool(session.bundles)
    program = program_of(session) if is_known else None
    text = trace_to_chrome(TraceParts(timeline, program=program, base_time_ns=recorded.recording.unix_ns))
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _timeline_of(
    session: Session, recorded: RecordedSteps, figures: RunFigures, assumptions: Sequence[str]
) -> Timeline:
    names = session.store.tier_names
    storage = [name for name in names if name not in (HOST, names[0])]
    return TimelineMaker(recorded, figures, storage).timeline(type(session.model).__name__, assumptions)


# ---------------------------------------------------------------------- what is known of the run


def _figures(session: Session) -> RunFigures:
    kinds: dict[str, tuple[ByteKind, int]] = {}
    owners: dict[str, str] = {}
    for bundle in session.bundles:
        kinds[bundle.key] = ByteKind.PARAMETERS, bundle.nbytes
        for tensor in bundle.tensors:
            if key := session.gradients.table.usual_key_of(tensor):
                owners[key] = bundle.key
    for buffers in session.buffers:
        kinds[buffers.key] = ByteKind.BUFFER, buffers.nbytes
    for steps in session.steps:
        for bundle, state in steps.state.bindings.items():
            kinds[state.key] = ByteKind.STATE, state.nbytes
            owners[state.key] = bundle.key
    return RunFigures(kinds, owners, _layers(session))


def _layers(session: Session) -> dict[str, int]:
    """Return the number of the repeated layer that each bundle is in, if the model has one list of them."""
    try:
        names = list(find_layers(session.model))
    except UsageError:
        return {}
    found: dict[str, int] = {}
    for number, layer in enumerate(names):
        inside = (each for each in session.bundles if each.places[0].name.startswith(f"{layer}."))
        found.update(dict.fromkeys((each.key for each in inside), number))
    return found


def _facts(session: Session) -> dict[str, str]:
    tensors = [tensor for bundle in session.bundles for tensor in bundle.tensors]
    dtypes = sorted({str(each.dtype).removeprefix("torch.") for each in tensors})
    return {
        "model": type(session.model).__name__,
        "optimizers": ", ".join(type(each).__name__ for each in session.optimizers) or "none",
        "optimizer_in_backward": str(session.stepping is Stepping.IN_BACKWARD).lower(),
        "device": session.store.device.type,
        "dtype": ", ".join(dtypes),
        "torch": torch.__version__,
    }


def _assumptions(session: Session) -> list[str]:
    said: list[str] = []
    if session.stepping is Stepping.IN_BACKWARD:
        said.append("optimizers step in backward: their steps are moments of it, and gradients are no data")
    if tables := list(session.tables.attached()):
        said.append(f"{len(tables)} tables are left out: their rows are not divided by keys")
    whole = [type(each.optimizer).__name__ for each in session.steps if isinstance(each, WholeSteps)]
    said += [f"{name} steps all at once, in moments without units" for name in whole]
    return said


def _fingerprint(model: nn.Module) -> str:
    with natively():
        parameters = [
            (n, memory_of(each).nbytes, ByteKind.PARAMETERS) for n, each in model.named_parameters()
        ]
        return fingerprint(
            [*parameters, *((n, each.nbytes, ByteKind.BUFFER) for n, each in model.named_buffers())]
        )
