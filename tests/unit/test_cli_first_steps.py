"""``python -m tierstore``: what to do next, and the same verbs as ``tierstore``."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tierstore import cli
from tierstore.cli.first_steps import LOOP, print_first_steps

_ROOT = Path(__file__).parents[2]
_Output = pytest.CaptureFixture[str]


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tierstore", *words], capture_output=True, text=True, check=False
    )


def _text(capsys: _Output) -> str:
    assert print_first_steps() == 0
    return capsys.readouterr().out


def test_the_module_says_what_to_do_next(capsys: _Output) -> None:
    ran = _run()
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout == _text(capsys)
    assert len(ran.stdout.splitlines()) < 40
    assert max(map(len, ran.stdout.splitlines())) <= 110


@pytest.mark.parametrize(
    "words", [("--help",), ("--version",), ("ls",), ("no-such-verb",), ("plan", "--help")]
)
def test_the_module_takes_the_verbs_of_the_command(words: tuple[str, ...], capsys: _Output) -> None:
    ran = _run(*words)
    assert ran.returncode == cli.main(words)
    assert (ran.stdout, ran.stderr) == capsys.readouterr()


def test_every_command_that_is_named_is_one_that_there_is(capsys: _Output) -> None:
    commands = re.findall(r"^ +tierstore (\w+.*)$", _text(capsys), re.MULTILINE)
    parsed = [cli._parser(cli._called(words)).parse_args(words) for words in map(shlex.split, commands)]
    assert [options.verb for options in parsed] == ["doctor", "plan", "convert"]


def test_the_pages_that_are_named_are_there(capsys: _Output) -> None:
    pages = re.findall(r"docs/[\w/-]+\.md", _text(capsys))
    assert len(pages) == 2
    assert [page for page in pages if not (_ROOT / page).is_file()] == []


def test_the_lines_that_are_shown_train(
    capsys: _Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = _text(capsys).partition("one:\n\n")[2].partition("\n4. ")[0]
    assert textwrap.dedent(shown) == LOOP
    exec(compile(LOOP, "first steps", "exec", dont_inherit=True), {})
    assert "TierStats(" in capsys.readouterr().out
    assert [each for each in tmp_path.rglob("*") if each.is_file()] == []
