"""The ResNet-50 example: its model, its images, its budget, and all of it in small."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from resnet50 import STAGES, ResNet, pad_same
from resnet50_job import (
    CIFAR_RECORD_BYTES,
    augmented,
    cifar10,
    coloured_digits,
    command_line,
    prepared,
    read_job,
)
from train_resnet50 import main

TINY = [
    *("--device", "emulated", "--batch-size", "16", "--image-size", "32", "--steps", "3"),
    *("--max-device-memory", "100MB", "--offload-cpu-size", "400MB", "--offload-disk-size", "1GB"),
]


def write_cifar(path: Path, counts: tuple[int, ...], label: int = 3) -> None:
    path.mkdir()
    for number, count in enumerate(counts):
        record = bytes([label, *(i % 251 for i in range(CIFAR_RECORD_BYTES - 1))])
        (path / f"data_batch_{number}.bin").write_bytes(record * count)


# ---------------------------------------------------------------------- the model


def test_the_model_has_the_parameters_of_resnet_50_with_ten_classes() -> None:
    convolutions = sum(p.numel() for p in ResNet().parameters() if p.dim() == 4)
    assert convolutions == 23_454_912  # all of ResNet-50's, as torchvision counts them too
    assert sum(p.numel() for p in ResNet().parameters()) == 23_454_912 + 2 * 26_560 + 2048 * 10 + 10


def test_there_is_a_layer_for_the_stem_and_for_every_bottleneck() -> None:
    assert len(ResNet().layers) == 1 + sum(STAGES) == 17


@pytest.mark.parametrize(("size", "expected"), [(224, 7), (64, 2), (32, 1), (33, 2)])
def test_every_stage_halves_the_size_rounded_up(size: int, expected: int) -> None:
    with torch.no_grad():
        features = ResNet((1, 1, 1, 1)).eval().layers(torch.zeros(1, 3, size, size))
    assert features.shape == (1, 2048, expected, expected)


def test_odd_padding_comes_after_rather_than_before() -> None:
    x = torch.ones(1, 1, 224, 224)
    padded = pad_same(x, 7, 2)
    assert padded.shape[-2:] == (229, 229)
    assert padded[0, 0, 1, 1] == 0
    assert padded[0, 0, 2, 2] == 1  # 2 before, 3 after
    assert padded[0, 0, -3, -3] == 0
    assert pad_same(x, 1, 1) is x
    assert pad_same(x, 3, 2).shape[-1] == 225


def test_batch_norms_keep_most_of_their_running_statistics() -> None:
    norm = ResNet().layers[0].bn1
    assert isinstance(norm, torch.nn.BatchNorm2d)
    assert (norm.momentum, norm.eps) == (0.01, 1e-5)
    assert 0.05 < float(norm.weight.detach().abs().max()) <= 0.07
    assert not norm.bias.any()


# ---------------------------------------------------------------------- the images


def test_digits_are_images_of_three_channels_and_ten_classes() -> None:
    images = coloured_digits()
    assert images.pixels.shape == (1797, 3, 8, 8)
    assert set(images.labels.tolist()) == set(range(10))
    assert int(images.pixels.max()) == 255


def test_all_files_of_cifar_are_read_and_a_rest_of_a_batch_is_left_out(tmp_path: Path) -> None:
    write_cifar(tmp_path / "cifar", (5, 6))
    words = ["--device", "emulated", "--data", str(tmp_path / "cifar"), "--batch-size", "4", "--epochs", "2"]
    job = read_job(command_line().parse_args(words), tmp_path)
    batches = list(job.batches())
    assert [(epoch, step) for epoch, step, _ in batches] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(
        images.shape == (4, 3, 64, 64) and labels.tolist() == [3] * 4 for _, _, (images, labels) in batches
    )


def test_the_same_seed_gives_the_same_batches(tmp_path: Path) -> None:
    job = read_job(command_line().parse_args(["--device", "emulated", "--steps", "2"]), tmp_path)
    first, again = list(job.batches()), list(job.batches())
    assert all(torch.equal(a[2][0], b[2][0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][2][0], first[1][2][0])


def test_a_crop_is_a_part_of_its_image_and_may_be_mirrored() -> None:
    pixels = torch.arange(1, 1 + 3 * 32 * 32).view(1, 3, 32, 32).float().repeat(64, 1, 1, 1)
    cropped = augmented(pixels, torch.Generator().manual_seed(0))
    assert cropped.shape == pixels.shape
    known = set(pixels[0].flatten().tolist()) | {0.0}
    assert set(cropped.flatten().tolist()) <= known
    steps = {float(image[0, 16, 17] - image[0, 16, 16]) for image in cropped}
    assert steps == {1.0, -1.0}


def test_prepared_images_have_the_size_that_was_asked_for_and_are_normalised() -> None:
    grey = prepared(torch.full((2, 3, 8, 8), 255 * 0.4822), 24)
    assert grey.shape == (2, 3, 24, 24)
    torch.testing.assert_close(grey[:, 1], torch.zeros(2, 24, 24), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("content", "hint"),
    [(b"", "no whole number"), (b"\x00" * 100, "no whole number"), (b"\x0b" * CIFAR_RECORD_BYTES, "above 9")],
)
def test_a_file_of_another_format_is_named(tmp_path: Path, content: bytes, hint: str) -> None:
    (tmp_path / "data_batch_1.bin").write_bytes(content)
    with pytest.raises(ValueError, match=hint) as caught:
        cifar10(tmp_path)
    assert "data_batch_1.bin" in str(caught.value)


# ---------------------------------------------------------------------- all of it


def test_off_runs_out_of_device_memory_and_says_what_there_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--memory-offload", "OFF"]) == 1
    error = capsys.readouterr().err
    assert "out of device memory" in error
    assert "asked for" in error
    assert "in use of a budget of 100.0 MiB" in error


def test_on_trains_within_the_budget_and_every_loss_is_equal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, "--compare", "--offload-path", str(tmp_path / "tiers")]) == 0
    lines = capsys.readouterr().out.splitlines()
    steps = [line for line in lines if line.startswith("epoch: 1 step: ")]
    assert len(steps) == 6
    assert steps[:3] == steps[3:]
    assert all(", loss is " in line for line in steps)
    assert "3 of 3 losses are equal, bit for bit" in lines
    assert any(line.startswith("device -> host: ") for line in lines)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--batch-size", "0"], "--batch-size must be at least 1"),
        (["--steps", "-1"], "--steps must be at least 1"),
        (["--batch-size", "5000"], "1797 images"),
        (["--data", "/no/such/folder"], "not a directory"),
        (["--max-device-memory", "4XB"], "'4XB'"),
        (["--device", "tpu"], "emulated, cuda or cuda:N"),
        (["--memory-offload", "MAYBE"], "MAYBE"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_exit_code_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--device", "emulated", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line
