"""``python -m bench JOBFILE...`` runs fio job files; without one, all figures, one after the other."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from bench import (
    activations,
    budget,
    cached_rows,
    forwards,
    gpus,
    host_steps,
    keys,
    parts,
    planned,
    processes,
    quotas,
    shards,
    simulated,
    store,
    tables,
    trainer,
    training,
    watched,
)
from bench.command import FIGURES, main
from bench.fio.command import main as run_job_files

MODULES = (
    store,
    keys,
    parts,
    cached_rows,
    training,
    processes,
    quotas,
    budget,
    forwards,
    activations,
    simulated,
    tables,
    host_steps,
    planned,
    watched,
    trainer,
    shards,
    gpus,
)
"""Those that have the questions of all figures."""


def names_a_job_file(argv: Sequence[str]) -> bool:
    """Say whether the command line is about job files: one is named, or none of the figures' options is."""
    return any(word.endswith(".fio") or Path(word).is_file() for word in argv) or "--showcmd" in argv


if __name__ == "__main__":
    if names_a_job_file(sys.argv[1:]):
        sys.exit(run_job_files())
    questions = {name: ask for module in MODULES for name, ask in module.QUESTIONS.items()}
    sys.exit(main("bench", {name: questions[name] for name in FIGURES}))
