"""Train a Llama whose activations are swapped and recomputed as a YAML file says.

The four files in ``activations/`` are those of the reference.  What is swapped and recomputed is logged;
the losses are compared with those of plain PyTorch, and what the device held with and without.

    python docs/examples/train_swapped.py docs/examples/activations/default.yaml
    python docs/examples/train_swapped.py --model transformers docs/examples/activations/hugging-face.yaml

Exit code 0: every loss is equal to the last bit; 1: not so; 2: the command line was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import tierstore as ts
from arguments import OneLineParser, check_counts, device_of, shown_log
from device_budget import device_budget, make_deterministic, moved_to_device
from llama import Llama, LlamaConfig
from llama_job import documentation_text, draw_batches
from llama_report import mebibytes
from tierstore.training import offload

LEARNING_RATE = 1e-3
UNLIMITED = 2**40  # bytes of device memory, where only the peak is of interest


class HuggingFaceLlama(nn.Module):
    """A Llama of ``transformers``, from a configuration: tokens in, logits out.

    Args:
        config: its sizes.

    Raises:
        ValueError: ``transformers`` is not installed.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        try:
            import transformers
        except ImportError as missing:
            raise ValueError("--model transformers needs the package: pip install transformers") from missing
        settings = transformers.LlamaConfig(
            vocab_size=config.vocabulary,
            hidden_size=config.dim,
            intermediate_size=config.hidden,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(settings)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map ``(batch, length)`` token numbers to ``(batch, length, vocabulary)`` logits."""
        logits: Tensor = self.model(input_ids=tokens).logits
        return logits


MODELS: Mapping[str, Callable[[LlamaConfig], nn.Module]] = {
    "llama": Llama,
    "transformers": HuggingFaceLlama,
}


def command_line() -> argparse.ArgumentParser:
    """Return the parser; its defaults take some seconds."""
    parser = OneLineParser(
        prog="train_swapped.py", description="Train with activations swapped and recomputed as a file says."
    )
    add = parser.add_argument
    add("config", type=Path, metavar="FILE", help="YAML with recompute_config and swap_config")
    add("--model", choices=tuple(MODELS), default="llama", help="whose Llama (%(default)s)")
    add("--steps", type=int, default=3, metavar="N", help="training steps of each run (%(default)s)")
    add("--dim", type=int, default=256, metavar="N", help="the model's width (%(default)s)")
    add("--heads", type=int, default=4, metavar="N", help="attention heads (%(default)s)")
    add("--batch-size", type=int, default=4, metavar="N", help="sequences in a batch (%(default)s)")
    add("--sequence-length", type=int, default=128, metavar="N", help="bytes in a sequence (%(default)s)")
    add("--max-device-memory", default="256MB", metavar="SIZE", help="the device's budget (%(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of parameters and batches (%(default)s)")
    parser.add_device()
    return parser


def read_document(path: Path) -> dict[str, object]:
    """Return what a YAML file says.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no mapping.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if isinstance(document, dict):
        return document
    raise ValueError(f"{path} is not a mapping of sections")


def layers_in(document: Mapping[str, object]) -> int:
    """Return the number of layers that a file asks for under ``model: model_config: num_layers``; or 4."""
    model = document.get("model")
    settings = model.get("model_config") if isinstance(model, dict) else None
    count = settings.get("num_layers", 4) if isinstance(settings, dict) else 4
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"num_layers is {count!r}; accepted: a whole number from 1 on")
    return count


def train(
    arguments: argparse.Namespace, config: Mapping[str, object], shape: LlamaConfig, budget: str | int
) -> tuple[list[float], int]:
    """Train on the device with ``config``; return the losses and the device's peak in bytes.

    Raises:
        torch.OutOfMemoryError: it took more than the budget.
    """
    device = device_of(arguments.device)
    batches = draw_batches(
        documentation_text(), arguments.steps, arguments.batch_size, arguments.sequence_length, arguments.seed
    )
    torch.manual_seed(arguments.seed)
    model = MODELS[arguments.model](shape)
    losses = []
    with device_budget(device, budget) as meter:
        if config.get("memory_offload") == "OFF":
            model = moved_to_device(model, device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        with offload(model, optimizer, config):
            for tokens, targets in batches:
                logits = model(tokens.to(device))
                loss = cross_entropy(logits.flatten(0, 1), targets.to(device).flatten())
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
        return losses, meter.peak_bytes


def tell(arguments: argparse.Namespace, document: Mapping[str, object], path: Path) -> bool:
    """Train with the file and without it, and print what came of it; return whether the losses are equal."""
    shape = LlamaConfig(
        dim=arguments.dim, heads=arguments.heads, layers=layers_in(document), is_recomputed=False
    )
    budget = arguments.max_device_memory
    context = document.get("context")
    config = {
        **document,
        "context": {**(context if isinstance(context, dict) else {}), "max_device_memory": budget},
        "offload_config": {"device": arguments.device, "offload_path": str(path)},
    }
    losses, peak_bytes = train(arguments, config, shape, budget)
    plain, plain_bytes = train(arguments, {"memory_offload": "OFF"}, shape, UNLIMITED)
    for step, (ours, theirs) in enumerate(zip(losses, plain, strict=True), start=1):
        print(f"step {step}: loss {ours:.6f}, without {theirs:.6f}")
    print(f"peak on the device: {mebibytes(peak_bytes)} of {budget}, without {mebibytes(plain_bytes)}")
    print("every loss is equal, bit for bit" if losses == plain else "the losses DIFFER")
    return losses == plain


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with (
        shown_log("-%(levelname)s - %(message)s"),
        tempfile.TemporaryDirectory(prefix="tierstore-") as scratch,
    ):
        try:
            check_counts(arguments, "steps", "dim", "heads", "batch_size", "sequence_length")
            document = read_document(arguments.config)
            make_deterministic(device_of(arguments.device))
            return 0 if tell(arguments, document, Path(scratch)) else 1
        except (OSError, ValueError) as wrong:
            parser.error(str(wrong))
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
