"""The ``tierstore`` command: one file a verb.

Rule 1: an error is one line on stderr, never a traceback unless ``--debug`` asks for it.
Rule 2: the exit code is 0 (done), 1 (failed) or 2 (the call is wrong).
Rule 3: what a person reads goes to stdout; ``--json`` gives the same facts to a machine.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import NoReturn

from tierstore.cli import doctor, du, exchange, ls, plan, verify
from tierstore.cli.ending import ended_by_signals
from tierstore.errors import TierStoreError, UsageError

_FAILED = 1
_WRONG_CALL = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_CALL, f"{self.prog}: {message}; see '{self.prog} --help'\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: the words after ``tierstore``; ``None``: those of this process.
    """
    try:
        with ended_by_signals():
            options = _parser().parse_args(arguments)
            return _run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED
    except SystemExit as end:  # by the parser, or by a signal
        return end.code if isinstance(end.code, int) else _FAILED


def _run(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
    except Exception as error:
        if options.debug:
            raise
        print(f"tierstore {options.verb}: {_one_line(error)}", file=sys.stderr)
        return _WRONG_CALL if isinstance(error, UsageError) else _FAILED
    return code


def _parser() -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = _Parser(
        prog="tierstore", description="A tiered key-value store for tensors."
    )
    parser.add_argument("--version", action="version", version=f"tierstore {version('tierstore')}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for add_to in (
        doctor.add_to,
        plan.add_to,
        ls.add_to,
        du.add_to,
        verify.add_to,
        exchange.add_export,
        exchange.add_import,
    ):
        add_to(verbs, shared)
    return parser


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TierStoreError | OSError):
        return text
    return f"{type(error).__name__}: {text} (a bug in tierstore; --debug shows where)"
