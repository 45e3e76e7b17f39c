"""What tests of tierstore, of a backend or of a training loop need: shipped, because others write them too.

`conformance` is the suite that every backend passes, `faults` makes failures and races on demand,
`batching` makes them happen inside a batch, and `memory` meters live device bytes and enforces a
budget.  `conformance` needs pytest and is imported by name; the rest needs nothing more than
tierstore does.
"""

from tierstore.testing import batching as batching
from tierstore.testing import faults as faults
from tierstore.testing import memory as memory

__all__ = ["batching", "faults", "memory"]
