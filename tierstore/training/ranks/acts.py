"""What the processes of a run do together with tables of which each has a part."""

from __future__ import annotations

import enum


class Act(enum.IntEnum):
    """What all processes do together."""

    LOOKUP = 0
    ROWS = 1
    SET_ROWS = 2
    GRADIENTS = 3
    GROW = 4
    LOAD = 5
    COPY = 6
    EXPORT = 7
    SAVE = 8
    FIRST_ROWS = 9
    SUSPEND = 10
    RESUME = 11
    CHECKPOINT = 12
    CLOSE = 13
    RETURN = 14
