"""Opens a model, and saves it if it is told to, and says what memory that took.

``python -m tests.integrations.transformers_victim FOLDER WHAT``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from tests.integrations.transformers_kinds import tokens
from tierstore.integrations.transformers_models import from_config, from_pretrained
from tierstore.training import offload

QUOTA = "24MB"
SHARD = "8MB"


def peak_bytes() -> int:
    """Return the most memory that the process had; `getrusage` would say what its parent had."""
    return _status_bytes("VmHWM")


def peak_anew_bytes() -> int:
    """Forget the most memory that the process had; return what it has now."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status_bytes("VmRSS")


def _status_bytes(name: str) -> int:
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def main(folder: Path, what: str) -> None:
    """Open a model and compute with it; print its bytes, and what memory was needed beside the imports'.

    To be ``saved`` it is written in shards, and what is printed is what memory that needed beside the run's.
    """
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
    with offload(model, None, config, weights=weights, on_close="release") as run, torch.no_grad():
        assert bool(model(tokens()).logits.isfinite().all())
        if what == "saved":
            before_bytes = peak_anew_bytes()
            with run.late_state_dicts("meta"):
                model.save_pretrained(folder / "saved", max_shard_size=SHARD)
    nbytes = sum(each.numel() * each.element_size() for each in model.parameters())
    sys.stdout.write(f"{nbytes} {peak_bytes() - before_bytes}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
