"""One training run in a process of its own, whose peak of resident memory nobody else raises.

``python -m bench.resident {plain,memory,disk} DIM STEPS PATH`` prints the peak and the losses as
JSON.  For `bench.training`, which starts it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import tierstore as ts
from bench.training import in_memory, on_disk
from bench.workload import Trainee, Workload


def peak_resident_bytes() -> int:
    """Return the kernel's high-water mark of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this kernel reports no VmHWM")


def train(how: str, workload: Workload, steps: int, path: Path) -> dict[str, object]:
    """Train as ``how`` says; return the losses, exactly, and the peaks before, after, and once closed.

    Closing brings everything back into ordinary memory, which is more than training itself took.
    """
    before_bytes = peak_resident_bytes()
    configs: dict[str, ts.OffloadConfig | None] = {
        "plain": None,
        "memory": in_memory(workload),
        "disk": on_disk(workload, path),
    }
    with Trainee(workload, configs[how]) as trainee:
        for _ in range(steps):
            trainee.step()
        losses = [float(loss).hex() for loss in trainee.losses]
        peak_bytes = peak_resident_bytes()
    closed_bytes = peak_resident_bytes()
    return {
        "before_bytes": before_bytes,
        "peak_bytes": peak_bytes,
        "closed_bytes": closed_bytes,
        "losses": losses,
    }


if __name__ == "__main__":
    how, dim, steps, path = sys.argv[1:]
    print(json.dumps(train(how, Workload(int(dim)), int(steps), Path(path))))
