"""The example of Hugging Face: it trains, stops, goes on, and equals the Trainer without us bit for bit."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from train_hugging_face import main

_TINY = ["--device", "emulated", "--layers", "2", "--dim", "64", "--heads", "2", "--steps", "4"]
_TINY += ["--batch-size", "2", "--sequence-length", "16"]
_TINY += ["--max-device-memory", "700KB", "--offload-cpu-size", "512KB", "--offload-disk-size", "32MB"]


def told(capfd: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str]]:
    status = main([*_TINY, *words])
    return status, capfd.readouterr().out.splitlines()


def test_what_the_device_cannot_hold_is_trained_stopped_and_resumed_to_the_same_bits(
    capfd: pytest.CaptureFixture[str],
) -> None:
    status, lines = told(capfd)
    assert status == 0, lines
    assert any("OutOfDeviceMemory" in line for line in lines)
    found = [re.fullmatch(r" +step (\d+): loss ([\d.]+), without ([\d.]+)", line) for line in lines]
    losses = [(int(each[1]), each[2], each[3]) for each in found if each]
    assert [step for step, _, _ in losses] == [1, 2, 3, 4]
    assert all(ours == theirs for _, ours, theirs in losses)
    assert lines[-1] == "every loss and every parameter is equal, bit for bit"


def test_where_it_all_fits_the_example_says_so_and_is_no_success(capfd: pytest.CaptureFixture[str]) -> None:
    status, lines = told(capfd, "--steps", "2", "--max-device-memory", "64MB")
    assert status == 1
    assert any("It fits: nothing to offload" in line for line in lines)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
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
