"""``python -m bench.peers``: runs in ``.venv-peers`` if `make peers` made one, whoever starts it."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def _move_in() -> None:
    """Go on in the peers' environment; where there is none, in this one, with the peers that it has."""
    home = Path(__file__).resolve().parents[2] / ".venv-peers"
    python = home / "bin" / "python"
    if Path(sys.prefix).resolve() != home and python.exists():
        os.execv(python, [str(python), "-m", "bench.peers", *sys.argv[1:]])


if __name__ == "__main__":
    _move_in()
    from bench.peers.command import main

    sys.exit(main())
