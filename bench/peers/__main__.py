"""``python -m bench.peers``: runs in ``.venv-peers`` if `make peers` made one, whoever starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".venv-peers"


def elsewhere(home: Path) -> Path | None:
    """Return the Python of the environment in ``home``; ``None`` if there is none, or this is it."""
    python = home / "bin" / "python"
    return python if python.exists() and home.resolve() != Path(sys.prefix).resolve() else None


if __name__ == "__main__":
    if python := elsewhere(HOME):
        os.execv(python, [str(python), "-m", "bench.peers", *sys.argv[1:]])
    from bench.peers.command import main

    sys.exit(main())
