"""Files that ``tierstore plan`` is given: read, or refused in one line that says which file it was."""

from __future__ import annotations

import contextlib
import io
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.hostile_machines import MACHINE, MACHINES
from tests.hostile_programs import PROGRAM, PROGRAMS
from tests.hostile_yaml import DOCUMENTS
from tests.property.test_config_yaml import TOKENS
from tierstore.cli import main
from tierstore.planning.chrome import program_to_chrome

_TRACE: Final = program_to_chrome(PROGRAM)
_RIGHT: Final[Mapping[str, str]] = {
    "--program": _TRACE,
    "--machine": MACHINE,
    "--config": "offload_config: {offload_param: cpu, max_device_memory: 1GiB}\n",
    "--placement": "inputs: device\nahead: {}\n",
}
"""What each option takes."""

_HOSTILE: Final = (*MACHINES.values(), *PROGRAMS.values(), *DOCUMENTS.values())


@st.composite
def contents(draw: st.DrawFn) -> bytes:
    """Draw what is nothing in particular, what is wrong for one of them, or nearly right for one."""
    match draw(st.sampled_from(["bytes", "tokens", "hostile", "nearly"])):
        case "bytes":
            return draw(st.binary(max_size=60))
        case "tokens":
            return "".join(draw(st.lists(st.sampled_from(TOKENS), max_size=20))).encode()
        case "hostile":
            return draw(st.sampled_from(_HOSTILE))[0].encode("utf-8", "surrogateescape")
        case _:
            right = draw(st.sampled_from([*_RIGHT.values()])).encode()
            begin = draw(st.integers(0, len(right)))
            end = draw(st.integers(begin, min(len(right), begin + 20)))
            return right[:begin] + draw(st.binary(max_size=4)) + right[end:]


def _called(files: Mapping[str, Path]) -> tuple[int, str]:
    """Call the command; return its exit code, and what it said of what is wrong."""
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(["plan", *(f"{option}={path}" for option, path in files.items())])
    return code, err.getvalue()


@pytest.mark.parametrize("option", _RIGHT)
@given(content=contents())
@example(content=_RIGHT["--placement"].encode())
@example(content=_RIGHT["--config"].encode())
@settings(deadline=None)
def test_a_file_is_read_or_named_in_one_line(option: str, content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = {each: Path(folder) / f"given{each}" for each in ("--program", "--machine", option)}
        for each, path in files.items():
            path.write_text(_RIGHT[each], encoding="utf-8")
        files[option].write_bytes(content)
        code, said = _called(files)
    if code != 2:
        assert code in (0, 1)
        assert "Traceback" not in said
        return
    (line,) = said.splitlines()
    assert line.startswith("tierstore plan: ")
    assert len(line) < 20_000
    is_for_another_run = "it does not fit this run" in line  # there is one placement: nothing else is meant
    assert f"given{option}" in line or is_for_another_run


def test_what_each_option_takes_is_taken(tmp_path: Path) -> None:
    files = {option: tmp_path / option for option in _RIGHT}
    for option, path in files.items():
        path.write_text(_RIGHT[option], encoding="utf-8")
    code, said = _called(files)
    assert (code, said) == (0, "")
