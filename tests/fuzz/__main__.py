"""Fuzz one target: ``python -m tests.fuzz TARGET [OPTIONS] [FILE ...]``; ``--help`` says which options.

With files, judge these and nothing else: what a crash has left is looked at so.  An input that is wrong, that
takes longer than a minute, or more than 4 GiB, is written to a file in the working directory, and named.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, NoReturn, Protocol

import atheris  # type: ignore[import-untyped]
import torch

from tests.fuzz import Judge, target_names

INSTRUMENTED: Final = ["tierstore", "tierstore_backends", "yaml", "zarr"]
_MOST_INPUT_BYTES: Final = 4096
_MOST_SECONDS: Final = 60
_MOST_MIB: Final = 4096


class Target(Protocol):
    """A module of this folder: see `tests.fuzz`."""

    SEEDS: Mapping[str, bytes]
    TOKENS: tuple[bytes, ...]

    def prepared(self, directory: Path) -> AbstractContextManager[Judge]: ...


def main(arguments: list[str]) -> None:
    """Do what the command line says.  Ends the process."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=target_names())
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--seconds", type=int, default=3600)
    parser.add_argument(
        "--corpus", type=Path, help="a directory of inputs that came to something new; is added to"
    )
    parser.add_argument(
        "--runs", type=int, default=-1, help="the most inputs; -1: as many as there is time for"
    )
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with atheris.instrument_imports(include=INSTRUMENTED):
        target: Target = importlib.import_module(f"tests.fuzz.{asked.target}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name in ("judged", "corpus", "seeds"):
            (work / name).mkdir()
        with target.prepared(work / "judged") as judge:
            if not asked.files:
                _fuzz(target, judge, work, asked)
            for file in asked.files:
                judge(file.read_bytes())
                print(f"{file}: as it should be")  # noqa: T201 - a program


def _fuzz(target: Target, judge: Judge, work: Path, asked: argparse.Namespace) -> NoReturn:
    for number, seed in enumerate(target.SEEDS.values()):
        (work / "seeds" / str(number)).write_bytes(seed)
    options = [
        f"-max_total_time={asked.seconds}",
        f"-runs={asked.runs}",
        f"-seed={asked.seed}",
        f"-max_len={_MOST_INPUT_BYTES}",
        f"-timeout={_MOST_SECONDS}",
        f"-rss_limit_mb={_MOST_MIB}",
        "-len_control=0",
        "-print_final_stats=1",
    ]
    if target.TOKENS:
        tokens = ("".join(f"\\x{byte:02x}" for byte in token) for token in target.TOKENS)
        (work / "tokens").write_text("".join(f'"{token}"\n' for token in tokens))
        options.append(f"-dict={work / 'tokens'}")
    atheris.Setup([asked.target, *options, str(asked.corpus or work / "corpus"), str(work / "seeds")], judge)
    atheris.Fuzz()
    raise AssertionError("libFuzzer ends the process")


if __name__ == "__main__":
    main(sys.argv[1:])
