"""A table on a durable disk is that of its last checkpoint, whatever it is killed at."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.fault.table_victim import KINDS
from tests.forked_programs import run_program
from tests.sampling import IS_CI

_TIMES = 1 if IS_CI else 3  # a table is killed at each of them


@pytest.mark.slow
def test_a_killed_table_is_the_one_of_its_last_checkpoint(tmp_path: Path) -> None:
    done = run_program("tests.fault.table_victim", str(tmp_path), str(_TIMES * len(KINDS)), "1")
    assert done.returncode == 0, done.stderr
    assert ast.literal_eval(done.stdout) == [(kind, _TIMES) for kind in sorted(KINDS)]
