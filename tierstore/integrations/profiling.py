"""Traces of ``torch.profiler``: what the store does is in them by itself, and its own frames can be left out.

While a profiler runs, ranges that begin with ``tierstore::`` say what is fetched, evicted, copied and
stepped, with keys and bytes.  With ``with_stack=True`` a profiler notes every call of a Python function, ours
among them: `trace_handler` writes a trace without these.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Protocol

import tierstore
from tierstore.errors import UsageError
from tierstore.trace_ranges import with_nvtx

_FUNCTION: Final = "python_function"
_ID, _PARENT = "Python id", "Python parent id"
_ROOM: Final = f"{Path(tierstore.__file__).parent.name}{os.sep}"
_PLACES: Final = (f"{Path(tierstore.__file__).parent}{os.sep}", _ROOM, f"tierstore_backends{os.sep}")
_BUILT_IN: Final = "<"


class ChromeTraced(Protocol):
    """What is used of a ``torch.profiler.profile``."""

    def export_chrome_trace(self, path: str) -> object:
        """Write the trace."""
        ...


def nvtx() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the ranges are NVTX's, too, for Nsight Systems, with and without a profiler.

    Raises:
        UsageError: this PyTorch has no NVTX.
    """
    return with_nvtx()


def trace_handler(path: str | Path) -> Callable[[ChromeTraced], None]:
    """Return what writes a profiler's trace without frames of tierstore: ``profile(on_trace_ready=...)``.

    Args:
        path: of the trace, which replaces a former one as a whole; it holds none of the profiler's cycles
            but the last one.
    """
    target = Path(path)

    def write(profiler: ChromeTraced) -> None:
        with tempfile.TemporaryDirectory(dir=target.absolute().parent, prefix=f".{target.name}.") as folder:
            whole = Path(folder) / "trace.json"
            profiler.export_chrome_trace(str(whole))
            without_own_frames(whole)
            whole.replace(target)

    return write


def without_own_frames(path: str | Path) -> int:
    """Take frames of tierstore out of a trace that ``torch.profiler`` wrote; return how many there were.

    Ranges, operators, and frames of the program and of PyTorch stay; those that ours had called are their
    next caller's.  The trace is read into memory.

    Args:
        path: of the trace, which is replaced as a whole.

    Raises:
        UsageError: it is no such trace.
        OSError: it cannot be read or written.
    """
    source = Path(path)
    try:
        trace = json.loads(source.read_text(encoding="utf-8"))
        events = trace["traceEvents"]
        kept = list(_kept(events))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{str(source)!r} is no trace of torch.profiler: {error!r}") from error
    trace["traceEvents"] = kept
    partial = source.with_name(f".{source.name}.{os.getpid()}")
    try:
        partial.write_text(json.dumps(trace, separators=(",", ":")), encoding="utf-8")
        partial.replace(source)
    finally:
        partial.unlink(missing_ok=True)
    return len(events) - len(kept)


def _kept(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    frames = {
        each["args"][_ID]: each
        for each in events
        if each.get("cat") == _FUNCTION and _ID in each.get("args", ())
    }
    ours: dict[object, bool] = {}
    for event in events:
        if event.get("cat") != _FUNCTION or _ID not in event.get("args", ()):
            yield event
        elif not _is_ours(event, frames, ours):
            event["args"][_PARENT] = _next_caller(event, frames, ours)
            yield event


def _is_ours(event: Mapping[str, Any], frames: Mapping[object, Any], ours: dict[object, bool]) -> bool:
    """Whether a frame is of tierstore, or of what such a frame does with Python's own functions."""
    chain: list[Mapping[str, Any]] = []
    seen: set[object] = set()
    each: Mapping[str, Any] | None = event
    found: bool | None = None
    while each is not None and found is None and each["args"][_ID] not in seen:
        seen.add(each["args"][_ID])
        found = ours.get(each["args"][_ID])
        if found is None:
            chain.append(each)
            found = _decided(str(each.get("name", "")))
            each = frames.get(each["args"].get(_PARENT))
    found = bool(found)
    for one in chain:  # all but the last are Python's own, and as their caller
        ours[one["args"][_ID]] = found
    return found


def _decided(name: str) -> bool | None:
    """Whether a frame is ours; ``None``: as its caller."""
    if name.startswith(_PLACES):
        return True
    is_of_python = (
        name.startswith(_BUILT_IN) or re.split(r"[/.]", name, maxsplit=1)[0] in sys.stdlib_module_names
    )
    return None if is_of_python else False


def _next_caller(event: Mapping[str, Any], frames: Mapping[object, Any], ours: dict[object, bool]) -> object:
    parent = event["args"].get(_PARENT)
    seen: set[object] = set()
    while parent not in seen and parent in frames and _is_ours(frames[parent], frames, ours):
        seen.add(parent)
        parent = frames[parent]["args"].get(_PARENT)
    return parent
