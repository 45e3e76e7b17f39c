"""What passes without gradients copy: nothing, once a model that fits in a device's quota is there.

``forwards-copied`` is the bytes that 48 forwards of a model copy to a device whose quota holds all of it,
over the model's own: 1 is each weight once.
"""

from __future__ import annotations

import sys

import torch

import tierstore as ts
from bench.command import Question, Settings, main
from bench.record import Better, Figure
from bench.workload import BATCH, Workload, wait_for_copies
from tierstore.training import offload

FORWARDS = 48
MIB = 1024**2


def forwards_copied(settings: Settings) -> Figure:
    """Run a model forward again and again, and count what goes to the device."""
    workload = Workload.scaled(0.01 * settings.scale)
    model, alone = workload.new_model(), workload.new_model()
    x = torch.randn(BATCH, workload.dim, generator=torch.Generator().manual_seed(1))
    quota_bytes = 2 * workload.parameter_bytes
    config = ts.OffloadConfig(
        device="emulated",
        max_device_memory=quota_bytes,
        offload_cpu_size=4 * workload.parameter_bytes,
        offload_disk_size=0,
    )
    copied: list[int] = []
    with torch.no_grad(), offload(model, None, config) as run:
        for _ in range(FORWARDS):
            if not torch.equal(model(x), alone(x)):
                raise AssertionError("an output differs from plain PyTorch's")
            wait_for_copies(run.store)
            traffic = run.store.stats().traffic.get(("host", "device"))
            copied.append(0 if traffic is None else traffic.nbytes)
    details = {
        "the model": f"{workload.parameter_bytes / MIB:.2f} MiB",
        "quota": f"{quota_bytes / MIB:.2f} MiB",
        "copied by the first forward": f"{copied[0] / MIB:.2f} MiB",
        f"copied by {FORWARDS}": f"{copied[-1] / MIB:.2f} MiB",
        "outputs": "equal to plain PyTorch's, bit for bit",
    }
    what = (
        f"bytes copied by {FORWARDS} forwards without gradients of a model that fits the device, over its own"
    )
    reached = copied[-1] / workload.parameter_bytes
    return Figure("forwards-copied", what, reached, "x its bytes", 1.0, 1.0, Better.LOWER, details)


QUESTIONS: dict[str, Question] = {"forwards-copied": forwards_copied}

if __name__ == "__main__":
    sys.exit(main("bench.forwards", QUESTIONS))
