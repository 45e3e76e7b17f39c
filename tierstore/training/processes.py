"""Whether this process is one of several that train together.

What follows from that is in `tierstore.training.ranks`, which is not imported where there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePath

import torch

from tierstore.errors import UsageError

_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
_MANIFEST = "tierstore.db"  # what a durable directory has once something was kept in it


def has_group() -> bool:
    """Return whether PyTorch's default process group is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def are_several() -> bool:
    """Return whether there are several: by the process group, or where there is none by torchrun's variables.

    All four of them have to be there: ``WORLD_SIZE`` alone is set by other programs, too.
    """
    if has_group():
        return torch.distributed.get_world_size() > 1
    return all(name in os.environ for name in _TORCHRUN) and os.environ["WORLD_SIZE"].strip() != "1"


def refuse_directories_of_several(given: str | PurePath | Sequence[str | PurePath]) -> None:
    """Raise where one process would begin anew beside checkpoints of several.

    Args:
        given: the ``offload_path`` of a durable run.

    Raises:
        UsageError: it says which directories hold them.
    """
    path = Path(given if isinstance(given, str | PurePath) else given[0])
    if (path / _MANIFEST).exists():
        return
    held = sorted(each.parent.name for each in path.glob(f"rank-*/{_MANIFEST}"))
    if held:
        raise UsageError(
            f"{str(path)!r} holds the checkpoints of {len(held)} processes ({', '.join(held[:4])}"
            f"{', ...' if len(held) > 4 else ''}), and this is one process. Start as many as there were, "
            f"give {str(path / held[0])!r} as offload_path to go on with what that process had, or "
            "begin anew with resume=False."
        )
