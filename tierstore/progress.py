"""A bar on stderr for what takes long: how many bytes of how many, and how fast.

1. Only where somebody may be looking: stderr is a terminal, and this is the first of several processes.  With
   ``TIERSTORE_PROGRESS=1`` in the environment always, with ``TIERSTORE_PROGRESS=0`` never.
2. Only from the second second on: what is over by then shows nothing.
3. Whatever becomes of a bar, what it tells of goes on.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

if TYPE_CHECKING:
    from tqdm import tqdm

T = TypeVar("T")

VARIABLE: Final = "TIERSTORE_PROGRESS"
DELAY_S: Final = 1.0
_POLL_S: Final = 0.5

log = logging.getLogger("tierstore")


def is_wanted() -> bool:
    """Whether bars are shown."""
    asked = os.environ.get(VARIABLE, "")
    if asked in ("0", "1"):
        return asked == "1"
    if os.environ.get("RANK", "0") != "0":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # it is closed
        return False


class ProgressBar:
    """One bar, which may not be there.  A context manager.

    Args:
        doing: what it tells of.
        total: bytes, or whatever ``unit`` says; ``None``: nobody knows.
        unit: of what is counted.
    """

    def __init__(self, doing: str, total: int | None, unit: str = "B") -> None:
        self._bar: tqdm[Any] | None = None
        if is_wanted():
            with self._harmless():
                self._bar = _new_bar(doing, total, unit)

    def add(self, count: int) -> None:
        """Count more."""
        if self._bar is not None:
            with self._harmless():
                self._bar.update(count)

    def set(self, count: int) -> None:
        """Count up to so many."""
        if self._bar is not None:
            self.add(count - int(self._bar.n))

    def close(self) -> None:
        """Take it away.  Idempotent."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with self._harmless():
                bar.close()

    @contextlib.contextmanager
    def _harmless(self) -> Iterator[None]:
        """Do without the bar where it cannot be drawn."""
        try:
            yield
        except (OSError, ValueError, ImportError):
            self._bar = None
            log.debug("progress cannot be shown", exc_info=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _new_bar(doing: str, total: int | None, unit: str) -> tqdm[Any]:
    from tqdm import tqdm

    is_bytes = unit == "B"
    columns, lines = _screen()
    return tqdm(
        total=total,
        desc=doing,
        unit=unit,
        unit_scale=is_bytes,
        unit_divisor=1024 if is_bytes else 1000,
        delay=DELAY_S,
        file=sys.stderr,
        leave=False,
        ncols=columns,
        nrows=lines,
    )


def _screen() -> tuple[int, int] | tuple[None, None]:
    """Return the columns and lines to draw in, or two times ``None`` where tqdm sees for itself.

    A terminal that nobody sized says that it has none, and tqdm draws nothing into that.
    """
    try:
        size = os.get_terminal_size(sys.stderr.fileno())
    except (OSError, ValueError):  # not a terminal
        return None, None
    return (None, None) if size.columns and size.lines else (80, 24)


def progress(items: Iterable[T], sizes: Sequence[int], doing: str, unit: str = "B") -> Iterator[T]:
    """Yield ``items``, of so many bytes each (or what ``unit`` says), and show how many of these are done."""
    with ProgressBar(doing, sum(sizes), unit) as bar:
        for item, nbytes in zip(items, sizes, strict=True):
            yield item
            bar.add(nbytes)


@contextlib.contextmanager
def polled(doing: str, done: Callable[[], int]) -> Iterator[None]:
    """Show inside the context how many bytes more ``done`` returns, which a thread asks twice a second."""
    if not is_wanted():
        yield
        return
    ended = threading.Event()
    thread = threading.Thread(target=_poll, args=(doing, done, ended), name="tierstore-progress", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread can be started
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if thread.ident is not None:
            thread.join()


def _poll(doing: str, done: Callable[[], int], ended: threading.Event) -> None:
    begin: int | None = None
    with ProgressBar(doing, None) as bar:
        while not ended.wait(_POLL_S):
            try:
                now = done()
            except Exception:  # what it tells of says what is wrong
                log.debug("progress cannot be told", exc_info=True)
                return
            begin = now if begin is None else begin
            bar.set(now - begin)
