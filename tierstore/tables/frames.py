"""The life of frames: the rooms of pages in memory.

Rule 1: a frame's state says what may be done with its bytes; every change goes through `FrameTable.step`,
for many frames at once, and one that the table below does not name raises.
Rule 2: bytes of a frame that is DIRTY, WRITING or OVERTAKEN are nowhere else: it is not given to another
page. Rule 3: victims are chosen in bulk, by what was used least recently or, of late, least often, and
never among frames that are held for the rows in hand.

Knows numbers of frames and pages; the bytes are somebody else's.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from tierstore.errors import InvariantError
from tierstore.tables.page_numbers import Pages
from tierstore.tables.past_uses import PastUses

Frames = npt.NDArray[np.int64]
Policy = Literal["lfu", "lru"]

_HALF_LIFE: Final = 256.0
"""Visits after which a use counts half, for ``"lfu"``: what was hot long ago makes room.  A batch of training
is two."""
_REMEMBERED: Final = 2
"""Pages that have left whose uses are remembered, for each frame: more give no more hits."""
_SHARE: Final = 16
"""One victim in so many frames is chosen at once: a choice looks at all of them."""
_PREFETCHES: Final = 4
"""A prefetch was for nothing, and its frames are free to go, once one is used that came so much later."""
FORESIGHT: Final = 16
"""Or once so many others have come."""


class FrameState(enum.IntEnum):
    """What may be done with a frame's bytes."""

    FREE = 0  # nothing: it has no page
    FILLING = 1  # nothing: somebody is writing them
    CLEAN = 2  # read, write, forget: they can be had again
    DIRTY = 3  # read, write, begin to write them to the log
    WRITING = 4  # read, write: they are on their way to the log
    OVERTAKEN = 5  # read, write: they have changed since they went on their way


class FrameEvent(enum.IntEnum):
    """What happens to frames."""

    TAKEN = 0  # for a page
    FILLED = 1  # with the page's bytes
    UNFILLED = 2  # that failed
    CHANGED = 3  # rows were written
    WRITE_BEGUN = 4  # a copy of the bytes goes to the log
    WRITTEN = 5  # it is there
    UNWRITTEN = 6  # that failed
    FORGOTTEN = 7  # the page leaves memory


_S, _E = FrameState, FrameEvent

STEPS: Final[Mapping[FrameEvent, Mapping[FrameState, FrameState]]] = {
    _E.TAKEN: {_S.FREE: _S.FILLING},
    _E.FILLED: {_S.FILLING: _S.CLEAN},
    _E.UNFILLED: {_S.FILLING: _S.FREE},
    _E.CHANGED: {
        _S.CLEAN: _S.DIRTY,
        _S.DIRTY: _S.DIRTY,
        _S.WRITING: _S.OVERTAKEN,
        _S.OVERTAKEN: _S.OVERTAKEN,
    },
    _E.WRITE_BEGUN: {_S.DIRTY: _S.WRITING},
    _E.WRITTEN: {_S.WRITING: _S.CLEAN, _S.OVERTAKEN: _S.DIRTY},
    _E.UNWRITTEN: {_S.WRITING: _S.DIRTY, _S.OVERTAKEN: _S.DIRTY},
    _E.FORGOTTEN: {_S.CLEAN: _S.FREE},
}
"""What each event makes of each state; what is not here cannot happen."""

_ILLEGAL = 255


def _as_array() -> npt.NDArray[np.uint8]:
    steps = np.full((len(FrameEvent), len(FrameState)), _ILLEGAL, dtype=np.uint8)
    for event, changes in STEPS.items():
        for before, after in changes.items():
            steps[event, before] = after
    return steps


_STEPS = _as_array()


class FrameTable:
    """What is in each frame, and who may go.

    Args:
        frames: how many there are.
        policy: who goes first: what was used least often, or least recently.
        can_write: whether there is a log for what is dirty; else only clean frames can go.

    Attributes:
        states: by frame.
        pages: by frame; of those that are not free.
        free: how many are free.
    """

    def __init__(self, frames: int, policy: Policy = "lfu", *, can_write: bool = True) -> None:
        self._policy = policy
        self._can_write = can_write
        self.states = np.zeros(0, dtype=np.uint8)
        self.pages = np.zeros(0, dtype=np.int64)
        self.free = 0
        self._free_frames = np.zeros(0, dtype=np.int64)  # the first `free` of them are
        self._used_at = np.zeros(0, dtype=np.int64)
        self._counts = np.zeros(0)  # of uses, as of _used_at
        self._kept = np.zeros(0, dtype=np.int64)  # by which prefetch
        self._held = np.zeros(0, dtype=np.bool_)
        self._now = 0
        self._prefetches = FORESIGHT
        self._reached = 0  # the last prefetch of which a frame was used
        self._victims = np.zeros(0, dtype=np.int64)  # chosen at _chosen_at, not yet taken
        self._chosen_at = 0
        self._past: PastUses | None = None  # of pages that have left, once one has
        self.enlarge(frames)

    def __len__(self) -> int:
        return len(self.states)

    def enlarge(self, frames: int) -> None:
        """Let there be so many frames."""
        added = np.arange(len(self), frames)
        for name in ("states", "pages", "_used_at", "_counts", "_kept", "_held"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(len(added), dtype=array.dtype)]))
        free = self._free_frames[: self.free]
        self._free_frames = np.zeros(frames, dtype=np.int64)
        # Taken from the end: the lowest first, so that memory is touched in order.
        self._free_frames[: len(added)] = added[::-1]
        self._free_frames[len(added) :][: len(free)] = free
        self.free += len(added)

    def step(self, event: FrameEvent, frames: Frames) -> None:
        """Let ``event`` happen to these distinct frames.

        Raises:
            InvariantError: it cannot happen in a frame's state; nothing was changed.
        """
        after = _STEPS[event, self.states[frames]]
        wrong = np.flatnonzero(after == _ILLEGAL)
        if len(wrong):
            frame = int(frames[wrong[0]])
            raise InvariantError(
                f"frame {frame} of page {self.pages[frame]} is {FrameState(self.states[frame]).name} and "
                f"cannot be {event.name}; likewise {len(wrong)} of {len(frames)} frames"
            )
        self.states[frames] = after
        if event is _E.FORGOTTEN:
            self._remember(frames)
        if event in (_E.UNFILLED, _E.FORGOTTEN):
            self._free_frames[self.free : self.free + len(frames)] = frames
            self.free += len(frames)
            self._kept[frames] = 0
            self._counts[frames] = 0

    def take(self, pages: Pages) -> Frames:
        """Give free frames to pages; there are enough.  They are FILLING from now on."""
        frames = self._free_frames[self.free - len(pages) : self.free][::-1].copy()
        self.free -= len(pages)
        self.step(_E.TAKEN, frames)
        self.pages[frames] = pages
        if self._past is not None:
            self._counts[frames], self._used_at[frames] = self._past.recall(pages)
        return frames

    def _remember(self, frames: Frames) -> None:
        """Keep in mind how often the pages were used that leave."""
        if self._past is None or len(self._past) < len(self):
            self._past = PastUses(_REMEMBERED * len(self))
        self._past.remember(self.pages[frames], self._counts[frames], self._used_at[frames])

    def are_in(self, *states: FrameState) -> Frames:
        """Return the frames in one of these states, ascending."""
        return np.flatnonzero(np.isin(self.states, states))

    # --- who is used ---------------------------------------------------------------------------

    def use(self, frames: Frames) -> None:
        """Note that rows of these frames are visited: once a visit."""
        self._now += 1
        kept = self._kept[frames]
        used = int(kept[kept > 0].min(initial=self._prefetches))  # others are named by later ones, too
        self._reached = max(self._reached, used if kept.any() else 0)
        self._counts[frames] = self._aged(frames) + 1
        self._used_at[frames] = self._now
        self._kept[frames] = np.where(kept > used, kept, 0)

    def hold(self, frames: Frames) -> None:
        """Let these frames be no victims until others are held."""
        self._held[:] = False
        self._held[frames] = True

    def begin_prefetch(self, times: int = 1) -> None:
        """Let former prefetches be older: another one has come, or as good as several."""
        self._prefetches += times

    def keep(self, frames: Frames) -> None:
        """Let these frames be victims only where there are no others: this prefetch names them.

        Until they are used, or for as long as it takes to see that nobody will.
        """
        self._kept[frames] = self._prefetches

    # --- who goes ------------------------------------------------------------------------------

    def victims(self, most: int, *, kept_too: bool = False) -> Frames:
        """Return up to ``most`` frames that are to go first: clean, or dirty where there is a log.

        Args:
            most: at least 1.
            kept_too: also those that a prefetch has brought.
        """
        victims = self._still(self._victims)
        if not len(victims) or kept_too:
            victims = self._choose(max(most, len(self) // _SHARE), kept_too=kept_too)
        self._victims = victims[most:]
        return victims[:most]

    def next_victims(self) -> Frames:
        """Return those that were chosen with the last victims and not returned with them."""
        return self._still(self._victims)

    def unused_since(self, frames: Frames, moment: int) -> Frames:
        """Return those of the frames that nobody has used after a `moment`, holds, or has prefetched."""
        used = (self._used_at[frames] > moment) | self._held[frames] | self._are_kept(frames)
        return frames[~used]

    @property
    def moment(self) -> int:
        """Now, in visits."""
        return self._now

    def _still(self, victims: Frames) -> Frames:
        """Return those of the victims chosen before that still are."""
        victims = self.unused_since(victims, self._chosen_at)
        return victims[self._may_go(victims)]

    def _choose(self, most: int, *, kept_too: bool) -> Frames:
        self._chosen_at = self._now
        every = np.arange(len(self))
        may_go = self._may_go(every) & ~self._held
        if not kept_too:
            may_go &= ~self._are_kept(every)
        candidates = np.flatnonzero(may_go)
        if most >= len(candidates):
            return candidates
        worth = self._used_at[candidates] if self._policy == "lru" else self._aged(candidates)
        return candidates[np.argpartition(worth, most)[:most]]

    def _may_go(self, frames: Frames) -> npt.NDArray[np.bool_]:
        states = self.states[frames]
        may_go: npt.NDArray[np.bool_] = states == _S.CLEAN
        return may_go | (states == _S.DIRTY) if self._can_write else may_go

    def _are_kept(self, frames: Frames) -> npt.NDArray[np.bool_]:
        return self._kept[frames] > max(self._prefetches - FORESIGHT, self._reached - _PREFETCHES)

    def _aged(self, frames: Frames) -> npt.NDArray[np.float64]:
        """Return how often each frame was used, of which uses long ago count less."""
        ages = self._used_at[frames] - self._now
        return self._counts[frames] * np.exp2(ages / _HALF_LIFE)
