"""What somebody does next who has just installed tierstore."""

from __future__ import annotations

from tierstore import __version__

LOOP = """\
import torch
from tierstore.training import offload

model = torch.nn.Sequential(*[torch.nn.Linear(256, 256) for _ in range(16)])
optimizer = torch.optim.AdamW(model.parameters())
with offload(model, optimizer, {"device": "emulated", "max_device_memory": "8MB"}) as run:
    for _ in range(3):
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    print(run.stats().tiers["device"])
"""
"""A program that trains on any machine."""

_TEXT = """\
tierstore {version}: tensors in device memory, host memory and on disk, within a quota for each.

1. See what this machine offers, and what is missing for more:
     tierstore doctor .
2. See whether a model fits, how fast a step will be, and have the YAML written that a run takes:
     tierstore plan models:build --max-device-memory 16GB --write run.yaml
   If you come from DeepSpeed or Accelerate:
     tierstore convert ds_config.json -o run.yaml
3. Train.  These lines run anywhere; without a GPU the device is an emulated one:

{loop}
4. Read: docs/index.md in the sources begins with a tutorial, docs/how-to/choose-a-mode.md says which
   of all this you need.  `tierstore --help` lists the verbs; all of them work as `python -m tierstore VERB`.
"""


def print_first_steps() -> int:
    """Print them; return the exit code."""
    loop = "".join(f"     {line}\n" if line else "\n" for line in LOOP.splitlines())
    print(_TEXT.format(version=__version__, loop=loop), end="")
    return 0
