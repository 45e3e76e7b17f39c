"""The ``tierstore`` command: one file a verb.

Rule 1: an error is one line on stderr, never a traceback unless ``--debug`` asks for it.
Rule 2: the exit code is 0 (done), 1 (failed) or 2 (the call is wrong).
Rule 3: what a person reads goes to stdout; ``--json`` gives the same facts to a machine.
Rule 4: a verb is imported when it is called: help, and a word that is wrong, wait for no import of PyTorch.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, NoReturn

from tierstore import __version__
from tierstore.cli.ending import ended_by_signals
from tierstore.cli.no_collection import no_collection
from tierstore.errors import TierStoreError, UsageError

_FAILED = 1
_WRONG_CALL = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells count


class _Verb(NamedTuple):
    """A verb that is not imported yet.

    Attributes:
        module: of this package.
        help: the line in ``tierstore --help``.
        add: the function of the module that adds the verb to a parser.
    """

    module: str
    help: str
    add: str = "add_to"


_VERBS: Final = {
    "doctor": _Verb("doctor", "what this machine offers a store, and what is missing for more"),
    "plan": _Verb("plan", "will a model fit, how fast will it be, and what should go where"),
    "convert": _Verb(
        "convert", "write the YAML of a run from a configuration of DeepSpeed's or Accelerate's"
    ),
    "top": _Verb("top", "what an open run does now: tiers, links, waiting, what moves"),
    "ls": _Verb("ls", "list the keys of a durable store"),
    "du": _Verb("du", "count the bytes of a durable store"),
    "verify": _Verb("verify", "read a durable store and name damaged keys"),
    "export": _Verb("exchange", "write a durable store's tensors to a file", "add_export"),
    "import": _Verb("exchange", "put a file's tensors into a durable store", "add_import"),
}


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
            words = sys.argv[1:] if arguments is None else arguments
            options = _parser(_called(words)).parse_args(words)
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


def _called(words: Sequence[str]) -> str | None:
    """Return the verb that is called; ``None``: none that there is."""
    first = next((word for word in words if not word.startswith("-")), None)
    return first if first in _VERBS else None


def _parser(called: str | None) -> argparse.ArgumentParser:
    """Return the parser of all verbs; only the one that is called knows its arguments."""
    parser: argparse.ArgumentParser = _Parser(
        prog="tierstore", description="A tiered key-value store for tensors."
    )
    parser.add_argument("--version", action="version", version=f"tierstore {__version__}")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show where an error came from")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in _VERBS.items():
        if name == called:
            _adder(verb)(verbs, shared)
        else:
            verbs.add_parser(name, help=verb.help)
    return parser


def _adder(
    verb: _Verb,
) -> Callable[[argparse._SubParsersAction[argparse.ArgumentParser], argparse.ArgumentParser], None]:
    with no_collection():
        module = importlib.import_module(f"tierstore.cli.{verb.module}")
    found: Callable[[argparse._SubParsersAction[argparse.ArgumentParser], argparse.ArgumentParser], None]
    found = getattr(module, verb.add)
    return found


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, TierStoreError | OSError):
        return text
    return f"{type(error).__name__}: {text} (a bug in tierstore; --debug shows where)"
