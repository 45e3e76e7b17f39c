"""How far one piece of work has come, for whoever has to clean up after an interrupt.

Setting an attribute, and calling a function of C right after it, is nothing that an interrupt can part.
"""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Of the piece that a turn is about.

    Attributes:
        has_begun: a backend may have been called: it must not be done again from its beginning.
        has_ended: its outcome was told, or will be by the backend: there is nothing left to do.
    """

    has_begun: bool
    has_ended: bool
