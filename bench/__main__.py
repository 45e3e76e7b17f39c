"""All figures, one after the other: ``python -m bench``."""

from __future__ import annotations

import sys

from bench import budget, store, training
from bench.command import FIGURES, main

if __name__ == "__main__":
    questions = store.QUESTIONS | training.QUESTIONS | budget.QUESTIONS
    sys.exit(main("bench", {name: questions[name] for name in FIGURES}))
