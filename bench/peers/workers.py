"""A peer in a process of its own, asked and answering in lines of JSON.

The parent starts ``python -m bench.peers.workers KIND NAME``, and asks one thing at a time.  What the
peer's libraries print goes to a log, which is quoted when something fails.  Knows nothing of what
is asked.
"""

from __future__ import annotations

import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import IO, TypeVar

from bench.measure import Spread

Answer = Mapping[str, object]
Subject = Callable[[str, Mapping[str, object]], Answer]
"""Takes what is asked and its arguments; ``"close"`` is asked last."""

T = TypeVar("T")

_KINDS = {
    "disk": "bench.peers.disk_peers",
    "training": "bench.peers.trainees",
    "inference": "bench.peers.inferrers",
    "tables": "bench.peers.table_peers",
    "shards": "bench.peers.shard_peers",
}
"""Modules with a function ``open_subject(name)`` each."""

_ANSWER_WITHIN_S = 900.0  # the first build of DeepSpeed's operators takes minutes
_ROOT = Path(__file__).resolve().parents[2]
_QUOTED_LINES = 15


class Absent(Exception):  # noqa: N818 - says what is the matter
    """A peer cannot run here; the message says why, and what would help."""


class PeerFailed(Exception):  # noqa: N818
    """A peer stopped in the middle of its work; the message quotes what it said."""


def required(module: str, hint: str = "make peers") -> ModuleType:
    """Import a module that only some installations have.

    Raises:
        Absent: it is not there, or cannot be loaded.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:  # a broken installation raises anything
        raise Absent(f"{module} cannot be imported ({error}); to install it: {hint}") from error


# ---------------------------------------------------------------------- the parent's side


class Worker:
    """One peer's process.  Use from one thread, as a context manager.

    Args:
        kind: what it is to do: a key of the table above.
        name: which peer.
        log: a file for what it prints.

    Raises:
        Absent: the peer cannot run here.
        PeerFailed: it did not come up.
    """

    def __init__(self, kind: str, name: str, log: Path) -> None:
        self.name = name
        self._log = log
        with log.open("w") as printed:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bench.peers.workers", kind, name],
                cwd=_ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=printed,
                text=True,
                env=surroundings(),
            )
        try:
            self._receive()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, arguments: Mapping[str, object] | None = None) -> dict[str, object]:
        """Ask and wait for the answer.

        Raises:
            PeerFailed: the peer raised, died, or took too long.
        """
        sent = _pipe(self._process.stdin)
        try:
            sent.write(json.dumps({"ask": what, "with": dict(arguments or {})}) + "\n")
            sent.flush()
        except OSError as error:
            raise PeerFailed(f"{self.name} is gone; the end of what it printed:\n{self._tail()}") from error
        return self._receive()

    def _receive(self) -> dict[str, object]:
        received = _pipe(self._process.stdout)
        if not select.select([received], [], [], _ANSWER_WITHIN_S)[0]:
            self._process.kill()
            raise PeerFailed(f"{self.name} gave no answer for {_ANSWER_WITHIN_S:g} s:\n{self._tail()}")
        line = received.readline()
        if not line:
            code = self._process.wait()
            raise PeerFailed(
                f"{self.name} ended with code {code}; the end of what it printed:\n{self._tail()}"
            )
        answer: dict[str, object] = json.loads(line)
        if "absent" in answer:
            raise Absent(str(answer["absent"]))
        if "failed" in answer:
            raise PeerFailed(f"{self.name}: {answer['failed']}")
        return answer

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_QUOTED_LINES:])

    def close(self) -> None:
        """Let the peer end, by force if it does not.  May be called again."""
        for pipe in (self._process.stdin, self._process.stdout):
            try:
                _pipe(pipe).close()
            except OSError:  # it is gone already
                continue
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def surroundings() -> dict[str, str]:
    """Return the environment that every peer runs in: the same, so that none is better off."""
    prefix = Path(sys.prefix)
    return os.environ | {
        "PATH": f"{prefix / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}",  # ninja, for DeepSpeed
        "DS_ACCELERATOR": os.environ.get("DS_ACCELERATOR", "cpu"),
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", str(prefix / "torch-extensions")),
        "PYTHONPATH": os.pathsep.join(
            [str(_ROOT), str(_ROOT / "backends"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }


class Company:
    """Peers that take turns.  Use as a context manager.

    A peer that cannot start or that fails is left out from then on; ``left_out`` says why, by name.

    Args:
        kind: of all of them.
        names: in the order of the first round.
        logs: a directory for what they print.
        needed: peers whose failure ends the run.
    """

    def __init__(self, kind: str, names: Sequence[str], logs: Path, needed: Sequence[str] = ()) -> None:
        self.left_out: dict[str, str] = {}
        self._needed = set(needed)
        self._workers: dict[str, Worker] = {}
        logs.mkdir(parents=True, exist_ok=True)
        try:
            for name in names:
                if (
                    started := self._guarded(name, partial(Worker, kind, name, logs / f"{name}.log"))
                ) is not None:
                    self._workers[name] = started
        except BaseException:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Who is still there."""
        return list(self._workers)

    def ask_all(
        self, what: str, arguments: Mapping[str, object] | None = None, *, backwards: bool = False
    ) -> dict[str, dict[str, object]]:
        """Ask one after the other; return the answers of those who gave one."""
        answers = {}
        for name in reversed(self.names) if backwards else self.names:
            answer = self._guarded(name, partial(self._workers[name].ask, what, arguments))
            if answer is not None:
                answers[name] = answer
        return answers

    def rounds(
        self, what: str, arguments: Mapping[str, object] | None = None, *, repeats: int, warmups: int
    ) -> dict[str, list[dict[str, object]]]:
        """Ask in turns, every second round backwards; return the answers that count, in the order of rounds.

        Only peers that gave every answer are in it.

        Raises:
            ValueError: no round would count.
        """
        if repeats < 1 or warmups < 0:
            raise ValueError(
                f"repeats must be at least 1 and warmups at least 0, not {repeats} and {warmups}"
            )
        kept: dict[str, list[dict[str, object]]] = {}
        for turn in range(warmups + repeats):
            for name, answer in self.ask_all(what, arguments, backwards=turn % 2 == 1).items():
                if turn >= warmups:
                    kept.setdefault(name, []).append(answer)
        return {name: kept[name] for name in self.names}

    def _guarded(self, name: str, work: Callable[[], T]) -> T | None:
        try:
            return work()
        except (Absent, PeerFailed) as error:
            if name in self._needed:
                raise
            is_absent = isinstance(error, Absent)
            self.left_out[name] = f"{'absent' if is_absent else 'FAILED'}: {error}"
            print(f"{name} is left out. {self.left_out[name]}", file=sys.stderr, flush=True)
            if name in self._workers:
                self._workers.pop(name).close()
            return None

    def close(self) -> None:
        """Let all of them end."""
        for worker in self._workers.values():
            worker.close()
        self._workers = {}

    def __enter__(self) -> Company:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def numbers(answers: Sequence[Mapping[str, object]], name: str) -> list[float]:
    """Return one number of each answer."""
    return [float(str(answer[name])) for answer in answers]


def spread(answers: Sequence[Mapping[str, object]], name: str) -> Spread:
    """Summarise one number of all answers."""
    return Spread.of(numbers(answers, name))


# ---------------------------------------------------------------------- the peer's side


def serve(open_subject: Callable[[str], Subject], name: str, asked: IO[str], answered: IO[str]) -> int:
    """Open the peer, answer what is asked until there is no more; return the exit code."""

    def say(answer: Answer) -> None:
        answered.write(json.dumps(answer) + "\n")
        answered.flush()

    try:
        subject = open_subject(name)
    except Absent as error:
        say({"absent": str(error)})
        return 0
    say({"ready": name})
    for line in asked:
        question = json.loads(line)
        try:
            answer = subject(question["ask"], question["with"])
        except Absent as error:
            say({"absent": str(error)})
            return 0
        except Exception as error:  # noqa: BLE001 - told to the parent
            traceback.print_exc()
            say({"failed": f"{type(error).__name__}: {error}"})
            return 1
        say(answer)
    subject("close", {})
    return 0


def _main() -> int:
    kind, name = sys.argv[1:3]
    # What libraries print must not come between answers: descriptor 1 becomes the log.
    answered = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    module = importlib.import_module(_KINDS[kind])
    return serve(module.open_subject, name, sys.stdin, answered)


if __name__ == "__main__":
    # As `bench.peers.workers`, so that what peers raise is what is caught here.
    sys.exit(importlib.import_module("bench.peers.workers")._main())  # noqa: SLF001 - this very module
