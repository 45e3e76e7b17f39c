"""Opens a model and says what memory that took.

``python -m tests.integrations.transformers_victim FOLDER WHAT``.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import torch

from tests.integrations.transformers_kinds import tokens
from tierstore.integrations.transformers_models import from_config, from_pretrained
from tierstore.training import offload

QUOTA = "24MB"


def peak_bytes() -> int:
    """Return the most memory that the process had so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main(folder: Path, what: str) -> None:
    """Open a model and compute with it; print its bytes, and what memory was needed beside the imports'."""
    torch.set_num_threads(1)
    before_bytes = peak_bytes()
    model, weights = (from_pretrained if what == "files" else from_config)(folder / "model")
    config = {
        "device": "cpu",
        "offload_cpu_size": QUOTA,
        "offload_disk_size": "1GB",
        "offload_path": str(folder / "files"),
        "host_mem_block_size": "16MB",
    }
    with offload(model, None, config, weights=weights, on_close="release"), torch.no_grad():
        assert bool(model(tokens()).logits.isfinite().all())
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    sys.stdout.write(f"{nbytes} {peak_bytes() - before_bytes}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
