"""What tierstore promises to reach, each figure measured against its peer in the same run.

Rule 1: a figure and its peer take turns, round by round, in one process tree on one machine; what is
reported is the median of the rounds' ratios.  (Figures without a peer are medians.)
Rule 2: what was moved is checked afterwards: a wrong byte fails the run.
Rule 3: a result carries the machine, the versions, the commit and the command that made it.

Rule 4: both sides run with what docs/how-to/choose-quotas.md advises for computing on the CPU.

``python -m bench`` measures all of them, ``python -m bench.store --figure lease`` one; ``--write``
records results in ``docs/benchmarks``.  Uses public names of tierstore only, and the models of
``docs/examples``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Read by OpenMP and by PyTorch when they are loaded, which is later.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

sys.path.append(str(Path(__file__).resolve().parent.parent / "docs" / "examples"))
