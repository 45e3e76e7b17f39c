"""What `train_wide_deep` trains on what: the command line, read into a `Job`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from arguments import OneLineParser, check_counts, device_of
from wide_deep import L2, TieredTables, WideDeepShape, halved
from wide_deep_clicks import CriteoBatches, CriteoClicks, shuffled
from wide_deep_criteo import scan
from wide_deep_planted import PlantedBatches, PlantedClicks, Stream
from wide_deep_steps import Batch

COMPUTE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STEPS = 300


@dataclass(frozen=True)
class Clicks:
    """Where batches come from.

    Attributes:
        name: what they are called in what is printed.
        vocabulary: how many ids there are.
        trained: returns the batches of an epoch, which are counted from 1.
        tested: batches that are in no epoch.
        planted: what is known to be the best answer to a batch, as logits; ``None``: nobody knows.
    """

    name: str
    vocabulary: int
    trained: Callable[[int], Dataset[Batch]]
    tested: Dataset[Batch]
    planted: Callable[[Batch], Tensor] | None


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same for all runs that are compared.

    Attributes:
        clicks: what is learned.
        shape: the model's.
        l2: the penalty on the deep table; 0: none, and gradients name the rows that they are of.
        epochs: how often the clicks are gone through.
        steps: of an epoch; ``None``: all.
        workers: processes that make batches; 0: this one does.
        seed: of the parameters.
        device: where the model computes.
        tables: how those are made whose rows lie in tiers; with a penalty, PyTorch's are placed on the host.
        max_device_memory: its budget.
        offload: the configuration of the run.
    """

    clicks: Clicks
    shape: WideDeepShape
    l2: float
    epochs: int
    steps: int | None
    workers: int
    seed: int
    device: torch.device
    tables: TieredTables
    max_device_memory: str
    offload: Mapping[str, object]

    def batches(self, epoch: int) -> Iterator[Batch]:
        """Yield the batches of an epoch, on the host."""
        batches = self.clicks.trained(epoch)
        if self.steps is not None and self.steps < len(batches):  # type: ignore[arg-type]  # ours have lengths
            batches = Subset(batches, range(self.steps))
        yield from self._loaded(batches)

    def tested(self) -> Iterator[Batch]:
        """Yield the batches that are tested on."""
        yield from self._loaded(self.clicks.tested)

    def _loaded(self, batches: Dataset[Batch]) -> DataLoader[Batch]:
        start = "spawn" if self.workers else None
        return DataLoader(batches, batch_size=None, num_workers=self.workers, multiprocessing_context=start)


# ---------------------------------------------------------------------- the command line


def command_line() -> OneLineParser:
    """Return the parser; its defaults take about a minute on two cores."""
    parser = OneLineParser(
        prog="train_wide_deep.py",
        description="Train Wide&Deep, whose tables hold nearly all of its parameters.",
    )
    add = parser.add_argument
    add("--data", type=Path, nargs="+", metavar="FILE", help="Criteo's lines, such as train.txt (generated)")
    add("--record-lines", type=int, default=1000, metavar="N", help="lines set aside together (%(default)s)")
    add("--vocabulary", type=int, metavar="N", help="ids (200000; as many as the files have)")
    add("--zipf", type=float, default=1.05, metavar="X", help="exponent of generated ids (%(default)s)")
    add("--dimension", type=int, default=16, metavar="N", help="the deep table's width (%(default)s)")
    add(
        "--width",
        type=int,
        default=256,
        metavar="N",
        help="the first hidden layer's, halved thrice (%(default)s)",
    )
    add(
        "--compute",
        choices=tuple(COMPUTE_DTYPES),
        default="float32",
        help="of the hidden layers (%(default)s)",
    )
    add("--dense", action="store_true", help="gradients for whole tables, and the penalty on the deep one")
    add("--batch-size", type=int, default=1024, metavar="N", help="lines in a batch (%(default)s)")
    add("--epochs", type=int, default=1, metavar="N", help="how often all lines are seen (%(default)s)")
    add("--steps", type=int, metavar="N", help=f"steps of an epoch ({STEPS}; all that the files have)")
    add(
        "--test-lines",
        type=int,
        default=16_384,
        metavar="N",
        help="generated lines for the AUC (%(default)s)",
    )
    add("--workers", type=int, default=0, metavar="N", help="processes that read or generate (%(default)s)")
    add("--max-device-memory", default="64MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--offload-cpu-size", default="1GB", metavar="SIZE", help="the host tier's quota (%(default)s)")
    add("--offload-disk-size", default="2GB", metavar="SIZE", help="the disk tier's quota (%(default)s)")
    add("--offload-path", type=Path, metavar="DIR", help="the disk tier's directory (a temporary one)")
    add("--compare", action="store_true", help="train with all in memory too; compare every loss and the AUC")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and lines (%(default)s)")
    parser.add_device()
    return parser


def read_job(arguments: argparse.Namespace, path: Path) -> Job:
    """Make the job of what the command line says, with the disk tier at ``path``.

    Raises:
        OSError: the files cannot be read.
        ValueError: an argument is wrong, or a line of the files.
    """
    check_counts(
        arguments, "record_lines", "dimension", "width", "batch_size", "epochs", "steps", "test_lines"
    )
    if arguments.workers < 0:
        raise ValueError(f"--workers must be at least 0, not {arguments.workers}")
    device = device_of(arguments.device)
    clicks = criteo_clicks(arguments) if arguments.data else generated_clicks(arguments)
    shape = WideDeepShape(
        vocabulary=clicks.vocabulary,
        dimension=arguments.dimension,
        hidden=halved(arguments.width),
        compute_dtype=COMPUTE_DTYPES[arguments.compute],
    )
    return Job(
        clicks=clicks,
        shape=shape,
        l2=L2 if arguments.dense else 0.0,
        epochs=arguments.epochs,
        steps=arguments.steps,
        workers=arguments.workers,
        seed=arguments.seed,
        device=device,
        tables=TieredTables(arguments.seed),
        max_device_memory=arguments.max_device_memory,
        offload={
            "context": {"memory_offload": "ON", "max_device_memory": arguments.max_device_memory},
            "offload_config": {
                "offload_cpu_size": arguments.offload_cpu_size,
                "offload_disk_size": arguments.offload_disk_size,
                "offload_path": str(path),
                "device": arguments.device,
            },
        },
    )


def generated_clicks(arguments: argparse.Namespace) -> Clicks:
    """Return clicks that a planted model has drawn."""
    vocabulary = 200_000 if arguments.vocabulary is None else arguments.vocabulary
    planted = PlantedClicks(vocabulary, arguments.batch_size, arguments.zipf, arguments.seed)
    steps = arguments.steps or STEPS
    tested = -(-arguments.test_lines // arguments.batch_size)
    return Clicks(
        planted.name,
        vocabulary,
        lambda epoch: PlantedBatches(planted, Stream(epoch, steps)),
        PlantedBatches(planted, Stream(0, tested)),
        planted.planted_logits,
    )


def criteo_clicks(arguments: argparse.Namespace) -> Clicks:
    """Return the clicks of files, which are read once to count what they hold."""
    found = CriteoClicks.of(arguments.data, scan(arguments.data, arguments.record_lines, arguments.workers))
    size, wanted = found.vocabulary.size, arguments.vocabulary
    if wanted is not None and wanted < size:
        raise ValueError(f"--vocabulary {wanted}, but the files have {size} ids")
    lines = sum(record.lines for record in found.trained)
    if lines < arguments.batch_size:
        raise ValueError(f"--batch-size {arguments.batch_size}, but there are {lines} lines to train on")

    def trained(epoch: int) -> CriteoBatches:
        records = shuffled(found.trained, arguments.seed, epoch)
        return CriteoBatches(found, records, arguments.batch_size, is_rest_left_out=True)

    tested = CriteoBatches(found, found.tested, arguments.batch_size, is_rest_left_out=False)
    name = f"{lines:,} lines of {', '.join(path.name for path in arguments.data)}"
    return Clicks(name, wanted or size, trained, tested, None)
