"""Programs in JSON: read as they were written, or refused as promised."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import Judge, see_that_it_is_short
from tests.hostile_programs import PROGRAM, PROGRAMS
from tierstore.errors import ConfigError
from tierstore.planning.program_text import program_from_json, program_to_json

_MOST_CHARS = 4000

SEEDS = {
    "right": program_to_json(PROGRAM).encode(),
    **{name: text[:_MOST_CHARS].encode() for name, (text, _) in PROGRAMS.items()},
}
TOKENS = (
    *(b'"version"', b'"texts"', b'"data"', b'"moments"', b'"uses"', b'"work"', b'"units"', b'"key"'),
    *(b'"nbytes"', b'"kind"', b'"phase"', b'"does"', b'"gradients"', b'"layer"', b"make", b"end", b"read"),
    *(b"NaN", b"Infinity", b"1e999", b"-1", b"9223372036854775808", b"null", b"true", b"[]", b"{}", b","),
)


@contextlib.contextmanager
def prepared(directory: Path) -> Iterator[Judge]:
    del directory

    def judge(content: bytes) -> None:
        try:
            program = program_from_json(content.decode("utf-8", "surrogateescape"))
        except ConfigError as refused:
            see_that_it_is_short(refused)
            return
        assert program_from_json(program_to_json(program)) == program

    yield judge
