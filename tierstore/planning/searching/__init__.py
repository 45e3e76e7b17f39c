"""Which placement of a program on a machine is fast, how far from the best it can be, and what makes it fit.

Pure: a program, a machine and a limit to the work in, a decision out.  Counts bound the work, never clocks,
so that the same question always has the same answer.
"""

from tierstore.planning.searching.alternatives import Levers, todays
from tierstore.planning.searching.bound import Solve, SparseRows, lower_bound
from tierstore.planning.searching.choosing import Choice, Effort, Rejected, search
from tierstore.planning.searching.envelope import Optimum, optimum
from tierstore.planning.searching.estimate import Estimate, estimate
from tierstore.planning.searching.remedies import Remedy, remedies, told

__all__ = [
    "Choice",
    "Effort",
    "Estimate",
    "Levers",
    "Optimum",
    "Rejected",
    "Remedy",
    "Solve",
    "SparseRows",
    "estimate",
    "lower_bound",
    "optimum",
    "remedies",
    "search",
    "todays",
    "told",
]
