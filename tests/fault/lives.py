"""Programs that come to their end in every way, with a run open and bytes on their way.

``python -m tests.fault.lives`` has imported everything and started no thread; for each line of its input, HOW
and PATH, it forks a life that ends as a program of its own does, and says how that ended.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import tierstore as ts
from tests.imported_ahead import import_ahead
from tierstore.training import Offload, offload

TIMEOUT_S = 60
CHECKPOINT = 3  # steps before it

Parts = tuple[nn.Module, torch.optim.Optimizer]


def build() -> Parts:
    """Return a model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(4)))
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(parts: Parts, steps: int) -> None:
    """Make some steps."""
    model, optimizer = parts
    for _ in range(steps):
        model(torch.ones(2, 32)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sizes(path: Path) -> dict[str, Any]:
    """Return a configuration whose host memory is too small."""
    return {
        "device": "cpu",
        "offload_cpu_size": "48KB",
        "offload_disk_size": "8MB",
        "offload_path": str(path),
    }


def begin(path: Path) -> tuple[Parts, Offload, ts.Store]:
    """Make a checkpoint, train on, and let bytes of a scratch store be on their way."""
    parts = build()
    run = offload(*parts, {**sizes(path / "durable"), "durable": True})
    train(parts, CHECKPOINT)
    run.checkpoint({"step": CHECKPOINT})
    train(parts, 2)
    store = ts.Store(ts.OffloadConfig.from_mapping(sizes(path / "scratch")).store_config())
    for number in range(64):
        store.put(str(number), torch.full((8192,), number, dtype=torch.uint8))
    for number in range(5):
        store.prefetch(str(number))
        store.evict(str(63 - number))
    return parts, run, store


def _in_thread(act: Callable[[], object], *, daemon: bool = False) -> None:
    has_begun = threading.Event()

    def run() -> None:
        has_begun.set()
        act()

    threading.Thread(target=run, daemon=daemon).start()
    has_begun.wait()


def _for_ever(parts: Parts) -> None:
    while True:
        train(parts, 1)


def _train_and_say(parts: Parts, run: Offload) -> None:
    train(parts, 10)
    run.checkpoint({"step": CHECKPOINT + 12})


def _fail() -> None:
    raise ValueError("the program fails")


def _beside(path: Path, method: str) -> None:
    child = multiprocessing.get_context(method).Process(target=live, args=("end", path))  # type: ignore[attr-defined]
    child.start()
    child.join()
    sys.exit(child.exitcode)


def _in_pool(path: Path) -> None:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        pool.apply(live, ("end", path))


def live(how: str, path: Path) -> None:
    """Live, and end in one of the ways."""
    if how in ("fork", "spawn"):
        _beside(path, how)
    if how == "pool":
        _in_pool(path)
        return
    parts, run, store = begin(path)
    ways: dict[str, Callable[[], object]] = {
        "end": lambda: None,
        "raise": _fail,
        "raise in a thread": lambda: _in_thread(_fail),
        "exit": lambda: sys.exit(3),
        "exit in a thread": lambda: _in_thread(sys.exit),
        "a thread trains": lambda: _in_thread(lambda: _train_and_say(parts, run)),
        "a daemon trains": lambda: _in_thread(lambda: _for_ever(parts), daemon=True),
        "_exit": lambda: os._exit(5),
        "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
        "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "in a pass": lambda: _end_in_a_pass(parts),
    }
    ways[how]()
    _kept.extend([parts, run, store])  # as a program's globals are


_kept: list[object] = []


def _end_in_a_pass(parts: Parts) -> None:
    parts[0].get_submodule("2").register_forward_hook(lambda *_: sys.exit(4))
    train(parts, 1)


def main() -> None:
    """Fork a life for each line of the input."""
    torch.set_num_threads(1)
    import_ahead()
    for line in sys.stdin:
        how, _, path = line.rstrip("\n").partition("\t")
        child = os.fork()
        if child == 0:
            torch.set_num_threads(1)  # anew: the child's threads would ask for a pool that is its parent's
            signal.alarm(TIMEOUT_S)
            os.dup2(2, 1)
            live(how, Path(path))
            return
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
