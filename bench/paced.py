"""Steps in turns, on an emulated device that computes and copies beside each other as a real one does.

1. One core copies, the others compute: an accelerator's copy engines are not what it computes with.
2. What is freed stays with the process, as a caching allocator keeps a device's memory.  Otherwise fresh
   pages from the kernel cost more than what is measured, and how many a step needs differs from run to run.
3. The link is slowed until moving the swapped bytes takes a wished share of a step (`bench.links`).  The step
   is the one with nothing swapped in the very rounds that count: if it changed, they are made again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from bench.command import Settings, UnmeasurableError
from bench.llamas import MIB, Manner, Size, Trainee
from bench.measure import Spread, ratios, take_turns

NONE = "none"
"""The name of the manner that the link is paced by."""

DRIFT = 0.05
"""By how much of itself the share may differ from what is wished."""

_TRIES = 4
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # malloc.h
_KEEPING = {_M_MMAP_MAX: 0, _M_TRIM_THRESHOLD: 2**31 - 1}
_USUAL = {_M_MMAP_MAX: 65536, _M_MMAP_THRESHOLD: 32 * MIB, _M_TRIM_THRESHOLD: 64 * MIB}
"""Where glibc's own adjusting ends, which setting anything switches off (mallopt(3))."""


@dataclass(frozen=True)
class Rounds:
    """What the turns came to.

    Attributes:
        seconds: of a step, by manner, lists in the order of rounds.
        forward_s: the same of its forward.
        moved: what each swapped, in words.
        losses: of each, all equal.
    """

    seconds: Mapping[str, list[float]]
    forward_s: Mapping[str, list[float]]
    moved: Mapping[str, str]
    losses: str

    @property
    def forward_share(self) -> float:
        """Forward's share of a step with nothing swapped."""
        return statistics.median(self.forward_s[NONE]) / statistics.median(self.seconds[NONE])

    def times(self, name: str, other: str = NONE) -> Spread:
        """Return how many times as long a step takes as another manner's, round by round."""
        return ratios(self.seconds[name], self.seconds[other])

    def details(self, other: str = NONE) -> dict[str, str]:
        """Return all of it, printable, ratios over another manner."""
        return {
            **{f"{name} s": str(Spread.of(taken)) for name, taken in self.seconds.items()},
            **{
                f"{name}, times {other}": str(self.times(name, other))
                for name in self.seconds
                if name != other
            },
            **{f"{name}, moved": moved for name, moved in self.moved.items()},
            "losses": self.losses,
        }


@dataclass(frozen=True)
class Link:
    """A link that is as slow beside computing as wished.

    Attributes:
        bytes_a_s: each way.
        share: the time to move all marked bytes one way, over that of a step with nothing swapped.
    """

    bytes_a_s: int
    share: float


def equal_losses(ours: torch.Tensor, theirs: torch.Tensor) -> str:
    """Compare losses; return what to say of them.

    Raises:
        AssertionError: they differ.
    """
    if not torch.equal(ours, theirs):
        raise AssertionError(f"the losses differ: {ours.tolist()}, {theirs.tolist()}")
    return f"{len(ours)} of {len(ours)} equal, bit for bit"


@contextlib.contextmanager
def computing_beside_copies() -> Iterator[int]:
    """Leave one core to what copies, and keep what is freed; yield how many threads compute."""
    before = torch.get_num_threads()
    threads = max(1, min(before, len(os.sched_getaffinity(0)) - 1))
    torch.set_num_threads(threads)
    _set_malloc(_KEEPING)
    try:
        yield threads
    finally:
        torch.set_num_threads(before)
        _set_malloc(_USUAL)


def _set_malloc(options: Mapping[int, int]) -> None:
    """Set glibc's options, and give back what these would not have kept; nothing with another libc."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):
        for option, value in options.items():
            libc.mallopt(option, value)
        libc.malloc_trim(0)


def in_turns(size: Size, manners: Mapping[str, Manner], settings: Settings) -> Rounds:
    """Train a step in every manner a round.

    Raises:
        AssertionError: losses differ.
    """
    with contextlib.ExitStack() as stack:
        trainees = {name: stack.enter_context(Trainee(size, manner)) for name, manner in manners.items()}

        def step(name: str, trainee: Trainee) -> Mapping[str, float]:
            forward_s, step_s = trainee.seconds()
            return {name: step_s, f"{name}, forward": forward_s}

        runs = [lambda name=name, each=each: step(name, each) for name, each in trainees.items()]
        taken = take_turns(runs, repeats=settings.repeats, warmups=max(1, settings.warmups))
        moved = {name: each.moved for name, each in trainees.items() if each.swap is not None}
        plain, *others = trainees.values()
        said = [equal_losses(other.losses, plain.losses) for other in others]
    forward_s = {name: taken[f"{name}, forward"] for name in manners}
    return Rounds({name: taken[name] for name in manners}, forward_s, moved, said[-1])


def in_paced_turns(
    size: Size, share: float, manners_on: Callable[[int], Mapping[str, Manner]], settings: Settings
) -> tuple[Link, Rounds]:
    """Train in turns on a link that takes ``share`` of a step to move all marked bytes one way.

    Args:
        size: of the model.
        share: wished.
        manners_on: what to train, by name, on a link of so many bytes a second; `NONE` is one of them.
        settings: below a scale of 1 the pace is not held against what is wished.

    Raises:
        UnmeasurableError: the machine's pace did not stay for the length of the rounds.
    """
    step_s = _pace(size)
    for _ in range(_TRIES):
        bytes_a_s = round(size.marked_bytes / (share * step_s))
        rounds = in_turns(size, manners_on(bytes_a_s), settings)
        step_s = statistics.median(rounds.seconds[NONE])
        link = Link(bytes_a_s, size.marked_bytes / bytes_a_s / step_s)
        if abs(link.share / share - 1) <= DRIFT or settings.scale < 1:
            return link, rounds
    raise UnmeasurableError(
        f"the link was to take {share:.2f} of a step and took {link.share:.2f} in the last of {_TRIES} "
        "tries: something else runs on this machine"
    )


def _pace(size: Size) -> float:
    """Return about how many seconds a step with nothing swapped takes."""
    with Trainee(size, Manner()) as plain:
        plain.step()
        return statistics.median(plain.seconds()[1] for _ in range(3))
