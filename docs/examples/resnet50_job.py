"""What `train_resnet50` trains on what: the images, the command line, and both read into a `Job`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from arguments import OneLineParser, check_counts, device_of
from digits import handwritten_digits

Batch = tuple[Tensor, Tensor]
"""Images ``(batch, 3, size, size)`` and the class of each, ``(batch,)``."""

CIFAR_RECORD_BYTES = 1 + 3 * 32 * 32  # a label, then red, green and blue planes
CIFAR_MEAN = (0.4914, 0.4822, 0.4465)
CIFAR_DEVIATION = (0.2023, 0.1994, 0.2010)
CROP_PADDING = 4


@dataclass(frozen=True)
class Images:
    """A labelled data set in host memory.

    Attributes:
        name: what it is called in what is printed.
        pixels: ``(count, 3, height, width)`` bytes.
        labels: ``(count,)``.
        is_augmented: whether images may be cropped and mirrored: photographs may, digits may not.
    """

    name: str
    pixels: Tensor
    labels: Tensor
    is_augmented: bool


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same for all runs that are compared."""

    images: Images
    batch_size: int
    image_size: int
    epochs: int
    steps: int | None
    seed: int
    device: torch.device
    max_device_memory: str
    offload: Mapping[str, object]

    def batches(self) -> Iterator[tuple[int, int, Batch]]:
        """Yield epoch and step, counted from 1, with the batch; what does not fill one is left out.

        The same batches every time, from the seed.
        """
        chance = torch.Generator().manual_seed(self.seed)
        count = len(self.images.labels)
        for epoch in range(1, self.epochs + 1):
            order = torch.randperm(count, generator=chance)
            full = order[: count - count % self.batch_size].split(self.batch_size)
            for step, chosen in enumerate(full[: self.steps], start=1):
                pixels = self.images.pixels[chosen].float()
                if self.images.is_augmented:
                    pixels = augmented(pixels, chance)
                yield epoch, step, (prepared(pixels, self.image_size), self.images.labels[chosen])


# ---------------------------------------------------------------------- the images


def coloured_digits() -> Images:
    """Return the 1,797 digits of 8x8 pixels that come with scikit-learn, as images of three channels.

    Raises:
        ValueError: scikit-learn is not installed.
    """
    grey, labels = handwritten_digits()
    pixels = grey.unsqueeze(1).expand(-1, 3, -1, -1).contiguous()
    return Images("scikit-learn's handwritten digits", pixels, labels, is_augmented=False)


def cifar10(path: Path) -> Images:
    """Return every image of the CIFAR-10 binary version in a directory: all ``*.bin`` files, test images too.

    The format is that of https://www.cs.toronto.edu/~kriz/cifar.html: records of a label and 3,072 pixels.

    Raises:
        OSError: the directory cannot be read.
        ValueError: there are no such files, or one is not of that format.
    """
    if not path.is_dir():
        raise ValueError(f"--data {path} is not a directory with the binary files of CIFAR-10")
    files = sorted(path.glob("*.bin"))
    if not files:
        raise ValueError(f"--data {path} has no *.bin files: the binary version of CIFAR-10 is needed")
    records = [_cifar_records(file) for file in files]
    every = torch.cat(records)
    pixels = every[:, 1:].reshape(-1, 3, 32, 32).contiguous()
    return Images("CIFAR-10", pixels, every[:, 0].long(), is_augmented=True)


def _cifar_records(file: Path) -> Tensor:
    content = file.read_bytes()
    if not content or len(content) % CIFAR_RECORD_BYTES:
        raise ValueError(
            f"{file} has {len(content)} bytes, which are no whole number of CIFAR-10 records of "
            f"{CIFAR_RECORD_BYTES} bytes"
        )
    records = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(-1, CIFAR_RECORD_BYTES)
    if int(records[:, 0].max()) > 9:
        raise ValueError(f"{file} has a label above 9: it is not the binary version of CIFAR-10")
    return records


def augmented(pixels: Tensor, chance: torch.Generator) -> Tensor:
    """Cut each image at a random place out of itself with a margin of 4, and mirror every other by chance."""
    count, _, height, width = pixels.shape
    margin = functional.pad(pixels, [CROP_PADDING] * 4)
    tops = torch.randint(2 * CROP_PADDING + 1, (count,), generator=chance).tolist()
    lefts = torch.randint(2 * CROP_PADDING + 1, (count,), generator=chance).tolist()
    mirrors = (torch.rand(count, generator=chance) < 0.5).tolist()
    crops = []
    for image, top, left, is_mirrored in zip(margin, tops, lefts, mirrors, strict=True):
        crop = image[:, top : top + height, left : left + width]
        crops.append(crop.flip(-1) if is_mirrored else crop)
    return torch.stack(crops)


def prepared(pixels: Tensor, size: int) -> Tensor:
    """Resize images of 0 to 255 to ``size`` by ``size``, and normalise each channel."""
    resized = functional.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False)
    mean, deviation = (torch.tensor(each).view(1, 3, 1, 1) for each in (CIFAR_MEAN, CIFAR_DEVIATION))
    return (resized / 255 - mean) / deviation


# ---------------------------------------------------------------------- the command line


def command_line() -> OneLineParser:
    """Return the parser; its defaults take about a minute on two cores."""
    parser = OneLineParser(
        prog="train_resnet50.py",
        description="Train ResNet-50 with a batch whose activations its device cannot hold.",
    )
    add = parser.add_argument
    add("--memory-offload", choices=("ON", "OFF"), default="ON", help="move what does not fit (%(default)s)")
    add("--batch-size", type=int, default=32, metavar="N", help="images in a batch (%(default)s)")
    add("--image-size", type=int, default=64, metavar="N", help="pixels a side (%(default)s)")
    add("--max-device-memory", default="160MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--offload-cpu-size", default="1GB", metavar="SIZE", help="the host tier's quota (%(default)s)")
    add("--offload-disk-size", default="2GB", metavar="SIZE", help="the disk tier's quota (%(default)s)")
    add("--offload-path", type=Path, metavar="DIR", help="the disk tier's directory (a temporary one)")
    add("--epochs", type=int, default=1, metavar="N", help="how often every image is seen (%(default)s)")
    add("--steps", type=int, metavar="N", help="steps of an epoch (all)")
    add("--data", type=Path, metavar="DIR", help="CIFAR-10 binary files (digits that come with scikit-learn)")
    add("--compare", action="store_true", help="train without limits too, and compare every loss")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and batches (%(default)s)")
    parser.add_device()
    return parser


def read_job(arguments: argparse.Namespace, path: Path) -> Job:
    """Make the job of what the command line says, with the disk tier at ``path``.

    Raises:
        OSError: the images cannot be read.
        ValueError: an argument is wrong.
    """
    check_counts(arguments, "batch_size", "image_size", "epochs", "steps")
    device = device_of(arguments.device)
    images = cifar10(arguments.data) if arguments.data else coloured_digits()
    if arguments.batch_size > len(images.labels):
        raise ValueError(f"--batch-size {arguments.batch_size}, but there are {len(images.labels)} images")
    return Job(
        images=images,
        batch_size=arguments.batch_size,
        image_size=arguments.image_size,
        epochs=arguments.epochs,
        steps=arguments.steps,
        seed=arguments.seed,
        device=device,
        max_device_memory=arguments.max_device_memory,
        offload={
            "context": {
                "memory_offload": arguments.memory_offload,
                "max_device_memory": arguments.max_device_memory,
            },
            "offload_config": {
                "offload_param": "cpu",
                "auto_offload": False,
                "offload_cpu_size": arguments.offload_cpu_size,
                "offload_disk_size": arguments.offload_disk_size,
                "offload_path": str(path),
                "host_mem_block_size": "1GB",
                "enable_aio": True,
                "enable_pinned_mem": True,
                "device": arguments.device,
            },
            "swap_config": {"swap": True, "layer_swap": [{"layers": True, "backward_prefetch": 1}]},
        },
    )
