"""What a training loop reads its batches through, so that tables have their rows in time."""

from __future__ import annotations

from tierstore.data.lookahead import Lookahead, lookahead

__all__ = ["Lookahead", "lookahead"]
