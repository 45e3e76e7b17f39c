"""Who tells that an emulated copy has ended, and when.

`PromptDelivery` tells at once.  `LateDelivery` tells late and lets directions overtake each other, as
device events do, by chance from a seed and without a clock: it waits for other copies to end, never
for time, and tells everything when nothing else is under way.
"""

from __future__ import annotations

import random
import threading
from typing import Protocol

from tierstore.spi import Completion

_PATIENCE = 4  # at most this many ended operations are kept back while others are under way


class Delivery(Protocol):
    """Tells that operations have ended."""

    def begin(self) -> None:
        """Expect one more operation to end."""
        ...

    def end(self, direction: str, completion: Completion, /) -> None:
        """Tell, now or later, that an expected operation has ended."""
        ...

    def close(self) -> None:
        """Tell everything that has ended."""
        ...


class PromptDelivery:
    """Tells at once, in the thread that did the work."""

    def begin(self) -> None:
        """Do nothing."""

    def end(self, _direction: str, completion: Completion, /) -> None:
        """Tell at once."""
        completion.complete()

    def close(self) -> None:
        """Do nothing: everything was told."""


class LateDelivery:
    """Tells late, in a thread of its own, in order within a direction and by chance between them.

    Args:
        seed: where the chances come from.
    """

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)  # used by one thread
        self._changed = threading.Condition()
        self._under_way = 0  # guarded by _changed, as is all below
        self._ended: dict[str, list[Completion]] = {}
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Expect one more operation to end."""
        with self._changed:
            self._under_way += 1

    def end(self, direction: str, completion: Completion, /) -> None:
        """Tell later."""
        with self._changed:
            self._under_way -= 1
            self._ended.setdefault(direction, []).append(completion)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tierstore-late", daemon=True)
                self._thread.start()
            self._changed.notify()

    def close(self) -> None:
        """Tell everything that has ended, and end."""
        with self._changed:
            self._is_closing = True
            thread, self._thread = self._thread, None
            self._changed.notify()
        if thread is not None and thread is not threading.current_thread():
            thread.join()

    def _run(self) -> None:
        while (completion := self._draw()) is not None:
            completion.complete()
            del completion

    def _draw(self) -> Completion | None:
        """Wait until something is to be told and return it; ``None`` at the end."""
        patience = self._chance.randint(1, _PATIENCE)
        with self._changed:
            self._changed.wait_for(lambda: self._is_due(patience))
            if not self._ended:
                return None
            direction = self._chance.choice(sorted(self._ended))
            completion = self._ended[direction].pop(0)
            if not self._ended[direction]:
                del self._ended[direction]
            return completion

    def _is_due(self, patience: int) -> bool:
        if self._is_closing:
            return True
        ended = sum(map(len, self._ended.values()))
        return ended > 0 and (ended >= patience or self._under_way == 0)
