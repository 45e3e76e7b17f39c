"""Run many programs: ``python -m tests.training.differential --seconds 3600 --processes 2``.

Says how many ran and how many a second, which were refused and why, and each distinct difference
with the smallest program that shows it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import queue
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.training.differential.features import OFF, only, without
from tests.training.differential.programs import TABLES, Program
from tests.training.differential.searching import Tally, work


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run programs for a while and report."""
    parser = argparse.ArgumentParser(prog="tests.training.differential", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", action="append", default=[], help="such as 'part empty'; again for more")
    parser.add_argument("--try", action="append", default=[], dest="tried", help="switch on, as well")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument("--pieces", action="store_true", help="say how many programs had each piece")
    options = parser.parse_args(arguments)
    tried = set(OFF) - set(without(options.tried))
    off = {name: why for name, why in only(options.only, TABLES).items() if name not in tried}
    total = Tally()
    began = time.time()
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    workers = [
        context.Process(
            target=work,
            args=(
                options.seed + n,
                options.processes,
                began + options.seconds,
                results,
                not options.no_shrink,
                off,
            ),
        )
        for n in range(options.processes)
    ]
    for worker in workers:
        worker.start()
    _gather(results, workers, total, _say)
    report(total, time.time() - began, _say)
    if options.pieces:
        report_pieces(total, _say)
    is_any_lost = report_lost(workers, _say)
    return 1 if total.found or is_any_lost else 0


Say = Callable[[str], None]


def _gather(results: Any, workers: list[Any], total: Tally, say: Say) -> None:  # noqa: ANN401 - a queue of processes
    """Add up what the workers put; a difference is told as soon as it is small, as a run may be cut off."""
    running = len(workers)
    while running:
        try:
            tally = results.get(timeout=5)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                return
            continue
        if tally is None:
            running -= 1
            continue
        total.ends.update(tally.ends)
        total.reasons.update(tally.reasons)
        total.pieces.update(tally.pieces)
        total.same_pieces.update(tally.same_pieces)
        total.enlarged += tally.enlarged
        for reason, (program, detail) in tally.found.items():
            old = total.found.get(reason)
            if old is None or len(program.text) < len(old[0].text):
                total.found[reason] = (program, detail)
                report_difference(reason, program, detail, say)


def report_difference(reason: str, program: Program, detail: str, say: Say) -> None:
    """Say in what a program differs, and show it."""
    say("=" * 100)
    say(f"{reason}\n{detail}\n{program.layout}  watched={program.is_watched}\n")
    say(program.text)


def report(total: Tally, seconds: float, say: Say) -> None:
    """Say what was seen, but for the differences, which were told."""
    count = sum(total.ends.values())
    say("=" * 100)
    for reason, times in total.reasons.most_common():
        say(f"{times:6} {reason}")
    for reason, names in Counter(OFF.values()).items():
        say(f"{names:6} features off: {reason}")
    say(f"{total.enlarged} had to be given more room in their midst")
    say(f"{count} programs in {seconds:.0f} s, {count / seconds:.1f} a second: {dict(total.ends)}")
    say(f"{len(total.found)} distinct differences")


def report_lost(workers: Sequence[Any], say: Say) -> bool:
    """Say which workers have ended in the midst of a round, which is counted nowhere."""
    codes = []
    for worker in workers:
        worker.join()
        codes += [worker.exitcode] if worker.exitcode else []
    for code in codes:
        say(f"a worker has ended in its midst, with exit code {code}")
    return bool(codes)


def report_pieces(total: Tally, say: Say) -> None:
    """Say how many programs had each piece, and how many of these were the same."""
    for name, count in sorted(total.pieces.items()):
        say(f"{count:6} {total.same_pieces[name]:6} {name}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
