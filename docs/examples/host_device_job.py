"""What `train_host_device` trains on what: images, the share of a process, and the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from arguments import OneLineParser, check_counts, device_of
from digits import handwritten_digits
from host_device import PIXELS
from idx_files import read_idx

MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's pixels


@dataclass(frozen=True)
class Images:
    """Labelled images in host memory.

    Attributes:
        name: what they are called in what is printed.
        pixels: ``(count, 28, 28)`` bytes.
        labels: ``(count,)``, 0 to 9.
    """

    name: str
    pixels: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Share:
    """Which part of the work is this process's; ``torchrun`` says it.

    Attributes:
        rank: its number.
        processes: how many there are.
        on_machine: its number among those of this machine.
    """

    rank: int
    processes: int
    on_machine: int

    @classmethod
    def of_environment(cls) -> Share:
        """Read what ``torchrun`` has set; without it there is one process."""
        values = (int(os.environ.get(name, default)) for name, default in _VARIABLES)
        return cls(*values)


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same for all runs that are compared."""

    images: Images
    share: Share
    batch_size: int
    epochs: int
    told_every: int
    learning_rate: float
    seed: int
    device: torch.device
    is_placed: bool
    offload: Mapping[str, object]

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this process's batches of an epoch: images ``(batch, 1, 28, 28)`` and labels, on the host.

        Every process has as many, and they are the same every time, from the seed.
        """
        chance = torch.Generator().manual_seed(self.seed + epoch)
        count = len(self.images.labels)
        order = torch.randperm(count, generator=chance)[: count - count % self.share.processes]
        for chosen in order[self.share.rank :: self.share.processes].split(self.batch_size):
            pixels = self.images.pixels[chosen].unsqueeze(1)
            yield (pixels / 255 - MEAN) / DEVIATION, self.images.labels[chosen]


# ---------------------------------------------------------------------- the images


def enlarged_digits() -> Images:
    """Return scikit-learn's digits, enlarged to the size of MNIST's.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    pixels, labels = handwritten_digits()
    sides = (PIXELS, PIXELS)
    larger = functional.interpolate(pixels.unsqueeze(1).float(), size=sides, mode="bilinear")
    return Images("scikit-learn's handwritten digits", larger.squeeze(1).round().to(torch.uint8), labels)


def mnist(folder: Path) -> Images:
    """Return the training images of MNIST from the files that are published, compressed or not.

    Raises:
        OSError: a file cannot be read.
        ValueError: there is none, one is not of its format, or they do not belong together.
    """
    found = {}
    for kind, dimensions in (("images", 3), ("labels", 1)):
        names = [
            f"train-{kind}{between}idx{dimensions}-ubyte{end}" for between in "-." for end in ("", ".gz")
        ]
        paths = [folder / name for name in names if (folder / name).is_file()]
        if not paths:
            raise ValueError(f"--data {folder} has no {names[0]}: the files of MNIST are needed")
        found[kind] = read_idx(paths[0], dimensions)
    pixels, labels = found["images"], found["labels"].long()
    if pixels.shape[1:] != (PIXELS, PIXELS):
        raise ValueError(
            f"--data {folder}: images of {' x '.join(map(str, pixels.shape[1:]))} pixels, not 28 x 28"
        )
    if len(pixels) != len(labels):
        raise ValueError(f"--data {folder}: {len(pixels)} images, but {len(labels)} labels")
    if int(labels.max()) > 9:
        raise ValueError(f"--data {folder}: a label is {int(labels.max())}; accepted: 0 to 9")
    return Images("MNIST", pixels, labels)


# ---------------------------------------------------------------------- the command line


def command_line() -> OneLineParser:
    """Return the parser; its defaults take some seconds."""
    parser = OneLineParser(
        prog="train_host_device.py", description="Train a net of which some modules compute on the host."
    )
    add = parser.add_argument
    add("--data", type=Path, metavar="DIR", help="MNIST's files (digits that come with scikit-learn)")
    add("--no-placement", action="store_true", help="let all modules compute on the device")
    add("--batch-size", type=int, default=32, metavar="N", help="images in a process's batch (%(default)s)")
    add("--epochs", type=int, default=5, metavar="N", help="how often every image is seen (%(default)s)")
    add("--told-every", type=int, default=100, metavar="N", help="steps between printed losses (%(default)s)")
    add("--learning-rate", type=float, default=1e-2, metavar="X", help="SGD's (%(default)s)")
    add("--max-device-memory", default="64MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--offload-cpu-size", default="256MB", metavar="SIZE", help="the host tier's quota (%(default)s)")
    add("--offload-disk-size", default="1GB", metavar="SIZE", help="the disk tier's quota (%(default)s)")
    add("--offload-path", type=Path, metavar="DIR", help="the disk tier's directory (a temporary one)")
    add("--compare", action="store_true", help="train with plain PyTorch too, and compare every loss")
    add("--seed", type=int, default=1, metavar="N", help="of parameters and batches (%(default)s)")
    parser.add_device()
    return parser


def read_job(arguments: argparse.Namespace, path: Path) -> Job:
    """Make the job of what the command line and ``torchrun`` say, with the disk tier at ``path``.

    Raises:
        OSError: the images cannot be read.
        ValueError: an argument is wrong.
    """
    check_counts(arguments, "batch_size", "epochs", "told_every")
    share = Share.of_environment()
    name = arguments.device if arguments.device != "cuda" else f"cuda:{share.on_machine}"
    device = device_of(name)
    images = mnist(arguments.data) if arguments.data else enlarged_digits()
    if len(images.labels) < share.processes:
        raise ValueError(f"{share.processes} processes, but {len(images.labels)} images")
    return Job(
        images=images,
        share=share,
        batch_size=arguments.batch_size,
        epochs=arguments.epochs,
        told_every=arguments.told_every,
        learning_rate=arguments.learning_rate,
        seed=arguments.seed,
        device=device,
        is_placed=not arguments.no_placement,
        offload={
            "context": {"memory_offload": "ON", "max_device_memory": arguments.max_device_memory},
            "offload_config": {
                "offload_cpu_size": arguments.offload_cpu_size,
                "offload_disk_size": arguments.offload_disk_size,
                "offload_path": str(path),
                "device": name,
            },
        },
    )
