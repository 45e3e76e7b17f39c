"""Kill a process whose threads change and flush a durable store, and look whether what is left was there.

``python -m tests.fault.moments --trials 500 DIRECTORY`` forks a worker with several threads.  Each has keys
of its own, which it puts, replaces, writes, renames and drops, and now and then flushes everything; it says
so in a journal of its own, before and after each call, with the time.  When the worker is killed, another
process looks at what the store holds.  The oracle never asks the store that was killed:

1. What is left of each thread's keys is what that thread had left at some moment of its life.
2. There is one moment at which all threads had left what is left: each of these states was there from the
   beginning of the call that made it, at the earliest, until the end of the next call, at the latest; all
   of these spans, and that since the beginning of the last flush that has ended, have a moment in common.
3. Half of the workers flush keys of their own by name as well.  What is left of these is as it was when the
   last such flush that has ended began, or later; of them, the second rule holds for each thread alone, but
   that keys may be gone which were not there later, nor their bytes: others' flushes let go of these.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

import tierstore as ts
from tests.fault.journals import whole_lines

State = dict[str, int]
"""What is under each key: the number that its bytes are made of."""

_THREADS = 3
_LONGEST_LIFE_S = 0.5
_WRONG = 7
NEVER = 1 << 62
_SIZES = (1, 500, 100_000)  # elements: the copy of a large one is what flushes wait for


@dataclass(frozen=True)
class Step:
    """What a thread said of one call.

    Attributes:
        begin: when it began.
        end: when it had ended; ``NEVER``: the worker was killed before.
        state: what the thread's keys are afterwards.
        flush: "": it was none; "all", or "own".
    """

    begin: int
    end: int
    state: State
    flush: str = ""


def open_store(directory: Path) -> ts.Store:
    """Open the store: a host tier above a durable one, both large enough for whatever is retained."""
    options = {"path": str(directory / "store"), "durable": True, "aio_block_size": "64KiB"}
    tiers = [
        ts.TierConfig("host", "pinned", "32MiB", options={"host_mem_block_size": "32MiB"}),
        ts.TierConfig("disk", "files", "512MiB", options=options),
    ]
    return ts.Store(ts.StoreConfig(tiers))


class Life:
    """One thread of a worker.

    Args:
        store: the worker's.
        number: of the thread.
        seed: of what it does.
        journal: where it says so.
        flushes_own: whether it flushes its keys by name.
    """

    def __init__(self, store: ts.Store, number: int, seed: int, journal: Path, *, flushes_own: bool) -> None:
        self._store = store
        self._number = number
        self._random = random.Random(f"{seed} {number}")
        self._fd = os.open(journal, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._state: State = {}
        self._value = number
        self._deeds = [self._put, self._put, self._write, self._write, self._rename, self._swap, self._drop]
        self._deeds += [self._flush_all] + [self._flush_own] * 2 * flushes_own

    def live(self) -> None:
        """Do things at random, for ever."""
        while True:
            self._random.choice(self._deeds)()

    def _do(self, call: Callable[[], object], state: State, flush: str = "") -> None:
        """Say what a call will lead to; make it; say that it did."""
        self._say([time.monotonic_ns(), state, flush])
        try:
            call()
        except ts.LeaseError:  # somebody else writes: a flush of everything is refused
            self._say([-1])
            return
        self._say([time.monotonic_ns()])
        self._state = state

    def _say(self, line: list[object]) -> None:
        os.write(self._fd, (json.dumps(line) + "\n").encode())

    def _next(self) -> int:
        self._value += _THREADS
        return self._value

    def _some(self) -> str | None:
        return self._random.choice(sorted(self._state)) if self._state else None

    def _put(self) -> None:
        key, value = f"{self._number} {self._random.randrange(5)}", self._next()
        tensor = torch.full((self._random.choice(_SIZES),), value)
        self._do(lambda: self._store.put(key, tensor, replace=True), {**self._state, key: value})

    def _write(self) -> None:
        if (key := self._some()) is not None:
            value = self._next()

            def write() -> None:
                with self._store.lease(key, tier="host", write=True) as lease:
                    lease.tensor.fill_(value)

            self._do(write, {**self._state, key: value})

    def _rename(self) -> None:
        if (key := self._some()) is not None:
            name = f"{self._number} {self._random.randrange(5)}"
            if name != key:
                state = {each: value for each, value in self._state.items() if each != key}
                names = {key: name}
                self._do(lambda: self._store.rename(names, replace=True), {**state, name: self._state[key]})

    def _swap(self) -> None:
        """Let two keys change places, over a third name."""
        if len(self._state) > 1:
            a, b = self._random.sample(sorted(self._state), 2)
            for key, name in ((a, f"{self._number} x"), (b, a), (f"{self._number} x", b)):
                state = {each: value for each, value in self._state.items() if each != key}
                names = {key: name}
                self._do(partial(self._store.rename, names), {**state, name: self._state[key]})

    def _drop(self) -> None:
        if (key := self._some()) is not None:
            state = {each: value for each, value in self._state.items() if each != key}
            self._do(lambda: self._store.drop(key), state)

    def _flush_all(self) -> None:
        self._do(self._store.flush, self._state, "all")

    def _flush_own(self) -> None:
        if self._state:
            keys = sorted(self._state)
            self._do(lambda: self._store.flush(*keys), self._state, "own")


def _live(directory: Path, seed: int, begun: int) -> None:
    """Be a worker, in a process of its own; write to ``begun`` when the store is open.  Never returns."""
    try:
        store = open_store(directory)
        os.write(begun, b".")
        lives = [
            Life(store, number, seed, directory / f"journal {number}", flushes_own=bool(seed % 2))
            for number in range(_THREADS)
        ]
        threads = [threading.Thread(target=_guarded, args=(life,), daemon=True) for life in lives]
        for thread in threads:
            thread.start()
        threads[0].join()
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
    os._exit(_WRONG)


def _guarded(life: Life) -> None:
    try:
        life.live()
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
        os._exit(_WRONG)


def _look(directory: Path) -> None:
    """Say what the store holds, in a process of its own.  Never returns."""
    try:
        found = {}
        with open_store(directory) as store:
            for key in store:
                tensor = store.get(key)
                assert tensor.eq(tensor[0]).all(), f"{key} is torn"
                found[key] = int(tensor[0])
        (directory / "found").write_text(json.dumps(found))
        os._exit(0)
    except BaseException:  # noqa: BLE001 - shown, and told by the exit code
        traceback.print_exc()
    os._exit(_WRONG)


def steps_of(journal: Path) -> list[Step]:
    """Read what a thread has said; a call that was refused changed nothing."""
    steps = [Step(0, 0, {})]
    begun: list[Any] | None = None
    for text in whole_lines(journal):
        line = json.loads(text)
        if len(line) > 1:
            begun = line
        else:
            assert begun is not None
            if line[0] >= 0:
                steps.append(Step(begun[0], line[0], *begun[1:]))
            begun = None
    if begun is not None:
        steps.append(Step(begun[0], NEVER, *begun[1:]))
    return steps


def judge(lives: list[list[Step]], found: State, *, is_one_moment: bool) -> None:
    """Compare what was found with what the threads said.

    Args:
        lives: what each thread did.
        found: what the store held.
        is_one_moment: whether flushes were of every key only.

    Raises:
        AssertionError: it was never there, or not since the last flush.
    """
    flushed = _last(lives, "all")
    spans: list[list[tuple[int, int]]] = []
    for number, steps in enumerate(lives):
        mine = {key: value for key, value in found.items() if key.startswith(f"{number} ")}
        since = max(flushed, _last([steps], "own"))
        ends = [step.end for step in steps[1:]] + [NEVER]
        spans.append(
            [
                (max(step.begin, since), end)
                for position, (step, end) in enumerate(zip(steps, ends, strict=True))
                if end >= since and _is_left(mine, step.state, [] if is_one_moment else steps[position + 1 :])
            ]
        )
        assert spans[-1], f"thread {number} had not left {mine} since its keys were flushed"
    if is_one_moment:
        begins = sorted(begin for each in spans for begin, _ in each)
        assert any(
            all(any(begin <= moment <= end for begin, end in each) for each in spans) for moment in begins
        ), f"the keys were never {found} together"


def _last(lives: list[list[Step]], flush: str) -> int:
    """Return when the last flush of a kind began that has ended."""
    begins = [step.begin for steps in lives for step in steps if step.flush == flush and step.end < NEVER]
    return max(begins, default=0)


def _is_left(found: State, state: State, later: list[Step]) -> bool:
    """Whether a state is what was found, but for keys that were gone later, with their bytes."""
    if not found.items() <= state.items():
        return False
    return all(
        any(key not in step.state and state[key] not in step.state.values() for step in later)
        for key in state.keys() - found.keys()
    )


def _run(task: Callable[[], None]) -> int:
    pid = os.fork()
    if pid == 0:
        torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
        task()
    return pid


def kill_one(directory: Path, seed: int) -> str:
    """Let a worker live, kill it at a random moment, and look at what is left.

    Returns:
        What its threads were at.

    Raises:
        AssertionError: it died of something else, which it has shown on stderr, or what is left is wrong.
    """
    directory.mkdir(parents=True)
    life_s = random.Random(-seed).uniform(0.02, _LONGEST_LIFE_S)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    opened, begun = os.pipe()
    pid = _run(lambda: _live(directory, seed, begun))
    os.close(begun)
    select.select([opened], [], [])
    os.close(opened)
    signal.sigtimedwait({signal.SIGCHLD}, life_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code == -signal.SIGKILL, f"worker {seed} ended with {code}"
    _, status = os.waitpid(_run(lambda: _look(directory)), 0)
    signal.sigtimedwait({signal.SIGCHLD}, 0)  # of both, or the next worker would have no time
    assert os.waitstatus_to_exitcode(status) == 0, f"what worker {seed} left cannot be read"
    found = json.loads((directory / "found").read_text())
    lives = [steps_of(directory / f"journal {number}") for number in range(_THREADS)]
    try:
        judge(lives, found, is_one_moment=not seed % 2)
    except AssertionError as error:
        raise AssertionError(f"worker {seed} in {directory}: {error}") from error
    ended = [step for steps in lives for step in steps if step.flush and step.end < NEVER]
    is_flushing = any(steps[-1].flush and steps[-1].end == NEVER for steps in lives)
    return f"{'flushing' if is_flushing else 'between'}, {'some' if ended else 'no'} flush before"


def main() -> int:
    """Kill workers and print what they were at as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    moments: Counter[str] = Counter()
    for trial in range(options.seed, options.seed + options.trials):
        directory = options.directory / str(trial)
        moments[kill_one(directory, trial)] += 1
        shutil.rmtree(directory)
    sys.stdout.write(json.dumps(dict(moments.most_common())) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
