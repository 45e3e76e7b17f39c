"""Which bundles never lose their lease.

A pinned bundle keeps the lease that it has got until it is unpinned, restored, or the run is suspended.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from tierstore.training.bundles.bindings import Binding, Bindings


def pin(bindings: Bindings, binding: Binding) -> None:
    """Bring a bundle to where it is computed with, and let it keep its lease.

    Raises:
        CapacityError: there is no room for it beside what is in use.
        BackendError: its bytes could not be brought.
    """
    with bindings.alone():
        bindings.reach(binding)
        bindings.pinned.add(binding)


def unpin_all(bindings: Bindings) -> list[Binding]:
    """Let everything travel; return what was pinned."""
    with bindings.alone():
        pinned = list(bindings.pinned)
        bindings.pinned.clear()
        for binding in pinned:
            bindings.release_idle(binding)
        return pinned


@contextlib.contextmanager
def all_unpinned(bindings: Bindings) -> Iterator[None]:
    """Let everything travel, inside the context; bring back what was pinned after it.  Blocks.

    Raises:
        CapacityError, BackendError: something could not be brought back.
    """
    with contextlib.ExitStack() as pinned_again:
        for binding in unpin_all(bindings):
            pinned_again.callback(pin, bindings, binding)
        yield
