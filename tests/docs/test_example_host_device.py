"""The host and device example: its images, its net, and all of it in one process and in several."""

from __future__ import annotations

import gzip
import os
import re
from pathlib import Path

import pytest
import torch
from torch import distributed

from host_device import PLACEMENT, Network
from host_device_job import MEAN, Job, Share, command_line, enlarged_digits, mnist, read_job
from idx_files import read_idx
from tests.docs.torchruns import torchrun
from tierstore.testing.memory import DeviceBudget
from tierstore.training import offload
from train_host_device import main

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
NODES = [
    *("Default/layer1/MatMul-op3", "Default/layer1/Add-op4"),
    *("Default/layer2/MatMul-op7", "Default/layer2/Add-op8"),
    *("Default/layer3/MatMul-op11", "Default/layer3/Add-op12"),
]
TINY = [
    *("--device", "emulated", "--epochs", "1", "--told-every", "20"),
    *("--max-device-memory", "8MB", "--offload-cpu-size", "32MB", "--offload-disk-size", "64MB"),
]


def idx(sizes: tuple[int, ...], content: bytes) -> bytes:
    return bytes([0, 0, 8, len(sizes)]) + b"".join(size.to_bytes(4, "big") for size in sizes) + content


def write_mnist(folder: Path, count: int, end: str = "", between: str = "-") -> None:
    folder.mkdir(exist_ok=True)
    pixels = bytes(n % 251 for n in range(count * 784))
    write = (lambda path, content: path.write_bytes(gzip.compress(content))) if end else Path.write_bytes
    write(folder / f"train-images{between}idx3-ubyte{end}", idx((count, 28, 28), pixels))
    write(
        folder / f"train-labels{between}idx1-ubyte{end}", idx((count,), bytes(n % 10 for n in range(count)))
    )


def job_of(tmp_path: Path, *words: str) -> Job:
    return read_job(command_line().parse_args([*TINY, *words]), tmp_path)


# ---------------------------------------------------------------------- the images


@pytest.mark.parametrize(("end", "between"), [("", "-"), ("", "."), (".gz", "-")])
def test_mnist_is_read_under_the_names_that_it_has(end: str, between: str, tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 12, end, between)
    images = mnist(tmp_path / "mnist")
    assert images.pixels.shape == (12, 28, 28)
    assert images.pixels.flatten()[:300].tolist() == [n % 251 for n in range(300)]
    assert images.labels.tolist() == [*range(10), 0, 1]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b"", "begins with nothing, not 00000803"),
        (b"\0\0\x08\x01" + bytes(12), "begins with 00000801, not 00000803"),
        (idx((1, 2, 2), b"1234")[:10], "begins with 00000803"),
        (b"\0\0\x0d\x03" + bytes(12), "begins with 00000d03"),
        (idx((1, 2, 2), b"123"), "says that it has 1 x 2 x 2 = 4 bytes behind its header, and has 3"),
        (idx((1, 2, 2), b"12345"), "and has more"),
        (idx((0, 2, 2), b""), "says that it has 0 x 2 x 2 bytes"),
        (idx((2**32 - 1, 2**32 - 1, 2**32 - 1), b""), "accepted: 1 to"),
    ],
)
@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_file_that_is_not_what_it_says_is_named(
    content: bytes, fault: str, is_compressed: bool, tmp_path: Path
) -> None:
    path = tmp_path / ("images.gz" if is_compressed else "images")
    path.write_bytes(gzip.compress(content) if is_compressed else content)
    with pytest.raises(ValueError, match=fault) as caught:
        read_idx(path, 3)
    assert str(path) in str(caught.value)


def test_a_compressed_file_that_ends_early_is_named(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(idx((9, 28, 28), os.urandom(9 * 784)))[:-100])
    with pytest.raises(ValueError, match=r"images\.gz ends in the midst"):
        read_idx(path, 3)
    path.write_bytes(b"not compressed at all")
    with pytest.raises(OSError, match="gzip"):
        read_idx(path, 3)


@pytest.mark.parametrize(
    ("name", "content", "fault"),
    [
        ("train-images-idx3-ubyte", idx((3, 8, 8), bytes(192)), "8 x 8 pixels, not 28 x 28"),
        ("train-labels-idx1-ubyte", idx((4,), bytes(4)), "3 images, but 4 labels"),
        ("train-labels-idx1-ubyte", idx((3,), bytes([1, 2, 10])), "a label is 10; accepted: 0 to 9"),
        ("train-labels-idx1-ubyte", None, "has no train-labels-idx1-ubyte"),
    ],
)
def test_files_that_do_not_belong_together_are_refused(
    name: str, content: bytes | None, fault: str, tmp_path: Path
) -> None:
    write_mnist(tmp_path, 3)
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=fault):
        mnist(tmp_path)


def test_digits_are_enlarged_to_the_size_of_mnist_s() -> None:
    images = enlarged_digits()
    assert images.pixels.shape == (1797, 28, 28)
    assert images.pixels.dtype == torch.uint8
    assert int(images.pixels.max()) == 255
    assert set(images.labels.tolist()) == set(range(10))


def test_processes_share_the_images_of_an_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mnist(tmp_path / "mnist", 50)
    seen = []
    for rank in range(4):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "4")
        job = job_of(tmp_path, "--data", str(tmp_path / "mnist"), "--batch-size", "5")
        batches = list(job.batches(0))
        assert [len(labels) for _, labels in batches] == [5, 5, 2]
        assert not torch.equal(batches[0][0], next(iter(job.batches(1)))[0])
        seen += [image for images, _ in batches for image in images]
    assert len(seen) == 48
    assert len({tuple(image.flatten().tolist()) for image in seen}) == 48


def test_pixels_are_normalised(tmp_path: Path) -> None:
    write_mnist(tmp_path / "mnist", 10)
    ((images, _),) = job_of(tmp_path, "--data", str(tmp_path / "mnist")).batches(0)
    assert images.shape == (10, 1, 28, 28)
    assert float(images.min()) == pytest.approx(-MEAN / 0.3081)
    assert float(images.max()) == pytest.approx((250 / 255 - MEAN) / 0.3081)


# ---------------------------------------------------------------------- the net


def test_the_net_has_the_names_and_shapes_of_the_original() -> None:
    shapes = {name: tuple(parameter.shape) for name, parameter in Network().named_parameters()}
    assert shapes == {
        "layer1.weight": (784, 512),
        "layer1.bias": (512,),
        "layer2.weight": (512, 512),
        "layer2.bias": (512,),
        "layer3.weight": (512, 10),
        "layer3.bias": (10,),
    }
    operators = [name for name, _ in Network().named_modules() if name.count(".") == 1]
    assert operators == [f"layer{number}.{name}" for number in (1, 2, 3) for name in ("matmul", "add")]


# ---------------------------------------------------------------------- all of it


@pytest.mark.parametrize("words", [[], ["--no-placement"]])
def test_it_trains_as_plain_pytorch_does(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *words, "--compare", "--offload-path", str(tmp_path / "tiers")]) == 0
    text = capsys.readouterr().out
    told = re.findall(r"^epoch: 0, step: (\d+), loss is (2\.\d+)$", text, re.MULTILINE)
    assert [step for step, _ in told] == ["0", "20", "40"] * 2
    assert told[:3] == told[3:]
    assert float(told[0][1]) == pytest.approx(2.303, abs=0.01)
    assert float(told[2][1]) < float(told[0][1]) - 0.005
    assert "57 of 57 losses are equal, bit for bit" in text
    nodes = re.findall(r"^\[INFO\] primitive target .*, node name: (.*)$", text, re.MULTILINE)
    assert nodes == ([] if words else NODES)
    assert text.count("primitive target does not match backend: GPU, primitive_target: CPU, ") == len(nodes)


def test_what_computes_on_the_host_is_never_on_the_device(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, job = Network(), job_of(tmp_path)
    optimizer = torch.optim.SGD(net.parameters(), 1e-2)
    weight_bytes = net.layer2.weight.nbytes
    with (
        DeviceBudget(weight_bytes, mixing="raise"),
        offload(net, optimizer, job.offload, placement=PLACEMENT) as run,
    ):
        images, labels = next(job.batches(0))
        torch.nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        peak = run.store.stats().tiers["device"].peak_charged_bytes
    assert 0 < peak < weight_bytes / 2


@pytest.mark.skipif(not distributed.is_available(), reason="PyTorch was built without it")
@pytest.mark.parametrize(
    "processes", [2, pytest.param(8, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_under_torchrun_every_process_equals_plain_data_parallelism(tmp_path: Path, processes: int) -> None:
    write_mnist(tmp_path / "mnist", 64 * processes)
    words = ["--compare", "--data", str(tmp_path / "mnist"), "--batch-size", "8", "--told-every", "4"]
    words += ["--offload-path", str(tmp_path / "tiers"), "--offload-cpu-size", f"{16 * processes}MB"]
    launcher = ["--standalone", "--nproc-per-node", str(processes), "--redirects", "3"]
    launcher += ["--log-dir", str(tmp_path / "log"), str(EXAMPLES / "train_host_device.py")]
    torchrun((tmp_path, [*launcher, *TINY, *words]))
    outputs = [path.read_text() for path in sorted((tmp_path / "log").rglob("stdout.log"))]
    assert len(outputs) == processes
    for rank, text in enumerate(outputs):
        assert f"process {rank} of {processes} learns MNIST" in text
        assert "of offload_cpu_size 16.0 MiB" in text  # its share
        assert "8 of 8 losses are equal, bit for bit" in text
        assert all(f"node name: {node}\n" in text for node in NODES)
    assert len({tuple(re.findall("loss is .*", text)) for text in outputs}) == processes


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert Share.of_environment() == Share(0, 1, 0)


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--epochs", "0"], "--epochs must be at least 1"),
        (["--data", "/no/such/folder"], "/no/such/folder has no train-images-idx3-ubyte"),
        (["--max-device-memory", "4XB"], "'4XB'"),
        (["--device", "tpu"], "emulated, cuda or cuda:N"),
    ],
)
def test_a_wrong_word_is_answered_in_one_line_with_exit_code_2(
    words: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*TINY, *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert hint in line


def test_a_device_too_small_is_a_failure_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--no-placement", "--max-device-memory", "64KB"]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train_host_device")]
    assert "CapacityError" in line
