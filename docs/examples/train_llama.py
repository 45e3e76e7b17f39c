"""Train a language model that its device cannot hold, and get the same losses to the last bit.

What happens, in this order:

1. `run_without_offload`: the usual loop, under a device budget far below what the model needs, runs
   out of device memory.
2. `run_with_offload`: the same loop inside ``with offload(model, optimizer, config)``.  Parameters,
   gradients and AdamW's moments live in three tiers (device, host memory, disk), and it trains.
3. `run_unlimited`: the same loop without offloading and without a budget.  Every loss and every final
   parameter of the second run must equal this one's.

Where there is no accelerator the device is *emulated*: it computes in host memory, but a meter that
knows nothing of tierstore counts every live tensor and raises beyond the budget.  Run it with::

    python docs/examples/train_llama.py         # or: make run
    python docs/examples/train_llama.py --text my.txt --layers 12 --max-device-memory 64MB
    python docs/examples/train_llama.py --picture run.svg

Exit code 0: trained, equal, within the budget; 1: not so; 2: the command line was wrong.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from tqdm import tqdm

import tierstore as ts
from device_budget import AllocatorBudget, device_budget, make_deterministic, moved_to_device
from llama import Llama
from llama_job import Job, command_line, read_job
from llama_picture import write_picture
from llama_record import RunRecord, TierRecord, by_step, sampled, tiers_of, write_record
from llama_report import History, print_job, print_losses, print_peak, print_table, print_times, tier_rows
from tierstore.training import offload

# ---------------------------------------------------------------------- the loop


def train(
    model: Llama, optimizer: torch.optim.Optimizer, job: Job, title: str
) -> tuple[list[float], list[float]]:
    """Train on the job's batches; return the losses and seconds of the steps.

    An ordinary PyTorch loop: nothing in it knows whether the model is offloaded.
    """
    losses, step_s = [], []
    with tqdm(job.batches, desc=f"  {title}", unit="step", disable=None) as progress:
        for tokens, targets in progress:
            begun = time.perf_counter()
            logits = model(tokens.to(job.device))
            loss = cross_entropy(logits.flatten(0, 1), targets.to(job.device).flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step_s.append(time.perf_counter() - begun)
            progress.set_postfix(loss=f"{losses[-1]:.4f}")
    return losses, step_s


def new_model(job: Job) -> Llama:
    """Build the model in host memory: the same parameters every time."""
    torch.manual_seed(job.seed)
    return Llama(job.shape)


def new_optimizer(model: Llama) -> torch.optim.Optimizer:
    """AdamW, which keeps two more tensors for every parameter."""
    return torch.optim.AdamW(model.parameters(), lr=3e-4)


def parameters_of(model: Llama) -> dict[str, Tensor]:
    """Return every parameter by name, in host memory."""
    return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------------- the three runs


@dataclass(frozen=True)
class MemoryUse:
    """What the offloaded run had.

    Attributes:
        rows: a table of what the store counted itself.
        tiers: the same for the picture.
        samples: what was live on the device, as the meter saw it from outside: seconds, bytes.
        peak_bytes: the most of that.
    """

    rows: list[list[str]]
    tiers: list[TierRecord]
    samples: list[tuple[float, int]]
    peak_bytes: int


def run_without_offload(job: Job) -> str | None:
    """Train as usual under the budget; return the error that ended it, or ``None`` if it all fitted."""
    model = new_model(job)
    try:
        with device_budget(job.device, job.budget_bytes) as budget:
            if isinstance(budget, AllocatorBudget):
                budget.enforce()
            model = moved_to_device(model, job.device)
            optimizer = new_optimizer(model)
            with offload(model, optimizer, {"memory_offload": "OFF"}):
                train(model, optimizer, job, "OFF")
    except torch.OutOfMemoryError as error:
        return f"{type(error).__name__}: {error}"
    return None


def run_with_offload(job: Job) -> tuple[History, MemoryUse]:
    """Train under the budget with the state in three tiers; return also what it used."""
    model = new_model(job)
    optimizer = new_optimizer(model)
    with device_budget(job.device, job.budget_bytes) as budget:
        with offload(model, optimizer, job.config) as run:
            with sampled(budget) as samples:
                losses, step_s = train(model, optimizer, job, "ON")
            rows, tiers = tier_rows(run.store), tiers_of(run.store, job.config)
        peak_bytes = budget.peak_bytes
    # The store is closed here, and the parameters are ordinary tensors again.
    return History(losses, step_s, parameters_of(model)), MemoryUse(rows, tiers, samples, peak_bytes)


def run_unlimited(job: Job) -> History:
    """Train with plain PyTorch and all the memory it likes: what the second run has to equal."""
    model = new_model(job).to(job.device)
    optimizer = new_optimizer(model)
    losses, step_s = train(model, optimizer, job, "unlimited")
    return History(losses, step_s, parameters_of(model))


# ---------------------------------------------------------------------- all of it


def tell(job: Job) -> RunRecord:
    """Do the three runs, print what came of them, and return that."""
    print_job(job)
    print("1. memory_offload OFF, under the budget")
    error = run_without_offload(job)
    print(f"  {error or 'It fits: nothing to offload. Try a smaller --max-device-memory.'}\n")
    print("2. memory_offload ON, under the same budget", flush=True)
    offloaded, used = run_with_offload(job)
    print("3. no offloading, no budget", flush=True)
    unlimited = run_unlimited(job)
    print()
    is_equal = print_losses(offloaded, unlimited)
    print_peak(used.peak_bytes, job.budget_bytes)
    print_table(used.rows)
    print_times(offloaded, unlimited)
    return RunRecord(
        model=f"a Llama of {job.shape.parameters / 1e6:.1f} M parameters",
        parameters=job.shape.parameters,
        state_bytes=job.state_bytes,
        budget_bytes=job.budget_bytes,
        ended_by=error,
        offloaded=offloaded.losses,
        unlimited=unlimited.losses,
        is_equal=is_equal,
        peak_bytes=used.peak_bytes,
        tiers=used.tiers,
        memory=by_step(used.samples, offloaded.step_s),
    )


def show(record: RunRecord, arguments: argparse.Namespace) -> None:
    """Draw and write what the command line asks for."""
    if arguments.record is not None:
        write_record(record, arguments.record)
    if arguments.picture is not None:
        write_picture(record, arguments.picture)
        print(f"  the picture of it: {arguments.picture}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="tierstore-") as scratch:
        try:
            job = read_job(arguments, arguments.offload_path or Path(scratch))
        except (OSError, ValueError) as wrong:
            parser.error(str(wrong))
        make_deterministic(job.device)
        try:
            record = tell(job)
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1
        show(record, arguments)
    return 0 if record.is_equal and record.peak_bytes <= record.budget_bytes else 1


if __name__ == "__main__":
    sys.exit(main())
