"""Train a net of which some modules compute on the host, on one process or on several.

The reference example of host and device, on PyTorch: matrix products and additions on the host, the rest on
the device, data parallel.  What is placed is logged.  ``--compare`` trains once more with plain PyTorch:
every loss must be the same, to the last bit.

    python docs/examples/train_host_device.py --compare
    torchrun --nproc-per-node 8 --redirects 3 --log-dir log_output docs/examples/train_host_device.py \
        --data MNIST

Exit code 0: trained (and equal); 1: out of memory, or not equal; 2: the command line was wrong.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import tierstore as ts
from arguments import shown_log
from device_budget import make_deterministic
from host_device import PLACEMENT, Network
from host_device_job import Job, command_line, read_job
from tierstore.training import offload


@contextlib.contextmanager
def process_group(job: Job) -> Iterator[None]:
    """Join the other processes, if there are any."""
    if job.share.processes == 1:
        yield
        return
    distributed.init_process_group("gloo" if job.device.type == "cpu" else "cpu:gloo,cuda:nccl")
    try:
        yield
    finally:
        distributed.destroy_process_group()


def data_parallel(model: nn.Module, job: Job) -> nn.Module:
    """Let gradients be averaged over the processes; all of them have the same parameters already."""
    if job.share.processes == 1:
        return model
    return DistributedDataParallel(model, init_sync=False)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> list[float]:
    """Train on this process's batches and return the losses: an ordinary PyTorch loop."""
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch in range(job.epochs):
        for step, (images, labels) in enumerate(job.batches(epoch)):
            loss = criterion(model(images.to(job.device)), labels.to(job.device))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if step % job.told_every == 0:
                print(f"epoch: {epoch}, step: {step}, loss is {losses[-1]:.7f}", flush=True)
    return losses


def new_model(job: Job) -> Network:
    """Build the model: the same parameters every time, and in every process."""
    torch.manual_seed(job.seed)
    return Network()


def train_placed(job: Job) -> list[float]:
    """Train with modules where they are placed."""
    model = new_model(job)
    optimizer = torch.optim.SGD(model.parameters(), job.learning_rate)
    with offload(model, optimizer, job.offload, placement=PLACEMENT if job.is_placed else {}):
        return train(data_parallel(model, job), optimizer, job)


def train_plain(job: Job) -> list[float]:
    """Train with plain PyTorch, all of it on the device."""
    model = new_model(job).to(job.device)
    optimizer = torch.optim.SGD(model.parameters(), job.learning_rate)
    return train(data_parallel(model, job), optimizer, job)


def tell(job: Job, *, is_compared: bool) -> bool:
    """Train and print what came of it; return whether all is as promised."""
    share = job.share
    print(f"process {share.rank} of {share.processes} learns {job.images.name}", flush=True)
    losses = train_placed(job)
    if not is_compared:
        return True
    print("the same with plain PyTorch:")
    plain = train_plain(job)
    same = sum(ours == theirs for ours, theirs in zip(losses, plain, strict=True))
    print(f"{same} of {len(plain)} losses are equal, bit for bit", flush=True)
    return same == len(plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
        stack.enter_context(shown_log("[%(levelname)s] %(message)s"))
        path = arguments.offload_path or Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix="tierstore-"))
        )
        try:
            job = read_job(arguments, path)
            ts.OffloadConfig.from_document(job.offload)
        except (OSError, ValueError) as wrong:
            parser.error(str(wrong))
        make_deterministic(job.device)
        try:
            with process_group(job):
                return 0 if tell(job, is_compared=arguments.compare) else 1
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
