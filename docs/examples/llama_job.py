"""What `train_llama` trains on what: the text, the command line, and both read into a `Job`.

Nothing in here is about offloading but `read_job`, which fills in an ``OffloadConfig``.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import tierstore as ts
from arguments import OneLineParser, check_counts, device_of
from llama import LlamaConfig

Batch = tuple[Tensor, Tensor]
"""Tokens and the tokens that follow them, both ``(batch, length)``."""

_BYTES_PER_PARAMETER = 4 * 4  # float32: the parameter, its gradient, AdamW's two moments


@dataclass(frozen=True)
class Job:
    """What is trained on what: the same for all runs that are compared."""

    shape: LlamaConfig
    seed: int
    batches: Sequence[Batch]
    text_name: str
    device: torch.device
    config: ts.OffloadConfig

    @property
    def budget_bytes(self) -> int:
        """The most that the program may have on the device."""
        return self.config.max_device_bytes or 0

    @property
    def state_bytes(self) -> int:
        """What parameters, gradients and AdamW's moments take together."""
        return _BYTES_PER_PARAMETER * self.shape.parameters


# ---------------------------------------------------------------------- the text


def documentation_text() -> bytes:
    """Return the help texts of the running Python: about 460 KB of English prose and code.

    They are what ``help("assert")`` shows.  They belong to the interpreter (licence: PSF-2.0) and are
    read from it at run time; no copy is kept here.

    Raises:
        ValueError: this Python came without them.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as missing:
        raise ValueError("this Python ships no pydoc_data; name a text of your own with --text") from missing
    return "\n\n".join(topics[name] for name in sorted(topics)).encode()


def draw_batches(text: bytes, steps: int, batch_size: int, length: int, seed: int) -> list[Batch]:
    """Cut ``steps`` batches from ``text`` at random places: a byte is a token, the next one its target.

    Raises:
        ValueError: the text is too short for one sequence.
    """
    if len(text) <= length:
        raise ValueError(
            f"the text has {len(text)} bytes, but --sequence-length {length} needs more than that"
        )
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(seed)
    batches = []
    for _ in range(steps):
        starts = torch.randint(len(text) - length, (batch_size, 1), generator=chance)
        places = starts + torch.arange(length)
        batches.append((tokens[places], tokens[places + 1]))
    return batches


# ---------------------------------------------------------------------- the command line


def command_line() -> OneLineParser:
    """Return the parser; its defaults take about a minute on two cores."""
    parser = OneLineParser(
        prog="train_llama.py",
        description="Train a Llama that its device cannot hold, bit for bit as without limits.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=12, metavar="N", help="training steps of each run (%(default)s)")
    add("--layers", type=int, default=8, metavar="N", help="transformer layers (%(default)s)")
    add("--dim", type=int, default=512, metavar="N", help="the model's width (%(default)s)")
    add("--heads", type=int, default=8, metavar="N", help="attention heads (%(default)s)")
    add("--batch-size", type=int, default=2, metavar="N", help="sequences in a batch (%(default)s)")
    add("--sequence-length", type=int, default=128, metavar="N", help="bytes in a sequence (%(default)s)")
    add(
        "--keep-activations",
        action="store_true",
        help="keep them for backward instead of computing them again",
    )
    add("--max-device-memory", default="39MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--offload-cpu-size", default="128MB", metavar="SIZE", help="the host tier's quota (%(default)s)")
    add("--offload-disk-size", default="1GB", metavar="SIZE", help="the disk tier's quota (%(default)s)")
    add("--offload-path", type=Path, metavar="DIR", help="the disk tier's directory (a temporary one)")
    add("--text", type=Path, metavar="FILE", help="what to learn (the documentation inside Python)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and batches (%(default)s)")
    add("--picture", type=Path, metavar="FILE", help="draw what came of it, as SVG")
    add("--record", type=Path, metavar="FILE", help="write what the picture is drawn of, as JSON")
    parser.add_device()
    return parser


def read_job(arguments: argparse.Namespace, path: Path) -> Job:
    """Make the job of what the command line says, with the disk tier at ``path``.

    Raises:
        OSError: the text cannot be read.
        ValueError: an argument is wrong; `tierstore.ConfigError` is a ``ValueError``, too.
    """
    check_counts(arguments, "steps", "batch_size", "sequence_length")
    device = device_of(arguments.device)
    shape = LlamaConfig(
        dim=arguments.dim,
        layers=arguments.layers,
        heads=arguments.heads,
        is_recomputed=not arguments.keep_activations,
    )
    config = ts.OffloadConfig.from_mapping(
        {
            "device": arguments.device,
            "max_device_memory": arguments.max_device_memory,
            "offload_cpu_size": arguments.offload_cpu_size,
            "offload_disk_size": arguments.offload_disk_size,
            "offload_path": str(path),
        }
    )
    text = arguments.text.read_bytes() if arguments.text else documentation_text()
    name = arguments.text or "the documentation inside Python"
    batches = draw_batches(
        text, arguments.steps, arguments.batch_size, arguments.sequence_length, arguments.seed
    )
    return Job(shape, arguments.seed, batches, f"{name} ({len(text):,} bytes)", device, config)
