"""What a call of ``tierstore plan`` says of ranks."""

from __future__ import annotations

import pytest

from tierstore.cli import main


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--shard", "full"], "--shard: how many ranks there are is not said; give --world-size"),
        (["--ranks-per-host", "8"], "--ranks-per-host: how many ranks there are is not said"),
        (["--world-size", "8", "--write", "ranks-run.yaml"], "no run of several processes is written"),
    ],
)
def test_what_does_not_go_together_is_told_in_one_line(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "a:b", *words]) == 2
    assert says in capsys.readouterr().err
