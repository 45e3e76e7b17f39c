"""Train ResNet-50 with a batch whose activations its device cannot hold.

The reference example of memory offload, on PyTorch.  With ``--memory-offload OFF`` it runs out of device
memory; with ``ON`` activations leave the device after forward and come back for backward, and it
trains.  ``--compare`` trains once more without limits: every loss must be the same, to the last bit.

    python docs/examples/train_resnet50.py --memory-offload OFF
    python docs/examples/train_resnet50.py --memory-offload ON --compare
    python docs/examples/train_resnet50.py --data cifar-10-batches-bin --batch-size 512 --image-size 224 \
        --max-device-memory 30GB --offload-cpu-size 512GB --offload-disk-size 1024GB

Exit code 0: trained (and equal); 1: out of device memory, or not equal; 2: the command line was wrong.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import tierstore as ts
from device_budget import AllocatorBudget, device_budget, make_deterministic, moved_to_device
from llama_report import mebibytes
from resnet50 import ResNet
from resnet50_job import Job, command_line, read_job
from tierstore.training import offload


def train(model: nn.Module, optimizer: torch.optim.Optimizer, job: Job) -> list[float]:
    """Train on the job's batches, print each loss and return them all: an ordinary PyTorch loop."""
    criterion = nn.CrossEntropyLoss()
    losses = []
    for epoch, step, (images, labels) in job.batches():
        loss = criterion(model(images.to(job.device)), labels.to(job.device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(f"epoch: {epoch} step: {step}, loss is {losses[-1]}", flush=True)
    return losses


def new_model(job: Job) -> ResNet:
    """Build the model in host memory: the same parameters every time."""
    torch.manual_seed(job.seed)
    return ResNet()


def new_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The reference's momentum SGD."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def train_under_budget(job: Job) -> tuple[list[float], int]:
    """Train with what the device may hold; return the losses and the device's peak in bytes.

    Raises:
        torch.OutOfMemoryError: more would be needed.
    """
    is_on = ts.OffloadConfig.from_document(job.offload).is_on
    model = new_model(job)
    with device_budget(job.device, job.max_device_memory) as budget:
        if not is_on:
            if isinstance(budget, AllocatorBudget):
                budget.enforce()
            model = moved_to_device(model, job.device)
        optimizer = new_optimizer(model)
        with offload(model, optimizer, job.offload, layers="layers") as run:
            losses = train(model, optimizer, job)
            if is_on:
                tell_traffic(run.store)
        return losses, budget.peak_bytes


def train_without_limits(job: Job) -> list[float]:
    """Train with plain PyTorch and all the memory it likes."""
    model = new_model(job).to(job.device)
    return train(model, new_optimizer(model), job)


def tell_traffic(store: ts.Store) -> None:
    """Print what went from tier to tier."""
    for (source, target), traffic in sorted(store.stats().traffic.items()):
        print(f"{source} -> {target}: {traffic.copies} copies, {mebibytes(traffic.nbytes)}")


def tell(job: Job, *, is_compared: bool) -> bool:
    """Train and print what came of it; return whether all is as promised."""
    print(
        f"ResNet-50 learns {job.images.name} in batches of {job.batch_size}, {job.image_size} pixels a side; "
        f"the device may hold {job.max_device_memory}."
    )
    losses, peak_bytes = train_under_budget(job)
    print(f"peak on the device: {mebibytes(peak_bytes)} of {job.max_device_memory}")
    if not is_compared:
        return True
    print("the same without limits:")
    plain = train_without_limits(job)
    same = sum(ours == theirs for ours, theirs in zip(losses, plain, strict=True))
    print(f"{same} of {len(plain)} losses are equal, bit for bit")
    return same == len(plain)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the example and return its exit code."""
    parser = command_line()
    arguments = parser.parse_args(argv)
    with contextlib.ExitStack() as stack:
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
            return 0 if tell(job, is_compared=arguments.compare) else 1
        except (ts.TierStoreError, torch.OutOfMemoryError) as failure:
            print(f"{parser.prog}: {type(failure).__name__}: {failure}", file=sys.stderr)
            return 1


if __name__ == "__main__":
    sys.exit(main())
