"""The example of Lightning: it trains, resumes bit for bit, and equals Lightning without us."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("lightning")

from train_lightning import main

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*number of training batches", "ignore:.*`isinstance.treespec, LeafSpec.` is deprecated"
)

_TINY = ["--device", "emulated", "--width", "64", "--depth", "2", "--batch-size", "250"]
_TINY += ["--max-device-memory", "640KB", "--offload-cpu-size", "144KB", "--offload-disk-size", "16MB"]


def told(capfd: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert main([*_TINY, *words]) == 0
    return capfd.readouterr().out.splitlines()


def losses(lines: list[str]) -> list[str]:
    return [line for line in lines if re.match(r"epoch: \d+ step: \d+, loss is", line)]


def test_every_loss_is_that_of_lightning_alone(capfd: pytest.CaptureFixture[str]) -> None:
    lines = told(capfd, "--compare")
    assert "12 of 12 losses are equal, bit for bit" in lines
    assert any(line.startswith("disk: at most ") for line in lines)


def test_what_goes_on_from_a_checkpoint_ends_as_what_was_not_ended(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = told(capfd, "--epochs", "3")
    told(capfd, "--epochs", "2", "--checkpoints", str(tmp_path))
    on = told(capfd, "--epochs", "3", "--checkpoints", str(tmp_path), "--resume")
    assert losses(on) == losses(whole)
    assert on[-1] == whole[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resume"], "--resume needs --checkpoints"),
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--max-device-memory", "much"], "max_device_memory"),
        (["--device", "abacus"], "--device must be"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*_TINY, *words])
    assert ended.value.code == 2
    assert said in capfd.readouterr().err
