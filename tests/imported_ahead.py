"""What a training imports at its first use, imported before processes are forked: once, and not in each.

PyTorch's compiler, which optimizers import, takes a process more than a second, and a run's rooms half one.
"""

from __future__ import annotations

import gc
import importlib
import pkgutil
import re

_ROOMS = ("tierstore.training", "tierstore.planning", "tierstore_backends.files", "tierstore_backends.pinned")
_OTHERS = ("torch._dynamo", "tierstore_backends.device", "tierstore_backends.memory")
_NOT = re.compile(r"_trial$|^tierstore\.training\.ranks")
"""Programs that try what may end a process; and what tests look for where one process is alone."""


def import_ahead() -> None:
    """Import it, and let no collection of garbage in a child look at what is there."""
    for name in _OTHERS:
        importlib.import_module(name)
    for name in _ROOMS:
        _import_all(name)
    gc.collect()
    gc.freeze()


def _import_all(name: str) -> None:
    """Import a package with what is in it; `pkgutil.walk_packages` would import what is left out."""
    room = importlib.import_module(name)
    for each in pkgutil.iter_modules(room.__path__, f"{name}."):
        if _NOT.search(each.name):
            continue
        if each.ispkg:
            _import_all(each.name)
        else:
            importlib.import_module(each.name)
